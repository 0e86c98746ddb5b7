//! Tests of the routing and of single MSRs; those of all rows are in `table/tests.rs`.

use super::*;
use crate::model::CpuModel;
use proptest::prelude::*;

const NOW: Now = Now { ticks: 1_000 };

fn with(facilities: Facilities) -> Msrs {
    Msrs::new(MsrConfig {
        facilities,
        tsc_hz: 2_500_000_000,
        physical_bits: 46,
        speculation: 0,
        uarch: true,
        firmware: false,
        model: CpuModel::SkylakeServer,
    })
}

/// The MSRs of a processor under KVM.
fn msrs() -> Msrs {
    with(Facilities::KVM)
}

/// The MSRs of the default processor in the interpreter.
fn full() -> Msrs {
    with(Facilities::INTERP_DEFAULT)
}

fn armed(scope: ArmedScope) -> MsrEffect {
    MsrEffect {
        armed: Some(scope),
        ..MsrEffect::NONE
    }
}

#[test]
fn misc_enable_keeps_its_read_only_bits() {
    let mut msrs = msrs();
    let RdmsrOutcome::Value(reset) = msrs.read(regs::IA32_MISC_ENABLE, NOW) else {
        panic!()
    };
    assert_eq!(reset, 0x1809, "bits 0, 3, 11, 12");
    assert_eq!(
        msrs.write(regs::IA32_MISC_ENABLE, 0, NOW),
        WrmsrOutcome::Done(MsrEffect::mirror(0x1800))
    );
    assert_eq!(
        msrs.read(regs::IA32_MISC_ENABLE, NOW),
        RdmsrOutcome::Value(0x1800)
    );
}

#[test]
fn debugctl_without_facilities_rejects_every_bit() {
    let mut msrs = msrs();
    assert_eq!(msrs.write(regs::IA32_DEBUGCTL, 1, NOW), WrmsrOutcome::Fault);
    assert_eq!(
        msrs.write(regs::IA32_DEBUGCTL, 0, NOW),
        WrmsrOutcome::Done(MsrEffect::NONE)
    );
}

#[test]
fn perf_capabilities_without_its_facilities_is_absent() {
    assert_eq!(
        msrs().read(regs::IA32_PERF_CAPABILITIES, NOW),
        RdmsrOutcome::Fault
    );
}

#[test]
fn constant_register_rejects_a_write_of_zero() {
    assert_eq!(
        msrs().write(regs::IA32_MTRRCAP, 0, NOW),
        WrmsrOutcome::Fault
    );
}

#[test]
fn bios_sign_id_drops_every_write() {
    let mut msrs = msrs();
    assert_eq!(
        msrs.write(regs::IA32_BIOS_SIGN_ID, 0, NOW),
        WrmsrOutcome::Done(MsrEffect::NONE)
    );
    assert_eq!(
        msrs.read(regs::IA32_BIOS_SIGN_ID, NOW),
        RdmsrOutcome::Value(0x0200_005e_0000_0000)
    );
}

#[test]
fn tsc_aux_rejects_the_upper_half_and_is_mirrored() {
    let mut msrs = msrs();
    assert_eq!(
        msrs.write(regs::IA32_TSC_AUX, 1 << 32, NOW),
        WrmsrOutcome::Fault
    );
    assert_eq!(
        msrs.write(regs::IA32_TSC_AUX, 7, NOW),
        WrmsrOutcome::Done(MsrEffect::mirror(7))
    );
}

#[test]
fn registers_in_no_row_are_unclaimed() {
    for index in [
        0x44,
        0x1ce,
        0x1db,
        0x1dc,
        0xe7,
        0xc80,
        0x6a0,
        0x570,
        0x1b0,
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
fn restore_rejects_reserved_bits_and_keeps_the_old_state() {
    let mut msrs = msrs();
    let before = msrs.save();
    let mut bad = before.clone();
    let status = bad
        .stored
        .iter_mut()
        .find(|(i, _)| *i == regs::IA32_MCG_STATUS)
        .unwrap();
    status.1 = 1 << 40;
    let error = MsrStateError::Value {
        index: regs::IA32_MCG_STATUS,
        value: 1 << 40,
    };
    assert_eq!(msrs.restore(&bad), Err(error));
    let mut bad = before.clone();
    bad.branch.debugctl = 1 << 40;
    assert!(matches!(msrs.restore(&bad), Err(MsrStateError::Branch(_))));
    assert_eq!(msrs.save(), before);
}

proptest! {
    #[test]
    fn any_writes_leave_a_state_that_restores_to_itself(
        writes in prop::collection::vec(
            (0..table::TABLE.len(), 0..0x100_u32, any::<u64>(), any::<u64>()),
            0..60,
        )
    ) {
        let mut msrs = full();
        for (row, plus, value, mask) in writes {
            let spec = &table::TABLE[row];
            let _ = msrs.write(spec.index + plus % spec.count, value & mask, NOW);
        }
        let mut other = full();
        prop_assert_eq!(other.restore(&msrs.save()), Ok(()));
        prop_assert_eq!(other.save(), msrs.save());
    }
}

#[test]
fn write_reports_armed_facilities_only_if_they_change() {
    let mut msrs = with(Facilities::all());
    let debugctl = regs::IA32_DEBUGCTL;
    let changed = armed(ArmedScope::Vcpu);
    let steps = [
        (debugctl, 0, MsrEffect::NONE, Armed::empty()),
        (debugctl, 1, changed, Armed::LBR),
        (debugctl, 1, MsrEffect::NONE, Armed::LBR),
        // FREEZE_LBRS_ON_PMI arms nothing more.
        (debugctl, 1 | 1 << 11, MsrEffect::NONE, Armed::LBR),
        (regs::IA32_MCG_STATUS, 1, MsrEffect::NONE, Armed::LBR),
        (debugctl, 0b11 << 6, changed, Armed::BTS),
        (debugctl, 0, changed, Armed::empty()),
    ];
    for (index, value, effect, armed) in steps {
        let done = WrmsrOutcome::Done(effect);
        assert_eq!(msrs.write(index, value, NOW), done, "{index:#x} {value:#x}");
        assert_eq!(msrs.armed(), armed);
    }
    assert_eq!(msrs.write(debugctl, 1 << 2, NOW), WrmsrOutcome::Fault);
    assert_eq!(msrs.armed(), Armed::empty());
}

#[test]
fn first_and_last_use_of_resource_control_arms_the_package() {
    let mut msrs = full();
    let (assoc, mask) = (regs::IA32_PQR_ASSOC, regs::IA32_L3_QOS_MASK_0);
    let changed = armed(ArmedScope::Package);
    let steps = [
        (assoc, 0, MsrEffect::NONE),
        (assoc, 5, changed),
        (mask, 0xf, MsrEffect::NONE),
        (assoc, 0, MsrEffect::NONE),
        (mask, 0x7ff, changed),
    ];
    for (index, value, effect) in steps {
        let done = WrmsrOutcome::Done(effect);
        assert_eq!(msrs.write(index, value, NOW), done, "{index:#x} {value:#x}");
    }
}

#[test]
fn tsc_write_reports_that_the_tsc_moved() {
    let mut msrs = msrs();
    let moved = WrmsrOutcome::Done(MsrEffect {
        tsc_moved: true,
        ..MsrEffect::NONE
    });
    assert_eq!(msrs.write(regs::IA32_TIME_STAMP_COUNTER, 5, NOW), moved);
    assert_eq!(msrs.write(regs::IA32_TSC_ADJUST, 5, NOW), moved);
}

#[test]
fn mirrored_values_are_those_of_rows_that_kvm_must_know() {
    let mut msrs = msrs();
    let _ = msrs.write(regs::IA32_TSC_AUX, 7, NOW);
    let mirrored: Vec<_> = msrs.mirrored().collect();
    let expected = [
        (regs::IA32_MISC_ENABLE, 0x1809),
        (regs::IA32_FMASK, 0),
        (regs::IA32_TSC_AUX, 7),
    ];
    assert_eq!(mirrored, expected);
}

/// Rules MSR-03, MSR-04, MSR-11, MSR-13 to MSR-22.
#[test]
fn reserved_bits_of_the_performance_monitor_match_the_manual() {
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
fn performance_monitor_without_its_facility_is_absent() {
    for index in [
        0xc1, 0x186, 0x1a6, 0x309, 0x38d, 0x38f, 0x390, 0x392, 0x3f1, 0x4c1,
    ] {
        assert_eq!(msrs().read(index, NOW), RdmsrOutcome::Fault, "{index:#x}");
    }
    assert_eq!(msrs().rdpmc(0), Err(GpFault));
    assert_eq!(full().rdpmc(0), Ok(0));
}

/// Rule PMU-13.
#[test]
fn event_selections_have_transaction_bits_with_rtm_only() {
    let mut with = with(Facilities::all());
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
fn enabled_counter_arms_the_pmu() {
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

/// Writes to one MSR: those that are accepted, and those that fault and change nothing.
fn check_writes(index: u32, accepted: &[u64], refused: &[u64]) {
    let mut msrs = full();
    for &value in accepted {
        let outcome = msrs.write(index, value, NOW);
        assert!(
            matches!(outcome, WrmsrOutcome::Done(_)),
            "{index:#x} = {value:#x}"
        );
        assert_eq!(
            msrs.read(index, NOW),
            RdmsrOutcome::Value(value),
            "{index:#x}"
        );
    }
    let before = msrs.read(index, NOW);
    for &value in refused {
        let outcome = msrs.write(index, value, NOW);
        assert_eq!(outcome, WrmsrOutcome::Fault, "{index:#x} = {value:#x}");
        assert_eq!(msrs.read(index, NOW), before, "{index:#x}");
    }
}

#[test]
fn mtrr_accepts_existing_types_and_addresses_alone() {
    let (base, mask) = (regs::IA32_MTRR_PHYSBASE0 + 4, regs::IA32_MTRR_PHYSBASE0 + 5);
    let top = 0x3fff_ffff_f000;
    check_writes(
        base,
        &[0, 1, 4, 5, 0x1234_5006, top | 6],
        &[2, 3, 7, 8, 0xff, 0x106, 0x806, 1 << 46, 1 << 63],
    );
    check_writes(
        mask,
        &[0, 0x800, top | 0x800],
        &[1, 0x400, 1 << 46, 1 << 63],
    );
    check_writes(
        regs::IA32_MTRR_DEF_TYPE,
        &[0, 0xc06, 0x800, 0x405],
        &[2, 3, 7, 0xcff, 0x100, 0x200, 0x1000, 1 << 63],
    );
    for index in [
        regs::IA32_MTRR_FIX64K_00000,
        regs::IA32_MTRR_FIX16K_A0000,
        regs::IA32_MTRR_FIX4K_C0000 + 7,
    ] {
        check_writes(
            index,
            &[0, 0x0605_0401_0006_0504],
            &[2, 0x0300_0000_0000_0000, 0x0606_0606_0706_0606],
        );
    }
}

#[test]
fn mtrrs_are_as_firmware_leaves_them_without_firmware() {
    let msrs = full();
    let read = |index| msrs.read(index, NOW);
    let value = RdmsrOutcome::Value;
    assert_eq!(read(regs::IA32_MTRR_DEF_TYPE), value(0xc06));
    assert_eq!(read(regs::IA32_MTRR_PHYSBASE0), value(0xc000_0000));
    assert_eq!(read(regs::IA32_MTRR_PHYSBASE0 + 1), value(0x3fff_c000_0800));
    assert_eq!(read(regs::IA32_MTRR_PHYSBASE0 + 2), value(0));
    assert_eq!(
        read(regs::IA32_MTRR_FIX64K_00000),
        value(0x0606_0606_0606_0606)
    );
    assert_eq!(read(regs::IA32_MTRR_FIX16K_A0000), value(0));
    assert_eq!(
        read(regs::IA32_MTRR_FIX4K_C0000),
        value(0x0505_0505_0505_0505)
    );
}

#[test]
fn mtrrs_are_zero_in_a_processor_that_starts_in_firmware() {
    let config = MsrConfig::new(Facilities::INTERP_DEFAULT, 1_000_000_000);
    let msrs = Msrs::new(config.with_firmware(true));
    let variable = regs::IA32_MTRR_PHYSBASE0..regs::IA32_MTRR_PHYSBASE0 + 16;
    let fixed = [
        regs::IA32_MTRR_FIX64K_00000,
        regs::IA32_MTRR_FIX16K_80000,
        regs::IA32_MTRR_FIX16K_A0000,
    ];
    let fixed_4k = regs::IA32_MTRR_FIX4K_C0000..regs::IA32_MTRR_FIX4K_C0000 + 8;
    let all = variable.chain(fixed).chain(fixed_4k);
    for index in all.chain([regs::IA32_MTRR_DEF_TYPE]) {
        assert_eq!(msrs.read(index, NOW), RdmsrOutcome::Value(0), "{index:#x}");
    }
    assert_eq!(
        msrs.read(regs::IA32_MTRRCAP, NOW),
        RdmsrOutcome::Value(0x508)
    );
}

#[test]
fn saved_mtrr_with_a_type_that_does_not_exist_is_refused() {
    let mut msrs = full();
    let mut state = msrs.save();
    let mut stored = state.stored.iter_mut();
    let def_type = stored.find(|(index, _)| *index == regs::IA32_MTRR_DEF_TYPE);
    def_type.expect("a stored MSR").1 = 0xc07;
    assert_eq!(
        msrs.restore(&state),
        Err(MsrStateError::Value {
            index: regs::IA32_MTRR_DEF_TYPE,
            value: 0xc07,
        })
    );
}

#[test]
fn misc_enable_has_no_bits_of_facilities_that_cpuid_does_not_show() {
    let wrong = [16, 18, 22, 23, 34, 38].map(|bit| 9 | 1 << bit);
    check_writes(regs::IA32_MISC_ENABLE, &[], &wrong);
}

#[test]
fn power_and_thermal_registers_answer_as_switched_off() {
    let ratio = RdmsrOutcome::Value(25 << 8);
    let mut msrs = full();
    assert_eq!(msrs.read(regs::IA32_PERF_STATUS, NOW), ratio);
    assert_eq!(msrs.read(regs::IA32_PERF_CTL, NOW), ratio);
    for (index, value) in [
        (regs::IA32_FEATURE_CONTROL, 1),
        (regs::MSR_PPIN_CTL, 1),
        (regs::MSR_PKG_CST_CONFIG_CONTROL, 0x8000),
        (regs::IA32_PERF_STATUS, 0x1900),
        (regs::MSR_TURBO_RATIO_LIMIT, 0x1919_1919_1919_1919),
        (regs::MSR_PKG_C2_RESIDENCY, 0),
        (regs::MSR_CORE_C3_RESIDENCY + 1, 0),
    ] {
        assert_eq!(
            msrs.read(index, NOW),
            RdmsrOutcome::Value(value),
            "{index:#x}"
        );
        assert_eq!(
            msrs.write(index, value, NOW),
            WrmsrOutcome::Fault,
            "{index:#x}"
        );
    }
    for index in [
        regs::MSR_MISC_FEATURES_ENABLES,
        regs::IA32_CLOCK_MODULATION,
        regs::IA32_THERM_INTERRUPT,
        regs::IA32_THERM_STATUS,
        regs::MSR_POWER_CTL,
    ] {
        check_writes(index, &[0], &[1, 1 << 63]);
    }
}

#[test]
fn controls_of_speculation_exist_as_cpuid_shows_them() {
    let with = |speculation| {
        Msrs::new(MsrConfig {
            facilities: Facilities::INTERP_DEFAULT,
            tsc_hz: 2_500_000_000,
            physical_bits: 46,
            speculation,
            uarch: true,
            firmware: false,
            model: CpuModel::SkylakeServer,
        })
    };
    let read = |msrs: &Msrs, index| msrs.read(index, NOW);
    let mut msrs = with(0x9c00_0400);
    assert_eq!(
        msrs.write(regs::IA32_SPEC_CTRL, 7, NOW),
        WrmsrOutcome::Done(MsrEffect::NONE)
    );
    assert_eq!(read(&msrs, regs::IA32_SPEC_CTRL), RdmsrOutcome::Value(7));
    assert_eq!(
        msrs.write(regs::IA32_SPEC_CTRL, 8, NOW),
        WrmsrOutcome::Fault
    );
    for command in [regs::IA32_PRED_CMD, regs::IA32_FLUSH_CMD] {
        assert_eq!(
            msrs.write(command, 1, NOW),
            WrmsrOutcome::Done(MsrEffect::NONE)
        );
        assert_eq!(msrs.write(command, 2, NOW), WrmsrOutcome::Fault);
        assert_eq!(read(&msrs, command), RdmsrOutcome::Fault, "write-only");
    }
    let ibrs_all = |msrs: &Msrs| match read(msrs, regs::IA32_ARCH_CAPABILITIES) {
        RdmsrOutcome::Value(value) => value & 2 != 0,
        other => panic!("{other:?}"),
    };
    assert!(ibrs_all(&msrs));
    let mut msrs = with(0);
    assert!(!ibrs_all(&msrs));
    for index in [
        regs::IA32_SPEC_CTRL,
        regs::IA32_PRED_CMD,
        regs::IA32_FLUSH_CMD,
    ] {
        assert_eq!(read(&msrs, index), RdmsrOutcome::Fault);
        assert_eq!(msrs.write(index, 0, NOW), WrmsrOutcome::Fault);
    }
}
