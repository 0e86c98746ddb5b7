use super::*;
use proptest::prelude::*;

const NOW: Now = Now { ticks: 1_000 };

fn msrs() -> Msrs {
    Msrs::new(MsrConfig {
        facilities: Facilities::NATIVE,
        tsc_hz: 2_500_000_000,
    })
}

#[test]
fn table_is_sorted_and_rows_do_not_overlap() {
    for pair in table::TABLE.windows(2) {
        assert!(
            pair[0].index + pair[0].count <= pair[1].index,
            "{} {}",
            pair[0].name,
            pair[1].name
        );
    }
}

#[test]
fn every_reset_value_reads_back_as_the_row_says() {
    let msrs = msrs();
    for spec in table::TABLE
        .iter()
        .filter(|s| matches!(s.owner, Owner::Stored | Owner::Constant))
    {
        let expected = if spec.present(&msrs.config) {
            RdmsrOutcome::Value(spec.reset_value(spec.index, &msrs.config))
        } else {
            RdmsrOutcome::Fault
        };
        assert_eq!(msrs.read(spec.index, NOW), expected, "{}", spec.name);
    }
}

#[test]
fn every_reserved_bit_faults_and_changes_nothing() {
    for spec in table::TABLE.iter().filter(|s| s.owner == Owner::Stored) {
        let mut msrs = msrs();
        let before = msrs.save();
        let reserved = spec.reserved_bits(&msrs.config) & !spec.read_only;
        for bit in (0..64).filter(|bit| reserved & 1 << bit != 0) {
            let outcome = msrs.write(spec.index, 1 << bit, NOW);
            assert_eq!(outcome, WrmsrOutcome::Fault, "{} bit {bit}", spec.name);
        }
        assert_eq!(msrs.save(), before, "{}", spec.name);
    }
}

#[test]
fn wrmsr_misc_enable_keeps_the_read_only_bits() {
    let mut msrs = msrs();
    let RdmsrOutcome::Value(reset) = msrs.read(regs::IA32_MISC_ENABLE, NOW) else {
        panic!()
    };
    assert_eq!(reset, 0x5_1809, "bits 0, 3, 11, 12, 16, 18");
    assert_eq!(
        msrs.write(regs::IA32_MISC_ENABLE, 0, NOW),
        WrmsrOutcome::Done(Effect::Mirror(0x1800))
    );
    assert_eq!(
        msrs.read(regs::IA32_MISC_ENABLE, NOW),
        RdmsrOutcome::Value(0x1800)
    );
}

#[test]
fn wrmsr_debugctl_without_facilities_faults() {
    let mut msrs = msrs();
    assert_eq!(msrs.write(regs::IA32_DEBUGCTL, 1, NOW), WrmsrOutcome::Fault);
    assert_eq!(
        msrs.write(regs::IA32_DEBUGCTL, 0, NOW),
        WrmsrOutcome::Done(Effect::None)
    );
}

#[test]
fn perf_capabilities_is_absent_without_any_facility_in_it() {
    assert_eq!(
        msrs().read(regs::IA32_PERF_CAPABILITIES, NOW),
        RdmsrOutcome::Fault
    );
}

#[test]
fn constant_register_refuses_zero_too() {
    assert_eq!(
        msrs().write(regs::IA32_MTRRCAP, 0, NOW),
        WrmsrOutcome::Fault
    );
}

#[test]
fn bios_sign_id_accepts_and_drops_every_write() {
    let mut msrs = msrs();
    assert_eq!(
        msrs.write(regs::IA32_BIOS_SIGN_ID, 0, NOW),
        WrmsrOutcome::Done(Effect::None)
    );
    assert_eq!(
        msrs.read(regs::IA32_BIOS_SIGN_ID, NOW),
        RdmsrOutcome::Value(0x0200_005e_0000_0000)
    );
}

#[test]
fn tsc_aux_upper_half_faults() {
    let mut msrs = msrs();
    assert_eq!(
        msrs.write(regs::IA32_TSC_AUX, 1 << 32, NOW),
        WrmsrOutcome::Fault
    );
    assert_eq!(
        msrs.write(regs::IA32_TSC_AUX, 7, NOW),
        WrmsrOutcome::Done(Effect::Mirror(7))
    );
}

#[test]
fn absent_registers_are_unclaimed() {
    for index in [
        0x40,
        0x1ce,
        0x1db,
        0x1dc,
        0xe7,
        0xc80,
        0x6a0,
        0x570,
        0x140,
        0xc001_0015,
    ] {
        assert_eq!(
            msrs().read(index, NOW),
            RdmsrOutcome::Unclaimed,
            "{index:#x}"
        );
    }
}

#[test]
fn restore_refuses_reserved_bits_and_keeps_the_old_state() {
    let mut msrs = msrs();
    let before = msrs.save();
    let mut bad = before.clone();
    let debugctl = bad
        .stored
        .iter_mut()
        .find(|(i, _)| *i == regs::IA32_DEBUGCTL)
        .unwrap();
    debugctl.1 = 1 << 40;
    let error = MsrError::Value {
        index: regs::IA32_DEBUGCTL,
        value: 1 << 40,
    };
    assert_eq!(msrs.restore(&bad), Err(error));
    assert_eq!(msrs.save(), before);
}

proptest! {
    #[test]
    fn any_writes_leave_a_state_that_restores_to_itself(
        writes in prop::collection::vec((0..table::TABLE.len(), 0..0x100_u32, any::<u64>(), any::<u64>()), 0..60)
    ) {
        let mut msrs = msrs();
        for (row, plus, value, mask) in writes {
            let spec = &table::TABLE[row];
            let _ = msrs.write(spec.index + plus % spec.count, value & mask, NOW);
        }
        let mut other = super::tests::msrs();
        prop_assert_eq!(other.restore(&msrs.save()), Ok(()));
        prop_assert_eq!(other.save(), msrs.save());
    }
}

#[test]
fn only_a_write_that_changes_what_is_armed_says_so() {
    let mut msrs = Msrs::new(MsrConfig {
        facilities: Facilities::all(),
        tsc_hz: 2_500_000_000,
    });
    let debugctl = regs::IA32_DEBUGCTL;
    let steps = [
        (debugctl, 0, Effect::None, Armed::empty()),
        (debugctl, 1, Effect::Armed, Armed::LBR),
        (debugctl, 1, Effect::None, Armed::LBR),
        // FREEZE_LBRS_ON_PMI arms nothing more.
        (debugctl, 1 | 1 << 11, Effect::None, Armed::LBR),
        (regs::IA32_MCG_STATUS, 1, Effect::None, Armed::LBR),
        (debugctl, 0b11 << 6, Effect::Armed, Armed::BTS),
        (debugctl, 0, Effect::Armed, Armed::empty()),
    ];
    for (index, value, effect, armed) in steps {
        assert_eq!(
            msrs.write(index, value, NOW),
            WrmsrOutcome::Done(effect),
            "{index:#x} {value:#x}"
        );
        assert_eq!(msrs.armed(), armed);
    }
    assert_eq!(msrs.write(debugctl, 1 << 2, NOW), WrmsrOutcome::Fault);
    assert_eq!(msrs.armed(), Armed::empty());
}
