//! The rows of the table, by index.

use hindsight_regs::branch::{CYC_CNT_MAX, LBR_DEPTH, LBR_TOS_MASK, LbrInfo, LbrSelect};
use hindsight_regs::capabilities::{ArchCapabilities, MiscEnable};
use hindsight_regs::msr as regs;
use hindsight_regs::pmu::{COUNTER_MASK, EventSelect, FIXED_COUNTERS, GP_COUNTERS, global};
use hindsight_regs::rdt;

use super::{
    KvmRole, KvmStateCall, MsrSpec, Owner, Presence, ResetValue, UpdateBefore, WritePolicy,
    X2APIC_MSRS,
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
/// The bits of IA32_MISC_ENABLE that are set after RESET in every processor.
const MISC_RESET: MiscEnable = MiscEnable::FAST_STRINGS
    .union(MiscEnable::AUTOMATIC_TCC)
    .union(MiscEnable::SPEED_STEP)
    .union(MiscEnable::MONITOR_FSM);
const MISC_WRITABLE: u64 = MiscEnable::all().bits() & !MISC_AVAILABLE;

fn misc_enable(config: &MsrConfig) -> u64 {
    let has = |facility| config.facilities.contains(facility);
    let mut value = MISC_RESET;
    value.set(MiscEnable::PERFMON_AVAILABLE, has(Facilities::PMU));
    value.set(MiscEnable::BTS_UNAVAILABLE, !has(Facilities::BTS));
    value.set(MiscEnable::PEBS_UNAVAILABLE, !has(Facilities::PEBS));
    value.bits()
}

/// The ratio of the TSC to 100 MHz, in bits 15:8.
fn platform_info(config: &MsrConfig) -> u64 {
    ((config.tsc_hz / 100_000_000) & 0xff) << 8
}

fn perf_capabilities(config: &MsrConfig) -> u64 {
    config.facilities.perf_capabilities().unwrap_or(0)
}

/// All "not affected" bits: guests leave page-table isolation and the other software mitigations
/// off (rule MSR-47).
const ARCH_CAPABILITIES: u64 = ArchCapabilities::all().bits();

/// Microcode revision 0200005EH (rule MSR-41: at least 02000014H).
const MICROCODE: u64 = 0x0200_005e << 32;

/// IA32_MTRRCAP: eight variable ranges, fixed ranges, write-combining.
const MTRRCAP: u64 = 0x508;

/// IA32_MTRR_DEF_TYPE: type, fixed-range enable, enable.
const MTRR_DEF_TYPE: u64 = 0xcff;

/// IA32_MCG_STATUS: RIPV, EIPV, MCIP.
const MCG_STATUS: u64 = 0b111;

/// The facilities that bring the counters above the fourth.
const EIGHT: Facilities = Facilities::PMU.union(Facilities::PMU8);

/// General-purpose counters above the fourth.
const UPPER: u32 = hindsight_regs::pmu::GP_COUNTERS_MAX - GP_COUNTERS;

/// The writable bits of MSR_OFFCORE_RSP_0 and 1 (rule MSR-40).
const OFFCORE_RSP: u64 = 0x3f_ffff_8fff;

/// The writable bits of the global PMU registers for eight counters.
const UPPER_COUNTERS: &[(Facilities, u64)] = &[(Facilities::PMU8, global::UPPER_COUNTERS)];

/// The transaction bits of an event selection (rule PMU-13).
const IN_TX: &[(Facilities, u64)] = &[(Facilities::RTM, EventSelect::IN_TX)];
/// IN_TXCP exists in counter 2 only.
const IN_TX_OR_COMMITTED: &[(Facilities, u64)] =
    &[(Facilities::RTM, EventSelect::IN_TX | EventSelect::IN_TXCP)];

const LBR_ENTRIES: u32 = 32;
const _: () = assert!(LBR_ENTRIES as usize == LBR_DEPTH);
const LOW_HALF: u64 = 0xffff_ffff;

const fn event_select(offset: u32, name: &'static str) -> MsrSpec {
    MsrSpec::new(regs::IA32_PERFEVTSEL0 + offset, name, Owner::Pmu)
        .needs(Facilities::PMU)
        .writable_with(pmu::SELECT, IN_TX)
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

/// All rows, by index.
#[rustfmt::skip]
pub const TABLE: &[MsrSpec] = {
    use MsrSpec as M;
    use KvmRole::Mirrored;
    use Owner::{Apic, Branch, Constant, Pmu, Rdt, Smm, Stored, Tsc};
    &[
        M::new(regs::IA32_TIME_STAMP_COUNTER, "IA32_TIME_STAMP_COUNTER", Tsc),
        M::new(regs::IA32_PLATFORM_ID, "IA32_PLATFORM_ID", Constant).faults_on_write(),
        M::new(regs::IA32_APIC_BASE, "IA32_APIC_BASE", Apic).kvm(Mirrored),
        M::new(regs::MSR_SMI_COUNT, "MSR_SMI_COUNT", Smm).faults_on_write(),
        M::new(regs::IA32_TSC_ADJUST, "IA32_TSC_ADJUST", Tsc).needs(Facilities::TSC_ADJUST),
        M::new(regs::IA32_BIOS_SIGN_ID, "IA32_BIOS_SIGN_ID", Constant)
            .reset(MICROCODE).ignores_writes(),
        pmu_register(regs::IA32_PMC0, "IA32_PMC").run(GP_COUNTERS),
        pmu_register(regs::IA32_PMC0 + GP_COUNTERS, "IA32_PMC4-7").run(UPPER).needs(EIGHT),
        M::new(regs::MSR_PLATFORM_INFO, "MSR_PLATFORM_INFO", Constant)
            .reset_by(platform_info).faults_on_write(),
        M::new(regs::IA32_MTRRCAP, "IA32_MTRRCAP", Constant).reset(MTRRCAP).faults_on_write(),
        M::new(regs::IA32_ARCH_CAPABILITIES, "IA32_ARCH_CAPABILITIES", Constant)
            .reset(ARCH_CAPABILITIES).faults_on_write(),
        passthrough(regs::IA32_SYSENTER_CS, "IA32_SYSENTER_CS", ProcessorMsr::SysenterCs),
        passthrough(regs::IA32_SYSENTER_ESP, "IA32_SYSENTER_ESP", ProcessorMsr::SysenterEsp),
        passthrough(regs::IA32_SYSENTER_EIP, "IA32_SYSENTER_EIP", ProcessorMsr::SysenterEip),
        // No machine-check banks.
        M::new(regs::IA32_MCG_CAP, "IA32_MCG_CAP", Constant).faults_on_write(),
        M::new(regs::IA32_MCG_STATUS, "IA32_MCG_STATUS", Stored).writable(MCG_STATUS),
        event_select(0, "IA32_PERFEVTSEL0-1").run(2),
        event_select(2, "IA32_PERFEVTSEL2").writable_with(pmu::SELECT, IN_TX_OR_COMMITTED),
        event_select(3, "IA32_PERFEVTSEL3"),
        event_select(4, "IA32_PERFEVTSEL4-7").run(UPPER).needs(EIGHT),
        M::new(regs::IA32_MISC_ENABLE, "IA32_MISC_ENABLE", Stored)
            .reset_by(misc_enable).writable(MISC_WRITABLE).read_only(MISC_AVAILABLE).kvm(Mirrored),
        M::new(regs::MSR_OFFCORE_RSP_0, "MSR_OFFCORE_RSP", Stored)
            .run(2).needs(Facilities::PMU).writable(OFFCORE_RSP),
        lbr_register(regs::MSR_LBR_SELECT, "MSR_LBR_SELECT").writable(LbrSelect::all().bits()),
        lbr_register(regs::MSR_LASTBRANCH_TOS, "MSR_LASTBRANCH_TOS").writable(LBR_TOS_MASK),
        M::new(regs::IA32_DEBUGCTL, "IA32_DEBUGCTL", Branch).writable_with(0, DEBUGCTL_BITS),
        lbr_register(regs::MSR_LER_FROM_LIP, "MSR_LER_FROM_LIP"),
        lbr_register(regs::MSR_LER_TO_LIP, "MSR_LER_TO_LIP"),
        M::new(regs::IA32_MTRR_PHYSBASE0, "IA32_MTRR_PHYSBASE/MASK", Stored).run(16),
        M::new(regs::IA32_MTRR_FIX64K_00000, "IA32_MTRR_FIX64K_00000", Stored),
        M::new(regs::IA32_MTRR_FIX16K_80000, "IA32_MTRR_FIX16K", Stored).run(2),
        M::new(regs::IA32_MTRR_FIX4K_C0000, "IA32_MTRR_FIX4K", Stored).run(8),
        passthrough(regs::IA32_PAT, "IA32_PAT", ProcessorMsr::Pat).reset(PAT_RESET),
        M::new(regs::IA32_MTRR_DEF_TYPE, "IA32_MTRR_DEF_TYPE", Stored).writable(MTRR_DEF_TYPE),
        pmu_register(regs::IA32_FIXED_CTR0, "IA32_FIXED_CTR")
            .run(FIXED_COUNTERS).writable(COUNTER_MASK),
        M::new(regs::IA32_PERF_CAPABILITIES, "IA32_PERF_CAPABILITIES", Constant)
            .needs_any(Facilities::PERF_CAPABILITIES).reset_by(perf_capabilities).faults_on_write(),
        pmu_register(regs::IA32_FIXED_CTR_CTRL, "IA32_FIXED_CTR_CTRL").writable(pmu::FIXED_CONTROL),
        pmu_register(regs::IA32_PERF_GLOBAL_STATUS, "IA32_PERF_GLOBAL_STATUS").faults_on_write(),
        pmu_register(regs::IA32_PERF_GLOBAL_CTRL, "IA32_PERF_GLOBAL_CTRL")
            .writable_with(global::COUNTERS, UPPER_COUNTERS),
        pmu_register(regs::IA32_PERF_GLOBAL_STATUS_RESET, "IA32_PERF_GLOBAL_STATUS_RESET")
            .writable_with(global::RESETTABLE, UPPER_COUNTERS),
        pmu_register(regs::IA32_PERF_GLOBAL_STATUS_SET, "IA32_PERF_GLOBAL_STATUS_SET")
            .writable_with(global::SETTABLE, UPPER_COUNTERS),
        pmu_register(regs::IA32_PERF_GLOBAL_INUSE, "IA32_PERF_GLOBAL_INUSE").faults_on_write(),
        M::new(regs::IA32_PEBS_ENABLE, "IA32_PEBS_ENABLE", Pmu)
            .needs(Facilities::PEBS).writable(pmu::PEBS_ENABLE),
        M::new(regs::MSR_PEBS_LD_LAT_THRESHOLD, "MSR_PEBS_LD_LAT_THRESHOLD", Pmu)
            .needs(Facilities::PEBS).writable(pmu::LATENCY),
        M::new(regs::MSR_PEBS_FRONTEND, "MSR_PEBS_FRONTEND", Pmu)
            .needs(Facilities::PEBS).writable(pmu::FRONTEND),
        pmu_register(regs::IA32_A_PMC0, "IA32_A_PMC").run(GP_COUNTERS).writable(COUNTER_MASK),
        pmu_register(regs::IA32_A_PMC0 + GP_COUNTERS, "IA32_A_PMC4-7")
            .run(UPPER).needs(EIGHT).writable(COUNTER_MASK),
        M::new(regs::IA32_DS_AREA, "IA32_DS_AREA", Branch).needs_any(Facilities::DEBUG_STORE),
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
        lbr_register(regs::MSR_LBR_INFO_0, "MSR_LBR_INFO_x")
            .run(LBR_ENTRIES).writable(LbrInfo::all().bits() | CYC_CNT_MAX),
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
