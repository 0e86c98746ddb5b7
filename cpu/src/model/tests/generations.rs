//! What the processors of each generation have, through their CPUID and MSRs.

use hindsight_regs::branch::{DebugCtl, LbrCtl};
use hindsight_regs::cpuid::Feature;
use hindsight_regs::msr as regs;
use hindsight_regs::pmu::{EventSelect, FixedControl};

use crate::branch::{Branch, BranchClass};
use crate::cpuid::{CpuidConfig, CpuidTable};
use crate::facility::Facilities;
use crate::model::{CpuModel, LbrModel};
use crate::msr::{MsrConfig, Msrs, Now, RdmsrOutcome, WrmsrOutcome};
use crate::pmu::{EventKind, EventTotals, Ring};

const NOW: Now = Now { ticks: 0 };
const TSC_HZ: u64 = 2_500_000_000;

fn facilities(model: CpuModel) -> Facilities {
    model.definition().facilities
}

fn cpuid(model: CpuModel) -> CpuidTable {
    let config = CpuidConfig::new(model, facilities(model), TSC_HZ);
    CpuidTable::new(&config, |_, _| [u32::MAX; 4])
}

fn msrs(model: CpuModel) -> Msrs {
    Msrs::new(MsrConfig::new(facilities(model), TSC_HZ).with_cpuid(&cpuid(model)))
}

fn read(msrs: &Msrs, index: u32) -> Option<u64> {
    match msrs.read(index, NOW) {
        RdmsrOutcome::Value(value) => Some(value),
        _ => None,
    }
}

fn writes(msrs: &mut Msrs, index: u32, value: u64) -> bool {
    matches!(msrs.write(index, value, NOW), WrmsrOutcome::Done(_))
}

/// Model, IA32_PERF_CAPABILITIES, CPUID.0AH:EAX and entries of the LBR stack.
const ROWS: &[(CpuModel, u64, u32, u32)] = &[
    (CpuModel::SapphireRapids, 0xf4ff, 0x0830_0805, 32),
    (CpuModel::IcelakeServer, 0xf4c5, 0x0830_0805, 32),
    (CpuModel::SkylakeServer, 0x33c5, 0x0730_0404, 32),
    (CpuModel::CascadeLake, 0x33c5, 0x0730_0404, 32),
    (CpuModel::Skylake, 0x33c5, 0x0730_0404, 32),
    (CpuModel::Broadwell, 0x32c4, 0x0730_0403, 16),
    (CpuModel::Haswell, 0x32c4, 0x0730_0403, 16),
    (CpuModel::IvyBridge, 0x31c3, 0x0730_0403, 16),
    (CpuModel::SandyBridge, 0x11c3, 0x0730_0403, 16),
    (CpuModel::Westmere, 0x11c3, 0x0730_0403, 16),
    (CpuModel::Nehalem, 0x11c3, 0x0730_0403, 16),
    (CpuModel::Core2, 0x10c2, 0x0728_0202, 4),
];

#[test]
fn enumeration_is_that_of_the_generation() {
    for &(model, capabilities, leaf_0a, _) in ROWS {
        let msrs = msrs(model);
        assert_eq!(
            read(&msrs, regs::IA32_PERF_CAPABILITIES),
            Some(capabilities),
            "{model}"
        );
        assert_eq!(cpuid(model).query(0xa, 0, 0, 0, 0)[0], leaf_0a, "{model}");
    }
}

#[test]
fn registers_of_later_generations_fault() {
    for &(model, _, leaf_0a, entries) in ROWS {
        let mut msrs = msrs(model);
        let last = entries - 1;
        let (LbrModel { from, to, .. }, core2) = (model.definition().lbr, model == CpuModel::Core2);
        let server = matches!(
            model,
            CpuModel::SkylakeServer
                | CpuModel::CascadeLake
                | CpuModel::IcelakeServer
                | CpuModel::SapphireRapids
        );
        let architectural = model == CpuModel::SapphireRapids;
        let version_5 = architectural || model == CpuModel::IcelakeServer;
        let first = core2 || matches!(model, CpuModel::Nehalem | CpuModel::Westmere);
        let rows = [
            (from + last, true),
            (to + last, true),
            (regs::CORE_LASTBRANCH_0_FROM_IP, core2),
            (regs::CORE_LASTBRANCH_0_TO_IP + 3, core2),
            (regs::MSR_LBR_SELECT, !core2 && !architectural),
            (regs::MSR_LASTBRANCH_TOS, !architectural),
            (regs::IA32_LBR_CTL, architectural),
            (regs::IA32_LBR_DEPTH, architectural),
            (regs::IA32_XSS, architectural),
            (regs::IA32_LER_INFO, architectural),
            (regs::IA32_LBR_0_INFO + 31, architectural),
            (regs::IA32_LBR_0_FROM_IP, architectural),
            (regs::IA32_LBR_0_TO_IP, architectural),
            (regs::IA32_PMC0 + 1, true),
            (regs::IA32_PMC0 + 2, !core2),
            (regs::IA32_PERFEVTSEL0 + 3, !core2),
            (regs::MSR_PEBS_LD_LAT_THRESHOLD, !core2),
            (regs::MSR_PLATFORM_INFO, !core2),
            (regs::MSR_LASTBRANCH_0_FROM_IP, !core2 && !architectural),
            (
                regs::MSR_LASTBRANCH_0_FROM_IP + 31,
                entries == 32 && !architectural,
            ),
            (
                regs::MSR_LASTBRANCH_0_TO_IP + 16,
                entries == 32 && !architectural,
            ),
            (regs::MSR_LBR_INFO_0, entries == 32 && !architectural),
            (regs::IA32_FIXED_CTR0 + 3, version_5),
            (regs::IA32_PERF_GLOBAL_STATUS_SET, leaf_0a & 0xff >= 4),
            (regs::IA32_PERF_GLOBAL_INUSE, leaf_0a & 0xff >= 4),
            (regs::MSR_PEBS_FRONTEND, entries == 32),
            (regs::MSR_PERF_METRICS, version_5),
            (regs::MSR_PEBS_DATA_CFG, version_5),
            (
                regs::IA32_A_PMC0,
                model.definition().perfmon.full_width_writes,
            ),
            (regs::MSR_OFFCORE_RSP_0, !core2),
            (
                regs::MSR_OFFCORE_RSP_1,
                !core2 && model != CpuModel::Nehalem,
            ),
            (regs::IA32_TSC_DEADLINE, !first),
            (regs::MSR_PPIN_CTL, server),
            (regs::IA32_PQR_ASSOC, server),
        ];
        for (index, present) in rows {
            let exists = msrs.read(index, NOW) != RdmsrOutcome::Fault;
            assert_eq!(exists, present, "{model} {index:#x}");
        }
        let tos = writes(&mut msrs, regs::MSR_LASTBRANCH_TOS, 16);
        assert_eq!(tos, entries == 32 && !architectural, "{model}");
        let bridges = matches!(model, CpuModel::IvyBridge | CpuModel::SandyBridge);
        let call_stack = writes(&mut msrs, regs::MSR_LBR_SELECT, 1 << 9);
        assert_eq!(call_stack, !bridges && !first && !architectural, "{model}");
        assert_eq!(
            writes(&mut msrs, regs::IA32_PEBS_ENABLE, 1 << 63),
            bridges,
            "{model}"
        );
        let response = writes(&mut msrs, regs::MSR_OFFCORE_RSP_0, 1 << 16);
        assert_eq!(response, !first, "{model}");
        // Linux's NHM_L3_MISS, for reads of data.
        let memory = writes(&mut msrs, regs::MSR_OFFCORE_RSP_0, 0xf001);
        assert_eq!(memory, first && !core2, "{model}");
        let frozen = writes(&mut msrs, regs::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 58);
        assert_eq!(frozen, leaf_0a & 0xff >= 4, "{model}");
    }
}

#[test]
fn instructions_of_later_generations_are_not_in_cpuid() {
    let avx2 = |model| cpuid(model).query(7, 0, 0, 0, 0)[1] & Feature::AVX2.mask() != 0;
    let smep = |model| cpuid(model).query(7, 0, 0, 0, 0)[1] & Feature::SMEP.mask() != 0;
    let models = [
        (CpuModel::Skylake, true, true),
        (CpuModel::Broadwell, true, true),
        (CpuModel::Haswell, true, true),
        (CpuModel::IvyBridge, false, true),
        (CpuModel::SandyBridge, false, false),
    ];
    for (model, has_avx2, has_smep) in models {
        assert_eq!((avx2(model), smep(model)), (has_avx2, has_smep), "{model}");
        assert_eq!(
            cpuid(model).query(0xd, 0, 0, 0, 0)[0],
            0b111,
            "{model}: XCR0"
        );
    }
    assert_eq!(
        cpuid(CpuModel::Haswell).query(0x15, 0, 0, 0, 0),
        cpuid(CpuModel::Haswell).query(0xd, 0, 0, 0, 0)
    );
}

#[test]
fn cascade_lake_adds_dot_products_to_the_default_model() {
    let leaf_7 = |model| cpuid(model).query(7, 0, 0, 0, 0);
    let (old, new) = (
        leaf_7(CpuModel::SkylakeServer),
        leaf_7(CpuModel::CascadeLake),
    );
    assert_eq!(new[2], old[2] | 1 << 11);
    assert_eq!([new[0], new[1], new[3]], [old[0], old[1], old[3]]);
    assert_eq!(old[2] & 1 << 11, 0);
}

#[test]
fn first_generations_have_no_xsave() {
    for (model, aes) in [(CpuModel::Westmere, true), (CpuModel::Nehalem, false)] {
        let cpuid = cpuid(model);
        assert_eq!(cpuid.query(0, 0, 0, 0, 0)[0], 0xb, "{model}");
        let ecx = cpuid.query(1, 0, 0, 0, 0)[2];
        // XSAVE, AVX, x2APIC and the TSC deadline; AES.
        assert_eq!(ecx & (1 << 26 | 1 << 28 | 1 << 21 | 1 << 24), 0, "{model}");
        assert_eq!(ecx & 1 << 25 != 0, aes, "{model}");
        assert_eq!(cpuid.query(7, 0, 0, 0, 0)[1], 0, "{model}");
        assert_eq!(
            cpuid.query(0xd, 0, 0, 0, 0),
            cpuid.query(0xb, 0, 0, 0, 0),
            "{model}"
        );
    }
}

#[test]
fn stack_wraps_at_its_depth_and_has_flags_where_the_format_says() {
    for &(model, _, _, entries) in ROWS {
        let mut msrs = msrs(model);
        enable_lbr(&mut msrs);
        let architectural = model.definition().lbr.is_architectural();
        let branches: Vec<_> = (0..100)
            .map(|n| Branch {
                mispredicted: true,
                ..Branch::new(
                    BranchClass::DirectJump,
                    0xffff_8000_0000_1000 + n,
                    0x2000 + n,
                )
            })
            .collect();
        // One by one, and in a batch that overwrites the stack.
        for part in [&branches[..3], &branches[3..]] {
            msrs.record_branches(part);
        }
        let tos = 100 % entries;
        assert_eq!(
            read(&msrs, regs::MSR_LASTBRANCH_TOS),
            (!architectural).then_some(tos.into()),
            "{model}"
        );
        for age in 0..entries {
            let at = match architectural {
                true => age,
                false => (tos + entries - age) % entries,
            };
            let n = u64::from(99 - age);
            let from = match entries {
                32 => 0xffff_8000_0000_1000 + n,
                // Bits 62:61 are 0 in Haswell's and Broadwell's records without transactions.
                _ if model.definition().lbr.format == 4 => 0x9fff_8000_0000_1000 + n,
                _ => 0xffff_8000_0000_1000 + n,
            };
            let LbrModel {
                from: first, to, ..
            } = model.definition().lbr;
            let found = read(&msrs, first + at);
            assert_eq!(found, Some(from), "{model} {age}");
            let found = read(&msrs, to + at);
            assert_eq!(found, Some(0x2000 + n), "{model} {age}");
        }
        let saved = msrs.save();
        let mut other = self::msrs(model);
        other.restore(&saved).unwrap();
        assert_eq!(other.save(), saved, "{model}");
    }
}

/// Enables the LBR stack, as the model does.
fn enable_lbr(msrs: &mut Msrs) {
    let all = LbrCtl::PASS | LbrCtl::ENABLE;
    if !writes(msrs, regs::IA32_LBR_CTL, all.bits()) {
        assert!(writes(msrs, regs::IA32_DEBUGCTL, DebugCtl::LBR.bits()));
    }
}

/// A processor whose fixed counter 0 overflows at the next instruction, and both freezes on.
fn overflowing(model: CpuModel) -> Msrs {
    let mut msrs = msrs(model);
    let freezes = DebugCtl::FREEZE_LBRS_ON_PMI | DebugCtl::FREEZE_PERFMON_ON_PMI;
    let control = FixedControl::OS | FixedControl::PMI;
    enable_lbr(&mut msrs);
    for (index, value) in [
        (regs::IA32_DEBUGCTL, (DebugCtl::LBR | freezes).bits()),
        (
            regs::IA32_FIXED_CTR0,
            model.definition().perfmon.counter_mask(),
        ),
        (regs::IA32_FIXED_CTR_CTRL, control),
        (regs::IA32_PERF_GLOBAL_CTRL, 1 << 32),
    ] {
        assert!(writes(&mut msrs, index, value), "{model} {index:#x}");
    }
    msrs
}

#[test]
fn pmi_before_version_4_clears_enable_bits_and_lbr() {
    for &(model, _, leaf_0a, _) in ROWS {
        let mut msrs = overflowing(model);
        let mut totals = EventTotals::default();
        totals.add(EventKind::Instruction, Ring::Os, 1);
        assert!(msrs.sync_counters(&totals), "{model}");
        let control = read(&msrs, regs::IA32_PERF_GLOBAL_CTRL).unwrap();
        let status = read(&msrs, regs::IA32_PERF_GLOBAL_STATUS).unwrap();
        let lbr = read(&msrs, regs::IA32_DEBUGCTL).unwrap() & DebugCtl::LBR.bits();
        let expected = match leaf_0a & 0xff {
            4.. if model == CpuModel::SapphireRapids => (1 << 32, 1 << 32 | 0b11 << 58, 0),
            4.. => (1 << 32, 1 << 32 | 0b11 << 58, 1),
            _ => (0, 1 << 32, 0),
        };
        assert_eq!((control, status, lbr), expected, "{model}");
        assert!(!msrs.branch().records(), "{model}");
    }
}

#[test]
fn core_2_reserves_the_bits_of_later_versions() {
    let mut msrs = msrs(CpuModel::Core2);
    for (index, value, accepted) in [
        (regs::IA32_PERF_GLOBAL_CTRL, 0x7_0000_0003, true),
        (regs::IA32_PERF_GLOBAL_CTRL, 1 << 2, false),
        (regs::IA32_PERFEVTSEL0 + 1, 0xffff_ffff & !(1 << 21), true),
        (regs::IA32_PERFEVTSEL0, EventSelect::ANY_THREAD, false),
        (regs::IA32_FIXED_CTR_CTRL, 0xbbb, true),
        (regs::IA32_FIXED_CTR_CTRL, FixedControl::ANY_THREAD, false),
        (regs::IA32_FIXED_CTR0 + 2, (1 << 40) - 1, true),
        (regs::IA32_FIXED_CTR0, 1 << 40, false),
        (
            regs::IA32_PERF_GLOBAL_STATUS_RESET,
            0b11 << 62 | 0x7_0000_0003,
            true,
        ),
        (regs::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 61, false),
        (regs::IA32_PEBS_ENABLE, 1, true),
        (regs::IA32_PEBS_ENABLE, 2, false),
        (regs::IA32_PEBS_ENABLE, 1 << 32, false),
        (regs::IA32_DEBUGCTL, 0x5fc3, true),
        (regs::IA32_DEBUGCTL, DebugCtl::UNCORE_PMI_EN.bits(), false),
        (regs::CORE_LASTBRANCH_0_FROM_IP, 1 << 63, false),
        (regs::MSR_LASTBRANCH_TOS, 3, true),
        (regs::MSR_LASTBRANCH_TOS, 4, false),
    ] {
        let done = writes(&mut msrs, index, value);
        assert_eq!(done, accepted, "{index:#x} {value:#x}");
    }
    // IA32_PMCx extends 32 bits by their sign, up to its 40 bits.
    assert!(writes(&mut msrs, regs::IA32_PMC0, 0x8000_0000));
    assert_eq!(read(&msrs, regs::IA32_PMC0), Some(0xff_8000_0000));
    let saved = msrs.save();
    let mut other = self::msrs(CpuModel::Core2);
    other.restore(&saved).unwrap();
    assert_eq!(other.save(), saved);
    let mut newer = self::msrs(CpuModel::SkylakeServer);
    let write = writes(
        &mut newer,
        regs::IA32_DEBUGCTL,
        DebugCtl::UNCORE_PMI_EN.bits(),
    );
    assert!(write && other.restore(&newer.save()).is_err());
}

#[test]
fn counter_of_core_2_overflows_after_40_bits() {
    let mut msrs = msrs(CpuModel::Core2);
    let select = EventSelect::new(0xc0, 0, EventSelect::OS | EventSelect::ENABLE).0;
    for (index, value) in [
        (regs::IA32_PERFEVTSEL0, select),
        (regs::IA32_PMC0, 0xffff_fffe),
        (regs::IA32_PERF_GLOBAL_CTRL, 1),
    ] {
        assert!(writes(&mut msrs, index, value), "{index:#x}");
    }
    let mut totals = EventTotals::default();
    for (value, status) in [(0xff_ffff_ffff, 0), (0, 1), (1, 1)] {
        totals.add(EventKind::Instruction, Ring::Os, 1);
        let _ = msrs.sync_counters(&totals);
        assert_eq!(read(&msrs, regs::IA32_PMC0), Some(value));
        assert_eq!(read(&msrs, regs::IA32_PERF_GLOBAL_STATUS), Some(status));
    }
}

#[test]
fn facility_that_the_model_never_had_is_refused() {
    let rows = [
        (
            "skylake,+l2cat",
            "skylake has no l2cat: `hindsight cpu show skylake` lists its facilities",
        ),
        (
            "ivybridge,+rtm",
            "ivybridge has no rtm: `hindsight cpu show ivybridge` lists its facilities",
        ),
        (
            "haswell,+cmt",
            "haswell has no cmt: `hindsight cpu show haswell` lists its facilities",
        ),
    ];
    for (profile, expected) in rows {
        let profile: crate::profile::CpuProfile = profile.parse().unwrap();
        let error = profile.facilities(Facilities::INTERP).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    let profile: crate::profile::CpuProfile = "haswell,+rtm,-bts".parse().unwrap();
    let expected = (facilities(CpuModel::Haswell) | Facilities::RTM) - Facilities::BTS;
    assert_eq!(profile.facilities(Facilities::INTERP), Ok(expected));
}

/// The cycles that counter 0 counts of 10 with an inverted counter mask of 16.
fn inverted(model: CpuModel, event: u8) -> u64 {
    let mut msrs = msrs(model);
    let flags = EventSelect::OS | EventSelect::ENABLE | EventSelect::INVERT | 16 << 24;
    let select = EventSelect::new(event, 1, flags).0;
    assert!(writes(&mut msrs, regs::IA32_PERFEVTSEL0, select));
    assert!(writes(&mut msrs, regs::IA32_PERF_GLOBAL_CTRL, 1));
    let mut totals = EventTotals::default();
    totals.add(EventKind::Cycle, Ring::Os, 10);
    let _ = msrs.sync_counters(&totals);
    read(&msrs, regs::IA32_PMC0).unwrap()
}

#[test]
fn cycles_are_sampled_by_retired_uops_where_perf_does() {
    assert_eq!(inverted(CpuModel::Haswell, 0xc2), 10);
    assert_eq!(inverted(CpuModel::SandyBridge, 0xc2), 10);
    assert_eq!(inverted(CpuModel::SkylakeServer, 0xc2), 0);
    assert_eq!(inverted(CpuModel::IvyBridge, 0xc2), 10);
    assert_eq!(inverted(CpuModel::Broadwell, 0xc2), 10);
}

/// What counter 0 counts of 10 instructions, of which 3 load, with this unit mask of event C0H.
fn instructions(model: CpuModel, umask: u8) -> u64 {
    let mut msrs = msrs(model);
    let select = EventSelect::new(0xc0, umask, EventSelect::OS | EventSelect::ENABLE).0;
    assert!(writes(&mut msrs, regs::IA32_PERFEVTSEL0, select));
    assert!(writes(&mut msrs, regs::IA32_PERF_GLOBAL_CTRL, 1));
    let mut totals = EventTotals::default();
    totals.add(EventKind::Instruction, Ring::Os, 10);
    totals.add(EventKind::Load, Ring::Os, 3);
    let _ = msrs.sync_counters(&totals);
    read(&msrs, regs::IA32_PMC0).unwrap()
}

#[test]
fn second_mask_of_retired_instructions_selects_loads_in_core_2() {
    assert_eq!(instructions(CpuModel::Core2, 0), 10);
    assert_eq!(instructions(CpuModel::Core2, 1), 3);
}

#[test]
fn second_mask_of_retired_instructions_needs_counter_1_from_sandy_bridge_on() {
    for model in [CpuModel::Nehalem, CpuModel::Westmere] {
        assert_eq!(instructions(model, 0), 10);
        assert_eq!(instructions(model, 1), 10);
    }
    for model in [
        CpuModel::SandyBridge,
        CpuModel::Haswell,
        CpuModel::SkylakeServer,
    ] {
        assert_eq!(instructions(model, 0), 10);
        assert_eq!(instructions(model, 1), 0);
    }
}

#[test]
fn ice_lake_has_perfmon_version_5() {
    let leaf = cpuid(CpuModel::IcelakeServer).query(0xa, 0, 0, 0, 0);
    assert_eq!(leaf, [0x0830_0805, 0, 0xf, 0x8604]);
    assert_eq!(
        cpuid(CpuModel::CascadeLake).query(0xa, 0, 0, 0, 0),
        [0x0730_0404, 0, 0, 0x603]
    );
    let mut msrs = msrs(CpuModel::IcelakeServer);
    for (index, value, accepted) in [
        (regs::IA32_PERF_GLOBAL_CTRL, 0x1_000f_0000_00ff, true),
        (regs::IA32_PERF_GLOBAL_CTRL, 1 << 36, false),
        (regs::IA32_PERF_GLOBAL_STATUS_SET, 1 << 48, true),
        (regs::MSR_PERF_METRICS, 0xffff_ffff, true),
        (regs::MSR_PERF_METRICS, 1 << 32, false),
        (regs::IA32_PERF_GLOBAL_STATUS_SET, 1 << 35, true),
        (regs::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 35, true),
        (regs::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 36, false),
        (regs::IA32_PERFEVTSEL0 + 7, 0xffd7_ffff, true),
        (regs::IA32_PERFEVTSEL0, EventSelect::ANY_THREAD, false),
        (regs::IA32_FIXED_CTR_CTRL, 0xbbbb, true),
        (regs::IA32_FIXED_CTR_CTRL, 0x4000, false),
        (regs::IA32_FIXED_CTR_CTRL, 1 << 16, false),
        (regs::IA32_A_PMC0 + 7, (1 << 48) - 1, true),
        (regs::MSR_OFFCORE_RSP_1, 0x3f_ffff_bfff, true),
        (regs::MSR_OFFCORE_RSP_1, 1 << 14, false),
    ] {
        let done = writes(&mut msrs, index, value);
        assert_eq!(done, accepted, "{index:#x} {value:#x}");
    }
    let saved = msrs.save();
    let mut other = self::msrs(CpuModel::IcelakeServer);
    other.restore(&saved).unwrap();
    assert_eq!(other.save(), saved);
    assert!(self::msrs(CpuModel::CascadeLake).restore(&saved).is_err());
}

#[test]
fn slots_are_five_for_each_cycle() {
    let mut msrs = msrs(CpuModel::IcelakeServer);
    let bits = EventSelect::OS | EventSelect::ENABLE;
    for (index, value) in [
        (regs::IA32_FIXED_CTR_CTRL, 0x1000),
        (
            regs::IA32_PERFEVTSEL0 + 7,
            EventSelect::new(0xa4, 1, bits).0,
        ),
        (regs::IA32_PERF_GLOBAL_CTRL, 1 << 35 | 1 << 7),
    ] {
        assert!(writes(&mut msrs, index, value), "{index:#x}");
    }
    let mut totals = EventTotals::default();
    totals.add(EventKind::Cycle, Ring::Os, 7);
    totals.add(EventKind::Cycle, Ring::User, 100);
    let _ = msrs.sync_counters(&totals);
    assert_eq!(read(&msrs, regs::IA32_FIXED_CTR0 + 3), Some(35));
    assert_eq!(read(&msrs, regs::IA32_A_PMC0 + 7), Some(35));
    assert_eq!(msrs.rdpmc(0x4000_0003), Ok(35));
    assert!(msrs.rdpmc(0x4000_0004).is_err());
}

#[test]
fn overflow_of_slots_is_found_in_the_cycle_that_passes_it() {
    let mut msrs = msrs(CpuModel::IcelakeServer);
    for (index, value) in [
        (regs::IA32_FIXED_CTR0 + 3, (1 << 48) - 12),
        (regs::IA32_FIXED_CTR_CTRL, 0x9000),
        (regs::IA32_PERF_GLOBAL_CTRL, 1 << 35),
    ] {
        assert!(writes(&mut msrs, index, value), "{index:#x}");
    }
    assert_eq!(msrs.pmu().limits().cycles.left(Ring::Os), 3);
    let mut totals = EventTotals::default();
    totals.add(EventKind::Cycle, Ring::Os, 2);
    assert!(!msrs.sync_counters(&totals));
    totals.add(EventKind::Cycle, Ring::Os, 1);
    assert!(msrs.sync_counters(&totals));
    assert_eq!(read(&msrs, regs::IA32_FIXED_CTR0 + 3), Some(3));
    assert_eq!(read(&msrs, regs::IA32_PERF_GLOBAL_STATUS), Some(1 << 35));
}

#[test]
fn ice_lake_has_extended_and_adaptive_pebs() {
    let mut msrs = msrs(CpuModel::IcelakeServer);
    for (index, value, accepted) in [
        (regs::IA32_PEBS_ENABLE, 0xf_0000_00ff, true),
        (regs::IA32_PEBS_ENABLE, 1 << 8, false),
        (regs::IA32_PEBS_ENABLE, 1 << 63, false),
        (regs::MSR_PEBS_DATA_CFG, 0xff00_000f, true),
        (regs::MSR_PEBS_DATA_CFG, 1 << 4, false),
        (regs::IA32_PERFEVTSEL0 + 7, 1 << 34, true),
        (regs::IA32_PERFEVTSEL0 + 7, 1 << 35, false),
        (regs::IA32_FIXED_CTR_CTRL, 0x1111_0000_bbbb, true),
        (regs::IA32_FIXED_CTR_CTRL, 1 << 48, false),
    ] {
        let done = writes(&mut msrs, index, value);
        assert_eq!(done, accepted, "{index:#x} {value:#x}");
    }
    let saved = msrs.save();
    let mut other = self::msrs(CpuModel::IcelakeServer);
    other.restore(&saved).unwrap();
    assert_eq!(other.save(), saved);
    assert_eq!(read(&other, regs::MSR_PEBS_DATA_CFG), Some(0xff00_000f));
    let mut older = self::msrs(CpuModel::CascadeLake);
    assert!(older.restore(&saved).is_err());
    for (index, bit) in [
        (regs::IA32_PERFEVTSEL0, 1 << 34),
        (regs::IA32_FIXED_CTR_CTRL, 1 << 32),
    ] {
        assert!(!writes(&mut older, index, bit), "{index:#x}");
    }
    // Without PEBS its bits are reserved.
    let model = CpuModel::IcelakeServer;
    let without = facilities(model) - Facilities::PEBS;
    let config = MsrConfig {
        facilities: without,
        ..MsrConfig::new(without, TSC_HZ).with_cpuid(&cpuid(model))
    };
    let mut without = Msrs::new(config);
    for (index, bit) in [
        (regs::IA32_PERFEVTSEL0 + 4, 1 << 34),
        (regs::IA32_FIXED_CTR_CTRL, 1 << 36),
        (regs::MSR_PEBS_DATA_CFG, 0),
    ] {
        assert!(!writes(&mut without, index, bit), "{index:#x}");
    }
}
