use super::*;
use proptest::prelude::*;

const NOW: Now = Now { ticks: 1_000 };

fn msrs() -> Msrs {
    Msrs::new(MsrConfig {
        facilities: Facilities::NATIVE,
        tsc_hz: 2_500_000_000,
        models: true,
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
    let status = bad
        .stored
        .iter_mut()
        .find(|(i, _)| *i == regs::IA32_MCG_STATUS)
        .unwrap();
    status.1 = 1 << 40;
    let error = MsrError::Value {
        index: regs::IA32_MCG_STATUS,
        value: 1 << 40,
    };
    assert_eq!(msrs.restore(&bad), Err(error));
    let mut bad = before.clone();
    bad.branch.debugctl = 1 << 40;
    assert!(matches!(msrs.restore(&bad), Err(MsrError::Branch(_))));
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
        models: true,
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

/// The use of resource control begins and ends for all processors at once, and they must hear of it.
#[test]
fn first_and_last_use_of_resource_control_is_the_packages() {
    let mut msrs = full();
    let (assoc, mask) = (regs::IA32_PQR_ASSOC, regs::IA32_L3_QOS_MASK_0);
    let steps = [
        (assoc, 0, Effect::None),
        (assoc, 5, Effect::PackageArmed),
        (mask, 0xf, Effect::None),
        (assoc, 0, Effect::None),
        (mask, 0x7ff, Effect::PackageArmed),
    ];
    for (index, value, effect) in steps {
        let done = WrmsrOutcome::Done(effect);
        assert_eq!(msrs.write(index, value, NOW), done, "{index:#x} {value:#x}");
    }
}

/// A processor with all that MSRs are about but transactions.
fn full() -> Msrs {
    Msrs::new(MsrConfig {
        facilities: Facilities::OBSERVED,
        tsc_hz: 2_500_000_000,
        models: true,
    })
}

/// Rules MSR-03, MSR-04, MSR-11, MSR-13 to MSR-22: every bit by itself, against the table of the
/// manual.
#[test]
fn bits_of_the_performance_monitor_fault_as_in_the_manual() {
    for (first, count, writable) in [
        (0xc1, 4, u64::MAX),
        (0x186, 4, 0xffff_ffff),
        (0x1a6, 2, 0x3f_ffff_8fff),
        (0x309, 3, 0xffff_ffff_ffff),
        (0x38d, 1, 0xfff),
        (0x38e, 1, 0),
        (0x38f, 1, 0x7_0000_000f),
        (0x390, 1, 0xfc00_0007_0000_000f),
        (0x391, 1, 0x7c00_0007_0000_000f),
        (0x392, 1, 0),
        (0x3f1, 1, 0xf_0000_000f),
        (0x3f6, 1, 0xffff),
        (0x3f7, 1, 0x7f_ff17),
        (0x4c1, 4, 0xffff_ffff_ffff),
    ] {
        for index in first..first + count {
            let mut msrs = full();
            for bit in 0..64 {
                let outcome = msrs.write(index, 1 << bit, NOW);
                let accepted = matches!(outcome, WrmsrOutcome::Done(_));
                assert_eq!(accepted, writable >> bit & 1 != 0, "{index:#x} bit {bit}");
            }
            let zero = matches!(msrs.write(index, 0, NOW), WrmsrOutcome::Done(_));
            assert_eq!(zero, writable != 0, "{index:#x}: 0");
        }
    }
    // Rule PMU-25.
    for index in [0xc5, 0x18a, 0x4c5, 0x30c] {
        let found = full().read(index, NOW);
        let absent = matches!(found, RdmsrOutcome::Fault | RdmsrOutcome::Unclaimed);
        assert!(absent, "{index:#x}");
    }
}

#[test]
fn performance_monitor_is_absent_without_the_facility() {
    for index in [
        0xc1, 0x186, 0x1a6, 0x309, 0x38d, 0x38f, 0x390, 0x392, 0x3f1, 0x4c1,
    ] {
        assert_eq!(msrs().read(index, NOW), RdmsrOutcome::Fault, "{index:#x}");
    }
    assert_eq!(msrs().rdpmc(0), None);
    assert_eq!(full().rdpmc(0), Some(0));
}

/// Rule PMU-13: transaction bits come with transactions, IN_TXCP for counter 2 only.
#[test]
fn transaction_bits_of_event_selections_follow_the_facility() {
    let mut with = Msrs::new(MsrConfig {
        facilities: Facilities::all(),
        tsc_hz: 2_500_000_000,
        models: true,
    });
    for index in 0x186..0x18a {
        assert_eq!(full().write(index, 1 << 32, NOW), WrmsrOutcome::Fault);
        assert!(matches!(
            with.write(index, 1 << 32, NOW),
            WrmsrOutcome::Done(_)
        ));
        let txcp = matches!(with.write(index, 1 << 33, NOW), WrmsrOutcome::Done(_));
        assert_eq!(txcp, index == 0x188, "{index:#x}");
    }
}

#[test]
fn counter_that_is_switched_on_arms() {
    const ON: u64 = 0x43_0000;
    let mut msrs = full();
    for (select, armed) in [
        (ON | 0x3c, Armed::PMU),
        (ON | 0xc0, Armed::PMU),
        (0xc0, Armed::empty()),
        (0x42_00c4, Armed::PMU),
    ] {
        let _ = msrs.write(0x186, select, NOW);
        assert_eq!(msrs.armed(), armed, "{select:#x}");
    }
    let _ = msrs.write(regs::IA32_PEBS_ENABLE, 1, NOW);
    assert_eq!(msrs.armed(), Armed::PMU | Armed::PEBS);
}
