//! The rows of the table, by index.

use hindsight_regs::branch::xsave as branch_state;
use hindsight_regs::branch::{CYC_CNT_MAX, LBR_DEPTH, LBR_TOS_MASK, LbrCtl, LbrInfo, LbrSelect};
use hindsight_regs::capabilities::{ArchCapabilities, MiscEnable};
use hindsight_regs::cpuid::Feature;
use hindsight_regs::msr as regs;
use hindsight_regs::pmu::pebs::DataConfig;
use hindsight_regs::pmu::{COUNTER_MASK, EventSelect, FIXED_COUNTERS, GP_COUNTERS, global};
use hindsight_regs::rdt;

use super::{
    KvmRole, KvmStateCall, MsrSpec, Owner, Presence, ResetValue, UpdateBefore, WritePolicy,
    X2APIC_MSRS, page_address,
};
use crate::facility::{DEBUGCTL_BITS, Facilities};
use crate::msr::config::MsrConfig;
use crate::pmu::access as pmu;
use crate::state::{PAT_RESET, ProcessorMsr};

impl MsrSpec {
    const fn new(index: u32, name: &'static str, owner: Owner) -> Self {
        Self {
            index,
            count: 1,
            name,
            owner,
            presence: Presence::Always,
            reset: ResetValue::Fixed(0),
            writes: WritePolicy::Bits {
                writable: u64::MAX,
                with: &[],
            },
            read_only: 0,
            valid: |_| true,
            kvm: KvmRole::Intercepted,
            // Counters freeze and start by these registers, and show in them.
            update: match owner {
                Owner::Pmu | Owner::Branch => UpdateBefore::Counters,
                _ => UpdateBefore::Nothing,
            },
        }
    }

    /// The row covers `count` consecutive MSRs.
    const fn run(self, count: u32) -> Self {
        Self { count, ..self }
    }

    /// The MSR exists with all of `facilities`.
    const fn needs(self, facilities: Facilities) -> Self {
        Self {
            presence: Presence::All(facilities),
            ..self
        }
    }

    /// The MSR exists with any of `facilities`.
    const fn needs_any(self, facilities: Facilities) -> Self {
        Self {
            presence: Presence::Any(facilities),
            ..self
        }
    }

    /// The MSR exists with all of these bits of CPUID.7.0:EDX.
    const fn needs_speculation(self, bits: u32) -> Self {
        Self {
            presence: Presence::Speculation(bits),
            ..self
        }
    }

    const fn reset(self, value: u64) -> Self {
        Self {
            reset: ResetValue::Fixed(value),
            ..self
        }
    }

    const fn reset_by(self, value: fn(&MsrConfig) -> u64) -> Self {
        Self {
            reset: ResetValue::Computed(value),
            ..self
        }
    }

    /// 0 after RESET; the value that firmware sets if the guest starts without it.
    const fn set_by_firmware(self, value: fn(&MsrConfig) -> u64) -> Self {
        Self {
            reset: ResetValue::SetByFirmware(value),
            ..self
        }
    }

    /// Only the bits `writable` can be set.
    const fn writable(self, writable: u64) -> Self {
        self.writable_with(writable, &[])
    }

    /// Only the bits `writable` can be set, and those in `with` whose facility is present.
    const fn writable_with(self, writable: u64, with: &'static [(Facilities, u64)]) -> Self {
        Self {
            writes: WritePolicy::Bits { writable, with },
            ..self
        }
    }

    /// Only the bits `low` and those of a page's address can be set.
    const fn page_address(self, low: u64) -> Self {
        Self {
            writes: WritePolicy::PageAddress(low),
            ..self
        }
    }

    /// A write must also satisfy `valid`.
    const fn valid(self, valid: fn(u64) -> bool) -> Self {
        Self { valid, ..self }
    }

    const fn faults_on_write(self) -> Self {
        Self {
            writes: WritePolicy::Fault,
            ..self
        }
    }

    const fn ignores_writes(self) -> Self {
        Self {
            writes: WritePolicy::Ignored,
            ..self
        }
    }

    const fn read_only(self, read_only: u64) -> Self {
        Self { read_only, ..self }
    }

    const fn kvm(self, kvm: KvmRole) -> Self {
        Self { kvm, ..self }
    }

    const fn update(self, update: UpdateBefore) -> Self {
        Self { update, ..self }
    }
}

/// The bits of IA32_MISC_ENABLE that say what is absent or available.
const MISC_AVAILABLE: u64 = MiscEnable::PERFMON_AVAILABLE
    .union(MiscEnable::BTS_UNAVAILABLE)
    .union(MiscEnable::PEBS_UNAVAILABLE)
    .bits();
/// The bits of IA32_MISC_ENABLE that are set after RESET in every processor, and can be cleared.
///
/// The others belong to facilities that CPUID does not show, or would change what it shows.
const MISC_RESET: MiscEnable = MiscEnable::FAST_STRINGS.union(MiscEnable::AUTOMATIC_TCC);

fn misc_enable(config: &MsrConfig) -> u64 {
    let has = |facility| config.facilities.contains(facility);
    let mut value = MISC_RESET;
    value.set(MiscEnable::PERFMON_AVAILABLE, has(Facilities::PMU));
    value.set(MiscEnable::BTS_UNAVAILABLE, !has(Facilities::BTS));
    value.set(MiscEnable::PEBS_UNAVAILABLE, !has(Facilities::PEBS));
    value.bits()
}

/// The ratio of the TSC to the bus clock, in bits 15:8.
fn ratio(config: &MsrConfig) -> u64 {
    let bus_hz = u64::from(config.model.definition().bus_hz);
    ((config.tsc_hz / bus_hz) & 0xff) << 8
}

/// The ratio of the TSC to the bus clock in every byte: there is no turbo mode.
fn turbo_ratios(config: &MsrConfig) -> u64 {
    (ratio(config) >> 8) * 0x0101_0101_0101_0101
}

fn perf_capabilities(config: &MsrConfig) -> u64 {
    let model = config.model.definition();
    model.perf_capabilities(config.facilities).unwrap_or(0)
}

/// All "not affected" bits: guests leave page-table isolation and the other software mitigations
/// off (rule MSR-47). Enhanced IBRS goes with IA32_SPEC_CTRL.
fn arch_capabilities(config: &MsrConfig) -> u64 {
    let mut bits = ArchCapabilities::all();
    let controls = config.speculation & SPEC_CTRL == SPEC_CTRL;
    bits.set(ArchCapabilities::IBRS_ALL, controls);
    bits.bits()
}

/// CPUID.7.0:EDX: IBRS, IBPB, STIBP and SSBD.
const SPEC_CTRL: u32 = Feature::SPEC_CTRL.mask() | Feature::STIBP.mask() | Feature::SSBD.mask();
/// IA32_SPEC_CTRL: IBRS, STIBP, SSBD.
const SPEC_CTRL_BITS: u64 = 0b111;
/// IA32_PRED_CMD.IBPB, and IA32_FLUSH_CMD.L1D_FLUSH.
const COMMAND: u64 = 1;

/// IA32_FEATURE_CONTROL and MSR_PPIN_CTL: locked, with nothing enabled.
const LOCKED: u64 = 1;

/// MSR_PKG_CST_CONFIG_CONTROL: locked, with no package C-state beyond C1.
const NO_PACKAGE_C_STATE: u64 = 1 << 15;

/// IA32_PERF_CTL: the requested state, and whether turbo mode is off.
const PERF_CTL: u64 = 1 << 32 | 0xffff;

/// MSR_TURBO_RATIO_LIMIT_CORES: 8, 16 ... 64 active cores.
const TURBO_CORES: u64 = 0x4038_3028_2018_1008;

/// MSR_TEMPERATURE_TARGET: 100 degrees Celsius.
const TEMPERATURE_TARGET: u64 = 100 << 16;

/// The microcode revision in the upper half (rule MSR-41).
fn microcode(config: &MsrConfig) -> u64 {
    u64::from(config.model.definition().microcode) << 32
}

/// IA32_MTRRCAP: eight variable ranges, fixed ranges, write-combining.
const MTRRCAP: u64 = 0x508;

/// IA32_MTRR_DEF_TYPE: type, fixed-range enable, enable.
const MTRR_DEF_TYPE: u64 = 0xcff;

// What firmware sets, for guests that start without it: all memory is write-back but the video memory, which is uncacheable, the area
// of option ROMs and the BIOS, which is write-protected, and the devices below 4 GiB.

/// IA32_MTRR_DEF_TYPE: MTRRs and fixed ranges enabled, write-back.
const MTRR_DEF_TYPE_ENABLED: u64 = 0xc06;
/// A fixed-range MTRR whose eight ranges are write-back.
const WRITE_BACK: u64 = 0x0606_0606_0606_0606;
/// A fixed-range MTRR whose eight ranges are write-protected.
const WRITE_PROTECTED: u64 = 0x0505_0505_0505_0505;
/// The first address of the devices that end at 4 GiB: uncacheable.
pub const DEVICES_START: u64 = 0xc000_0000;

/// IA32_MTRR_PHYSMASK0: enabled, the GiB from [`DEVICES_START`].
fn devices_mask(config: &MsrConfig) -> u64 {
    page_address(config) & !((1 << 30) - 1) | MTRR_VALID
}

/// IA32_MTRR_PHYSMASKn: the range is enabled.
const MTRR_VALID: u64 = 1 << 11;
/// IA32_MTRR_PHYSBASEn: the memory type.
const MTRR_TYPE: u64 = 0xff;

/// UC, WC, WT, WP and WB. SDM Vol. 3A, "Memory Types That Can Be Encoded in MTRRs".
const fn is_memory_type(byte: u8) -> bool {
    matches!(byte, 0 | 1 | 4..=6)
}

/// Whether the lowest byte is a memory type.
fn is_type(value: u64) -> bool {
    is_memory_type(value.to_le_bytes()[0])
}

/// Whether all bytes are memory types.
fn are_types(value: u64) -> bool {
    value.to_le_bytes().into_iter().all(is_memory_type)
}

const fn mtrr_base(range: u32, name: &'static str) -> MsrSpec {
    MsrSpec::new(regs::IA32_MTRR_PHYSBASE0 + 2 * range, name, Owner::Stored)
        .page_address(MTRR_TYPE)
        .valid(is_type)
}

const fn mtrr_mask(range: u32, name: &'static str) -> MsrSpec {
    MsrSpec::new(
        regs::IA32_MTRR_PHYSBASE0 + 2 * range + 1,
        name,
        Owner::Stored,
    )
    .page_address(MTRR_VALID)
}

const fn mtrr_fixed(index: u32, name: &'static str, value: fn(&MsrConfig) -> u64) -> MsrSpec {
    MsrSpec::new(index, name, Owner::Stored)
        .set_by_firmware(value)
        .valid(are_types)
}

/// IA32_MCG_STATUS: RIPV, EIPV, MCIP.
const MCG_STATUS: u64 = 0b111;

/// The facilities that bring the counters above the fourth.
const EIGHT: Facilities = Facilities::PMU.union(Facilities::PMU8);

/// General-purpose counters above the fourth.
const UPPER: u32 = hindsight_regs::pmu::GP_COUNTERS_MAX - GP_COUNTERS;

/// The writable bits of the global PMU registers for eight counters.
const UPPER_COUNTERS: &[(Facilities, u64)] = &[(Facilities::PMU8, global::UPPER_COUNTERS)];

/// The bits of the global PMU registers that Ice Lake brought.
const ICELAKE: u64 = global::FIXED_3 | global::PERF_METRICS;

/// The transaction bits of an event selection (rule PMU-13), and that of adaptive PEBS.
const IN_TX: &[(Facilities, u64)] = &[
    (Facilities::RTM, EventSelect::IN_TX),
    (Facilities::PEBS, EventSelect::ADAPTIVE_RECORD),
];
/// IN_TXCP exists in counter 2 only.
const IN_TX_OR_COMMITTED: &[(Facilities, u64)] = &[
    (Facilities::RTM, pmu::IN_TRANSACTIONS),
    (Facilities::PEBS, EventSelect::ADAPTIVE_RECORD),
];
/// The bits of the fixed counters' control for adaptive PEBS.
const ADAPTIVE_FIXED: &[(Facilities, u64)] = &[(Facilities::PEBS, pmu::ADAPTIVE_FIXED)];

const LBR_ENTRIES: u32 = 32;
const _: () = assert!(LBR_ENTRIES as usize == LBR_DEPTH);
/// Entries of the LBR stack of Core 2.
const CORE_LBR_ENTRIES: u32 = 4;
const LOW_HALF: u64 = 0xffff_ffff;

const fn event_select(offset: u32, name: &'static str) -> MsrSpec {
    MsrSpec::new(regs::IA32_PERFEVTSEL0 + offset, name, Owner::Pmu)
        .needs(Facilities::PMU)
        .writable_with(EventSelect::WRITABLE, IN_TX)
        .read_only(EventSelect::PIN)
}

/// A register of the processor state that moves in and out of KVM as an MSR.
const fn passthrough(index: u32, name: &'static str, msr: ProcessorMsr) -> MsrSpec {
    MsrSpec::new(index, name, Owner::Processor(msr)).kvm(KvmRole::Passthrough(KvmStateCall::Msr))
}

/// A register of the processor state that moves in and out of KVM with other registers.
const fn special(index: u32, name: &'static str, msr: ProcessorMsr) -> MsrSpec {
    let kvm = KvmRole::Passthrough(KvmStateCall::SpecialRegisters);
    MsrSpec::new(index, name, Owner::Processor(msr)).kvm(kvm)
}

const fn pmu_register(index: u32, name: &'static str) -> MsrSpec {
    MsrSpec::new(index, name, Owner::Pmu).needs(Facilities::PMU)
}

const fn lbr_register(index: u32, name: &'static str) -> MsrSpec {
    MsrSpec::new(index, name, Owner::Branch).needs(Facilities::LBR)
}

/// The time in a C-state that no processor enters: MWAIT does not exist, and HLT is C1 of the guest
/// alone.
const fn residency(index: u32, name: &'static str) -> MsrSpec {
    MsrSpec::new(index, name, Owner::Constant).faults_on_write()
}

/// All rows, by index.
#[rustfmt::skip]
pub const TABLE: &[MsrSpec] = {
    use MsrSpec as M;
    use KvmRole::Mirrored;
    use Owner::{Apic, Branch, Command, Constant, Pmu, Rdt, Smm, Stored, Tsc};
    &[
        M::new(regs::IA32_TIME_STAMP_COUNTER, "IA32_TIME_STAMP_COUNTER", Tsc),
        M::new(regs::IA32_PLATFORM_ID, "IA32_PLATFORM_ID", Constant).faults_on_write(),
        M::new(regs::IA32_APIC_BASE, "IA32_APIC_BASE", Apic).kvm(Mirrored),
        M::new(regs::MSR_SMI_COUNT, "MSR_SMI_COUNT", Smm).faults_on_write(),
        M::new(regs::IA32_FEATURE_CONTROL, "IA32_FEATURE_CONTROL", Constant)
            .reset(LOCKED).faults_on_write(),
        M::new(regs::IA32_TSC_ADJUST, "IA32_TSC_ADJUST", Tsc).needs(Facilities::TSC_ADJUST),
        lbr_register(regs::CORE_LASTBRANCH_0_FROM_IP, "MSR_LASTBRANCH_0-3_FROM_IP")
            .run(CORE_LBR_ENTRIES),
        M::new(regs::IA32_SPEC_CTRL, "IA32_SPEC_CTRL", Stored)
            .needs_speculation(SPEC_CTRL).writable(SPEC_CTRL_BITS),
        M::new(regs::IA32_PRED_CMD, "IA32_PRED_CMD", Command)
            .needs_speculation(Feature::SPEC_CTRL.mask()).writable(COMMAND),
        M::new(regs::MSR_PPIN_CTL, "MSR_PPIN_CTL", Constant).reset(LOCKED).faults_on_write(),
        lbr_register(regs::CORE_LASTBRANCH_0_TO_IP, "MSR_LASTBRANCH_0-3_TO_IP")
            .run(CORE_LBR_ENTRIES),
        M::new(regs::IA32_BIOS_SIGN_ID, "IA32_BIOS_SIGN_ID", Constant)
            .reset_by(microcode).ignores_writes(),
        pmu_register(regs::IA32_PMC0, "IA32_PMC").run(GP_COUNTERS),
        pmu_register(regs::IA32_PMC0 + GP_COUNTERS, "IA32_PMC4-7").run(UPPER).needs(EIGHT),
        M::new(regs::MSR_PLATFORM_INFO, "MSR_PLATFORM_INFO", Constant)
            .reset_by(ratio).faults_on_write(),
        M::new(regs::MSR_PKG_CST_CONFIG_CONTROL, "MSR_PKG_CST_CONFIG_CONTROL", Constant)
            .reset(NO_PACKAGE_C_STATE).faults_on_write(),
        M::new(regs::IA32_MTRRCAP, "IA32_MTRRCAP", Constant).reset(MTRRCAP).faults_on_write(),
        M::new(regs::IA32_ARCH_CAPABILITIES, "IA32_ARCH_CAPABILITIES", Constant)
            .reset_by(arch_capabilities).faults_on_write(),
        M::new(regs::IA32_FLUSH_CMD, "IA32_FLUSH_CMD", Command)
            .needs_speculation(Feature::L1D_FLUSH.mask()).writable(COMMAND),
        M::new(regs::MSR_MISC_FEATURES_ENABLES, "MSR_MISC_FEATURES_ENABLES", Constant).writable(0),
        passthrough(regs::IA32_SYSENTER_CS, "IA32_SYSENTER_CS", ProcessorMsr::SysenterCs),
        passthrough(regs::IA32_SYSENTER_ESP, "IA32_SYSENTER_ESP", ProcessorMsr::SysenterEsp),
        passthrough(regs::IA32_SYSENTER_EIP, "IA32_SYSENTER_EIP", ProcessorMsr::SysenterEip),
        // No machine-check banks.
        M::new(regs::IA32_MCG_CAP, "IA32_MCG_CAP", Constant).faults_on_write(),
        M::new(regs::IA32_MCG_STATUS, "IA32_MCG_STATUS", Stored).writable(MCG_STATUS),
        event_select(0, "IA32_PERFEVTSEL0-1").run(2),
        event_select(2, "IA32_PERFEVTSEL2").writable_with(EventSelect::WRITABLE, IN_TX_OR_COMMITTED),
        event_select(3, "IA32_PERFEVTSEL3"),
        event_select(4, "IA32_PERFEVTSEL4-7").run(UPPER).needs(EIGHT),
        M::new(regs::IA32_PERF_STATUS, "IA32_PERF_STATUS", Constant)
            .reset_by(ratio).faults_on_write(),
        M::new(regs::IA32_PERF_CTL, "IA32_PERF_CTL", Stored).reset_by(ratio).writable(PERF_CTL),
        // Off, as CPUID says: only 0 can be written.
        M::new(regs::IA32_CLOCK_MODULATION, "IA32_CLOCK_MODULATION", Constant).writable(0),
        M::new(regs::IA32_THERM_INTERRUPT, "IA32_THERM_INTERRUPT", Constant).writable(0),
        M::new(regs::IA32_THERM_STATUS, "IA32_THERM_STATUS", Constant).writable(0),
        M::new(regs::IA32_MISC_ENABLE, "IA32_MISC_ENABLE", Stored)
            .reset_by(misc_enable).writable(MISC_RESET.bits()).read_only(MISC_AVAILABLE).kvm(Mirrored),
        M::new(regs::MSR_TEMPERATURE_TARGET, "MSR_TEMPERATURE_TARGET", Constant)
            .reset(TEMPERATURE_TARGET).faults_on_write(),
        M::new(regs::MSR_OFFCORE_RSP_0, "MSR_OFFCORE_RSP", Pmu)
            .run(2).needs(Facilities::PMU).writable(pmu::ANY_OFFCORE),
        M::new(regs::MSR_MISC_PWR_MGMT, "MSR_MISC_PWR_MGMT", Constant).writable(0),
        M::new(regs::MSR_TURBO_RATIO_LIMIT, "MSR_TURBO_RATIO_LIMIT", Constant)
            .reset_by(turbo_ratios).faults_on_write(),
        M::new(regs::MSR_TURBO_RATIO_LIMIT_CORES, "MSR_TURBO_RATIO_LIMIT_CORES", Constant)
            .reset(TURBO_CORES).faults_on_write(),
        lbr_register(regs::MSR_LBR_SELECT, "MSR_LBR_SELECT").writable(LbrSelect::all().bits()),
        lbr_register(regs::MSR_LASTBRANCH_TOS, "MSR_LASTBRANCH_TOS").writable(LBR_TOS_MASK),
        M::new(regs::IA32_DEBUGCTL, "IA32_DEBUGCTL", Branch).writable_with(0, DEBUGCTL_BITS),
        lbr_register(regs::MSR_LER_FROM_LIP, "MSR_LER_FROM_LIP"),
        lbr_register(regs::MSR_LER_TO_LIP, "MSR_LER_TO_LIP"),
        lbr_register(regs::IA32_LER_INFO, "IA32_LER_INFO"),
        M::new(regs::MSR_POWER_CTL, "MSR_POWER_CTL", Constant).writable(0),
        mtrr_base(0, "IA32_MTRR_PHYSBASE0").set_by_firmware(|_| DEVICES_START),
        mtrr_mask(0, "IA32_MTRR_PHYSMASK0").set_by_firmware(devices_mask),
        mtrr_base(1, "IA32_MTRR_PHYSBASE1"),
        mtrr_mask(1, "IA32_MTRR_PHYSMASK1"),
        mtrr_base(2, "IA32_MTRR_PHYSBASE2"),
        mtrr_mask(2, "IA32_MTRR_PHYSMASK2"),
        mtrr_base(3, "IA32_MTRR_PHYSBASE3"),
        mtrr_mask(3, "IA32_MTRR_PHYSMASK3"),
        mtrr_base(4, "IA32_MTRR_PHYSBASE4"),
        mtrr_mask(4, "IA32_MTRR_PHYSMASK4"),
        mtrr_base(5, "IA32_MTRR_PHYSBASE5"),
        mtrr_mask(5, "IA32_MTRR_PHYSMASK5"),
        mtrr_base(6, "IA32_MTRR_PHYSBASE6"),
        mtrr_mask(6, "IA32_MTRR_PHYSMASK6"),
        mtrr_base(7, "IA32_MTRR_PHYSBASE7"),
        mtrr_mask(7, "IA32_MTRR_PHYSMASK7"),
        mtrr_fixed(regs::IA32_MTRR_FIX64K_00000, "IA32_MTRR_FIX64K_00000", |_| WRITE_BACK),
        mtrr_fixed(regs::IA32_MTRR_FIX16K_80000, "IA32_MTRR_FIX16K_80000", |_| WRITE_BACK),
        mtrr_fixed(regs::IA32_MTRR_FIX16K_A0000, "IA32_MTRR_FIX16K_A0000", |_| 0),
        mtrr_fixed(regs::IA32_MTRR_FIX4K_C0000, "IA32_MTRR_FIX4K", |_| WRITE_PROTECTED).run(8),
        passthrough(regs::IA32_PAT, "IA32_PAT", ProcessorMsr::Pat).reset(PAT_RESET),
        M::new(regs::IA32_MTRR_DEF_TYPE, "IA32_MTRR_DEF_TYPE", Stored)
            .set_by_firmware(|_| MTRR_DEF_TYPE_ENABLED).writable(MTRR_DEF_TYPE).valid(is_type),
        pmu_register(regs::IA32_FIXED_CTR0, "IA32_FIXED_CTR")
            .run(FIXED_COUNTERS).writable(COUNTER_MASK),
        pmu_register(regs::IA32_FIXED_CTR0 + FIXED_COUNTERS, "IA32_FIXED_CTR3")
            .writable(COUNTER_MASK),
        pmu_register(regs::MSR_PERF_METRICS, "MSR_PERF_METRICS"),
        M::new(regs::IA32_PERF_CAPABILITIES, "IA32_PERF_CAPABILITIES", Constant)
            .needs_any(Facilities::PERF_CAPABILITIES).reset_by(perf_capabilities).faults_on_write(),
        pmu_register(regs::IA32_FIXED_CTR_CTRL, "IA32_FIXED_CTR_CTRL")
            .writable_with(pmu::ANY_FIXED_CONTROL, ADAPTIVE_FIXED),
        pmu_register(regs::IA32_PERF_GLOBAL_STATUS, "IA32_PERF_GLOBAL_STATUS").faults_on_write(),
        pmu_register(regs::IA32_PERF_GLOBAL_CTRL, "IA32_PERF_GLOBAL_CTRL")
            .writable_with(global::COUNTERS | ICELAKE, UPPER_COUNTERS),
        pmu_register(regs::IA32_PERF_GLOBAL_STATUS_RESET, "IA32_PERF_GLOBAL_STATUS_RESET")
            .writable_with(global::RESETTABLE | ICELAKE, UPPER_COUNTERS),
        pmu_register(regs::IA32_PERF_GLOBAL_STATUS_SET, "IA32_PERF_GLOBAL_STATUS_SET")
            .writable_with(global::SETTABLE | ICELAKE, UPPER_COUNTERS),
        pmu_register(regs::IA32_PERF_GLOBAL_INUSE, "IA32_PERF_GLOBAL_INUSE").faults_on_write(),
        M::new(regs::IA32_PEBS_ENABLE, "IA32_PEBS_ENABLE", Pmu)
            .needs(Facilities::PEBS)
            .writable_with(pmu::PEBS_ENABLE | pmu::PRECISE_STORE, UPPER_COUNTERS),
        M::new(regs::MSR_PEBS_DATA_CFG, "MSR_PEBS_DATA_CFG", Pmu)
            .needs(Facilities::PEBS).writable(DataConfig::WRITABLE),
        M::new(regs::MSR_PEBS_LD_LAT_THRESHOLD, "MSR_PEBS_LD_LAT_THRESHOLD", Pmu)
            .needs(Facilities::PEBS).writable(pmu::LATENCY),
        M::new(regs::MSR_PEBS_FRONTEND, "MSR_PEBS_FRONTEND", Pmu)
            .needs(Facilities::PEBS).writable(pmu::FRONTEND),
        residency(regs::MSR_PKG_C3_RESIDENCY, "MSR_PKG_C3-7_RESIDENCY").run(3),
        residency(regs::MSR_CORE_C3_RESIDENCY, "MSR_CORE_C3-7_RESIDENCY").run(3),
        pmu_register(regs::IA32_A_PMC0, "IA32_A_PMC").run(GP_COUNTERS).writable(COUNTER_MASK),
        pmu_register(regs::IA32_A_PMC0 + GP_COUNTERS, "IA32_A_PMC4-7")
            .run(UPPER).needs(EIGHT).writable(COUNTER_MASK),
        M::new(regs::IA32_DS_AREA, "IA32_DS_AREA", Branch).needs_any(Facilities::DEBUG_STORE),
        residency(regs::MSR_PKG_C2_RESIDENCY, "MSR_PKG_C2_RESIDENCY"),
        residency(regs::MSR_CORE_C1_RESIDENCY, "MSR_CORE_C1_RESIDENCY"),
        lbr_register(regs::MSR_LASTBRANCH_0_FROM_IP, "MSR_LASTBRANCH_x_FROM_IP").run(LBR_ENTRIES),
        lbr_register(regs::MSR_LASTBRANCH_0_TO_IP, "MSR_LASTBRANCH_x_TO_IP").run(LBR_ENTRIES),
        M::new(regs::IA32_TSC_DEADLINE, "IA32_TSC_DEADLINE", Apic).needs(Facilities::TSC_DEADLINE),
        M::new(regs::IA32_X2APIC_BASE, "x2APIC", Apic).run(X2APIC_MSRS).needs(Facilities::X2APIC),
        M::new(regs::IA32_L3_QOS_CFG, "IA32_L3_QOS_CFG", Rdt)
            .needs(Facilities::CDP).writable(rdt::CDP_ENABLE),
        M::new(regs::IA32_L2_QOS_CFG, "IA32_L2_QOS_CFG", Rdt)
            .needs(Facilities::L2CAT).writable(rdt::CDP_ENABLE),
        M::new(regs::IA32_QM_EVTSEL, "IA32_QM_EVTSEL", Rdt)
            .needs_any(Facilities::RDT_MONITORING).writable(rdt::QmEventSelect::WRITABLE),
        M::new(regs::IA32_QM_CTR, "IA32_QM_CTR", Rdt)
            .needs_any(Facilities::RDT_MONITORING).faults_on_write()
            .update(UpdateBefore::CacheOccupancy),
        M::new(regs::IA32_PQR_ASSOC, "IA32_PQR_ASSOC", Rdt)
            .needs_any(Facilities::RDT_MONITORING.union(Facilities::RDT_ALLOCATION))
            .writable(rdt::Association::WRITABLE),
        M::new(regs::IA32_L3_QOS_MASK_0, "IA32_L3_QOS_MASK_n", Rdt)
            .run(rdt::L3_COS).needs(Facilities::L3CAT).writable(rdt::full_mask(rdt::L3_MASK_BITS)),
        M::new(regs::IA32_L2_QOS_MASK_0, "IA32_L2_QOS_MASK_n", Rdt)
            .run(rdt::L2_COS).needs(Facilities::L2CAT).writable(rdt::full_mask(rdt::L2_MASK_BITS)),
        M::new(regs::IA32_L2_QOS_EXT_BW_THRTL_0, "IA32_L2_QoS_Ext_BW_Thrtl_n", Rdt)
            .run(rdt::MBA_COS).needs(Facilities::MBA).writable(0xffff),
        M::new(regs::IA32_XSS, "IA32_XSS", Stored)
            .needs(Facilities::LBR).writable(1 << branch_state::COMPONENT),
        lbr_register(regs::MSR_LBR_INFO_0, "MSR_LBR_INFO_x")
            .run(LBR_ENTRIES).writable(LbrInfo::all().bits() | CYC_CNT_MAX),
        lbr_register(regs::IA32_LBR_0_INFO, "IA32_LBR_x_INFO").run(LBR_ENTRIES),
        lbr_register(regs::IA32_LBR_CTL, "IA32_LBR_CTL").writable(LbrCtl::all().bits()),
        lbr_register(regs::IA32_LBR_DEPTH, "IA32_LBR_DEPTH").reset(LBR_ENTRIES as u64),
        lbr_register(regs::IA32_LBR_0_FROM_IP, "IA32_LBR_x_FROM_IP").run(LBR_ENTRIES),
        lbr_register(regs::IA32_LBR_0_TO_IP, "IA32_LBR_x_TO_IP").run(LBR_ENTRIES),
        special(regs::IA32_EFER, "IA32_EFER", ProcessorMsr::Efer),
        passthrough(regs::IA32_STAR, "IA32_STAR", ProcessorMsr::Star),
        passthrough(regs::IA32_LSTAR, "IA32_LSTAR", ProcessorMsr::Lstar),
        passthrough(regs::IA32_CSTAR, "IA32_CSTAR", ProcessorMsr::Cstar),
        M::new(regs::IA32_FMASK, "IA32_FMASK", Stored).writable(LOW_HALF).kvm(Mirrored),
        special(regs::IA32_FS_BASE, "IA32_FS_BASE", ProcessorMsr::FsBase),
        special(regs::IA32_GS_BASE, "IA32_GS_BASE", ProcessorMsr::GsBase),
        passthrough(regs::IA32_KERNEL_GS_BASE, "IA32_KERNEL_GS_BASE", ProcessorMsr::KernelGsBase),
        M::new(regs::IA32_TSC_AUX, "IA32_TSC_AUX", Tsc)
            .needs(Facilities::RDTSCP).writable(LOW_HALF).kvm(Mirrored),
    ]
};
