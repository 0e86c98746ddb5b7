//! The table of the processor's MSRs. SDM Vol. 4, "Model-Specific Registers (MSRs)".
//!
//! A row may cover a run of consecutive MSRs that behave alike. An MSR in no row does not exist
//! (rules MSR-39, MSR-48 and MSR-49): every access raises #GP(0).

use hindsight_regs::msr as regs;
use hindsight_regs::pmu::{COUNTER_MASK, EventSelect, global};
use hindsight_regs::rdt;

use super::MsrConfig;
use crate::facility::Facilities;
use crate::pmu::access as pmu;
use crate::state::PAT_RESET;

/// Who models an MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// [`crate::tsc::Tsc`].
    Tsc,
    /// [`crate::branch::BranchUnit`].
    Branch,
    /// [`crate::pmu::Pmu`].
    Pmu,
    /// [`crate::rdt::Rdt`].
    Rdt,
    /// The local APIC, in the devices.
    Apic,
    /// The processor state itself, which both ways of running hold ([`crate::state::CpuState`]).
    Processor,
    /// A value with no behaviour beyond what the row says.
    Stored,
    /// Always the reset value; a write is either refused or dropped, as the row says.
    Constant,
}

/// How KVM takes part when the guest runs natively.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnKvm {
    /// The access exits; the model alone answers.
    Filtered,
    /// The access exits, and an accepted write must also reach KVM, because the value acts natively.
    Mirrored,
    /// The guest accesses KVM's own register with no exit.
    Passthrough,
}

/// One row: an MSR, or a run of alike ones.
#[derive(Clone, Copy, Debug)]
pub struct MsrSpec {
    /// First MSR number.
    pub index: u32,
    /// How many consecutive MSRs the row covers.
    pub count: u32,
    /// The manual's name.
    pub name: &'static str,
    /// Who models it.
    pub owner: Owner,
    /// Facilities without which it does not exist.
    pub needs: Facilities,
    /// Value after RESET, where the configuration does not decide it.
    pub reset: u64,
    /// Setting any of these raises #GP(0), where the configuration does not decide it.
    pub reserved: u64,
    /// Writes to these are dropped; the old value stays. They are not checked as reserved.
    pub read_only: u64,
    /// How KVM takes part.
    pub on_kvm: OnKvm,
}

impl MsrSpec {
    const fn new(index: u32, name: &'static str, owner: Owner) -> Self {
        Self {
            index,
            count: 1,
            name,
            owner,
            needs: Facilities::empty(),
            reset: 0,
            reserved: 0,
            read_only: 0,
            on_kvm: OnKvm::Filtered,
        }
    }

    const fn run(self, count: u32) -> Self {
        Self { count, ..self }
    }

    const fn needs(self, needs: Facilities) -> Self {
        Self { needs, ..self }
    }

    const fn reset(self, reset: u64) -> Self {
        Self { reset, ..self }
    }

    /// Only these bits may be written as 1.
    const fn writable(self, mask: u64) -> Self {
        Self {
            reserved: !mask,
            ..self
        }
    }

    /// Every write raises #GP(0).
    const fn no_write(self) -> Self {
        Self {
            on_kvm: OnKvm::Filtered,
            reserved: u64::MAX,
            read_only: 0,
            ..self
        }
    }

    const fn read_only(self, read_only: u64) -> Self {
        Self { read_only, ..self }
    }

    const fn kvm(self, on_kvm: OnKvm) -> Self {
        Self { on_kvm, ..self }
    }

    /// Whether the row covers `index`.
    pub const fn covers(&self, index: u32) -> bool {
        index >= self.index && index - self.index < self.count
    }

    /// Whether a processor of this configuration has the MSR.
    pub const fn present(&self, config: &MsrConfig) -> bool {
        if self.index == regs::IA32_PERF_CAPABILITIES {
            return config.facilities.perf_capabilities().is_some();
        }
        if self.index == regs::IA32_DS_AREA {
            let users = Facilities::BTS.union(Facilities::PEBS);
            return config.facilities.intersects(users);
        }
        if self.index == regs::IA32_PQR_ASSOC {
            let users = Facilities::RDT_MONITORING.union(Facilities::RDT_ALLOCATION);
            return config.facilities.intersects(users);
        }
        if matches!(self.index, regs::IA32_QM_EVTSEL | regs::IA32_QM_CTR) {
            return config.facilities.intersects(Facilities::RDT_MONITORING);
        }
        config.facilities.contains(self.needs)
    }

    /// Value of MSR `index` after RESET.
    pub const fn reset_value(&self, index: u32, config: &MsrConfig) -> u64 {
        let facilities = config.facilities;
        match index {
            regs::IA32_PERF_CAPABILITIES => match facilities.perf_capabilities() {
                Some(value) => value,
                None => 0,
            },
            regs::MSR_PLATFORM_INFO => ((config.tsc_hz / 100_000_000) & 0xff) << 8,
            regs::IA32_MISC_ENABLE => {
                let available = if facilities.contains(Facilities::PMU) {
                    PMU_AVAILABLE
                } else {
                    0
                };
                let no_bts = if facilities.contains(Facilities::BTS) {
                    0
                } else {
                    BTS_UNAVAILABLE
                };
                let no_pebs = if facilities.contains(Facilities::PEBS) {
                    0
                } else {
                    PEBS_UNAVAILABLE
                };
                self.reset | available | no_bts | no_pebs
            }
            _ => self.reset,
        }
    }

    /// Bits that raise #GP(0) when written as 1, in this configuration.
    pub const fn reserved_bits(&self, config: &MsrConfig) -> u64 {
        match self.index {
            regs::IA32_DEBUGCTL => !config.facilities.debugctl_mask(),
            regs::IA32_PERF_GLOBAL_CTRL
            | regs::IA32_PERF_GLOBAL_STATUS_RESET
            | regs::IA32_PERF_GLOBAL_STATUS_SET
                if config.facilities.contains(Facilities::PMU8) =>
            {
                self.reserved & !global::UPPER_COUNTERS
            }
            regs::IA32_PERFEVTSEL0..=IA32_PERFEVTSEL4
                if config.facilities.contains(Facilities::RTM) =>
            {
                self.reserved & !self.in_transactions()
            }
            _ => self.reserved,
        }
    }

    /// The transaction bits of an event selection: IN_TXCP is counter 2's alone (rule PMU-13).
    const fn in_transactions(&self) -> u64 {
        if self.index == IA32_PERFEVTSEL2 {
            EventSelect::IN_TX | EventSelect::IN_TXCP
        } else {
            EventSelect::IN_TX
        }
    }

    /// Whether a write of `value` passes the generic checks. A register that refuses every write
    /// refuses 0 as well.
    pub const fn accepts(&self, value: u64, config: &MsrConfig) -> bool {
        let reserved = self.reserved_bits(config);
        if matches!(self.owner, Owner::Constant | Owner::Pmu | Owner::Rdt) && reserved == u64::MAX {
            return false;
        }
        value & reserved & !self.read_only == 0
    }
}

/// Bits of IA32_MISC_ENABLE that only the configuration decides.
const PMU_AVAILABLE: u64 = 1 << 7;
const BTS_UNAVAILABLE: u64 = 1 << 11;
const PEBS_UNAVAILABLE: u64 = 1 << 12;

/// IA32_ARCH_CAPABILITIES: RDCL_NO, SKIP_L1DFL_VMENTRY, SSB_NO, MDS_NO, PSCHANGE_MC_NO, TAA_NO,
/// SBDR_SSDP_NO, FBSDP_NO, PSDP_NO, BHI_NO, PBRSB_NO, GDS_NO, RFDS_NO, ITS_NO. Guests then leave
/// page-table isolation and the other software mitigations off (rule MSR-47).
const ARCH_CAPABILITIES: u64 = 1
    | 1 << 3
    | 1 << 4
    | 1 << 5
    | 1 << 6
    | 1 << 8
    | 0b111 << 13
    | 1 << 20
    | 1 << 24
    | 1 << 26
    | 1 << 27
    | 1 << 62;

/// Microcode revision 0200005EH (rule MSR-41: at least 02000014H).
const MICROCODE: u64 = 0x0200_005e << 32;

/// IA32_MTRRCAP: eight variable ranges, fixed ranges, write-combining.
const MTRRCAP: u64 = 0x508;

/// IA32_PERFEVTSELx that have a row of their own.
const IA32_PERFEVTSEL2: u32 = regs::IA32_PERFEVTSEL0 + 2;
const IA32_PERFEVTSEL3: u32 = regs::IA32_PERFEVTSEL0 + 3;
const IA32_PERFEVTSEL4: u32 = regs::IA32_PERFEVTSEL0 + 4;

/// What the counters above the fourth need.
const EIGHT: Facilities = Facilities::PMU.union(Facilities::PMU8);

/// What may be written to MSR_OFFCORE_RSP_0 and 1 (rule MSR-40).
const OFFCORE_RSP: u64 = 0x3f_ffff_8fff;

/// All rows, by index.
pub const TABLE: &[MsrSpec] = {
    use MsrSpec as M;
    use OnKvm::{Mirrored, Passthrough};
    use Owner::{Apic, Branch, Constant, Pmu, Processor, Rdt, Stored, Tsc};
    &[
        M::new(
            regs::IA32_TIME_STAMP_COUNTER,
            "IA32_TIME_STAMP_COUNTER",
            Tsc,
        ),
        M::new(regs::IA32_PLATFORM_ID, "IA32_PLATFORM_ID", Constant).no_write(),
        M::new(regs::IA32_APIC_BASE, "IA32_APIC_BASE", Apic).kvm(Mirrored),
        M::new(regs::MSR_SMI_COUNT, "MSR_SMI_COUNT", Constant).no_write(),
        M::new(regs::IA32_TSC_ADJUST, "IA32_TSC_ADJUST", Tsc).needs(Facilities::TSC_ADJUST),
        M::new(regs::IA32_BIOS_SIGN_ID, "IA32_BIOS_SIGN_ID", Constant)
            .reset(MICROCODE)
            .read_only(u64::MAX),
        M::new(regs::IA32_PMC0, "IA32_PMC", Pmu)
            .run(4)
            .needs(Facilities::PMU),
        M::new(regs::IA32_PMC0 + 4, "IA32_PMC4-7", Pmu)
            .run(4)
            .needs(EIGHT),
        M::new(regs::MSR_PLATFORM_INFO, "MSR_PLATFORM_INFO", Constant).no_write(),
        M::new(regs::IA32_MTRRCAP, "IA32_MTRRCAP", Constant)
            .reset(MTRRCAP)
            .no_write(),
        M::new(
            regs::IA32_ARCH_CAPABILITIES,
            "IA32_ARCH_CAPABILITIES",
            Constant,
        )
        .reset(ARCH_CAPABILITIES)
        .no_write(),
        M::new(regs::IA32_SYSENTER_CS, "IA32_SYSENTER_CS", Processor).kvm(Passthrough),
        M::new(regs::IA32_SYSENTER_ESP, "IA32_SYSENTER_ESP", Processor).kvm(Passthrough),
        M::new(regs::IA32_SYSENTER_EIP, "IA32_SYSENTER_EIP", Processor).kvm(Passthrough),
        // No machine-check banks.
        M::new(regs::IA32_MCG_CAP, "IA32_MCG_CAP", Constant).no_write(),
        M::new(regs::IA32_MCG_STATUS, "IA32_MCG_STATUS", Stored).writable(0b111),
        // Selections of a counter differ in their transaction bits.
        M::new(regs::IA32_PERFEVTSEL0, "IA32_PERFEVTSEL0-1", Pmu)
            .run(2)
            .needs(Facilities::PMU)
            .writable(pmu::SELECT)
            .read_only(EventSelect::PIN),
        M::new(IA32_PERFEVTSEL2, "IA32_PERFEVTSEL2", Pmu)
            .needs(Facilities::PMU)
            .writable(pmu::SELECT)
            .read_only(EventSelect::PIN),
        M::new(IA32_PERFEVTSEL3, "IA32_PERFEVTSEL3", Pmu)
            .needs(Facilities::PMU)
            .writable(pmu::SELECT)
            .read_only(EventSelect::PIN),
        M::new(IA32_PERFEVTSEL4, "IA32_PERFEVTSEL4-7", Pmu)
            .run(4)
            .needs(EIGHT)
            .writable(pmu::SELECT)
            .read_only(EventSelect::PIN),
        M::new(regs::IA32_MISC_ENABLE, "IA32_MISC_ENABLE", Stored)
            .reset(1 | 1 << 3 | 1 << 16 | 1 << 18)
            .writable(0x40_00c5_0009 | 1 << 34)
            .read_only(PMU_AVAILABLE | BTS_UNAVAILABLE | PEBS_UNAVAILABLE)
            .kvm(Mirrored),
        M::new(regs::MSR_OFFCORE_RSP_0, "MSR_OFFCORE_RSP", Stored)
            .run(2)
            .needs(Facilities::PMU)
            .writable(OFFCORE_RSP),
        M::new(regs::MSR_LBR_SELECT, "MSR_LBR_SELECT", Branch)
            .needs(Facilities::LBR)
            .writable(0x3ff),
        M::new(regs::MSR_LASTBRANCH_TOS, "MSR_LASTBRANCH_TOS", Branch)
            .needs(Facilities::LBR)
            .writable(0x1f),
        M::new(regs::IA32_DEBUGCTL, "IA32_DEBUGCTL", Branch),
        M::new(regs::MSR_LER_FROM_LIP, "MSR_LER_FROM_LIP", Branch).needs(Facilities::LBR),
        M::new(regs::MSR_LER_TO_LIP, "MSR_LER_TO_LIP", Branch).needs(Facilities::LBR),
        M::new(regs::IA32_MTRR_PHYSBASE0, "IA32_MTRR_PHYSBASE/MASK", Stored).run(16),
        M::new(
            regs::IA32_MTRR_FIX64K_00000,
            "IA32_MTRR_FIX64K_00000",
            Stored,
        ),
        M::new(regs::IA32_MTRR_FIX16K_80000, "IA32_MTRR_FIX16K", Stored).run(2),
        M::new(regs::IA32_MTRR_FIX4K_C0000, "IA32_MTRR_FIX4K", Stored).run(8),
        M::new(regs::IA32_PAT, "IA32_PAT", Processor)
            .reset(PAT_RESET)
            .kvm(Passthrough),
        M::new(regs::IA32_MTRR_DEF_TYPE, "IA32_MTRR_DEF_TYPE", Stored).writable(0xcff),
        M::new(regs::IA32_FIXED_CTR0, "IA32_FIXED_CTR", Pmu)
            .run(3)
            .needs(Facilities::PMU)
            .writable(COUNTER_MASK),
        M::new(
            regs::IA32_PERF_CAPABILITIES,
            "IA32_PERF_CAPABILITIES",
            Constant,
        )
        .no_write(),
        M::new(regs::IA32_FIXED_CTR_CTRL, "IA32_FIXED_CTR_CTRL", Pmu)
            .needs(Facilities::PMU)
            .writable(pmu::FIXED_CONTROL),
        M::new(
            regs::IA32_PERF_GLOBAL_STATUS,
            "IA32_PERF_GLOBAL_STATUS",
            Pmu,
        )
        .needs(Facilities::PMU)
        .no_write(),
        M::new(regs::IA32_PERF_GLOBAL_CTRL, "IA32_PERF_GLOBAL_CTRL", Pmu)
            .needs(Facilities::PMU)
            .writable(global::COUNTERS),
        M::new(
            regs::IA32_PERF_GLOBAL_STATUS_RESET,
            "IA32_PERF_GLOBAL_STATUS_RESET",
            Pmu,
        )
        .needs(Facilities::PMU)
        .writable(global::RESETTABLE),
        M::new(
            regs::IA32_PERF_GLOBAL_STATUS_SET,
            "IA32_PERF_GLOBAL_STATUS_SET",
            Pmu,
        )
        .needs(Facilities::PMU)
        .writable(global::SETTABLE),
        M::new(regs::IA32_PERF_GLOBAL_INUSE, "IA32_PERF_GLOBAL_INUSE", Pmu)
            .needs(Facilities::PMU)
            .no_write(),
        M::new(regs::IA32_PEBS_ENABLE, "IA32_PEBS_ENABLE", Pmu)
            .needs(Facilities::PEBS)
            .writable(pmu::PEBS_ENABLE),
        M::new(
            regs::MSR_PEBS_LD_LAT_THRESHOLD,
            "MSR_PEBS_LD_LAT_THRESHOLD",
            Pmu,
        )
        .needs(Facilities::PEBS)
        .writable(pmu::LATENCY),
        M::new(regs::MSR_PEBS_FRONTEND, "MSR_PEBS_FRONTEND", Pmu)
            .needs(Facilities::PEBS)
            .writable(pmu::FRONTEND),
        M::new(regs::IA32_A_PMC0, "IA32_A_PMC", Pmu)
            .run(4)
            .needs(Facilities::PMU)
            .writable(COUNTER_MASK),
        M::new(regs::IA32_A_PMC0 + 4, "IA32_A_PMC4-7", Pmu)
            .run(4)
            .needs(EIGHT)
            .writable(COUNTER_MASK),
        M::new(regs::IA32_DS_AREA, "IA32_DS_AREA", Branch),
        M::new(
            regs::MSR_LASTBRANCH_0_FROM_IP,
            "MSR_LASTBRANCH_x_FROM_IP",
            Branch,
        )
        .run(32)
        .needs(Facilities::LBR),
        M::new(
            regs::MSR_LASTBRANCH_0_TO_IP,
            "MSR_LASTBRANCH_x_TO_IP",
            Branch,
        )
        .run(32)
        .needs(Facilities::LBR),
        M::new(regs::IA32_TSC_DEADLINE, "IA32_TSC_DEADLINE", Apic).needs(Facilities::TSC_DEADLINE),
        M::new(regs::IA32_X2APIC_BASE, "x2APIC", Apic)
            .run(0x100)
            .needs(Facilities::X2APIC),
        M::new(regs::IA32_L3_QOS_CFG, "IA32_L3_QOS_CFG", Rdt)
            .needs(Facilities::CDP)
            .writable(rdt::CDP_ENABLE),
        M::new(regs::IA32_L2_QOS_CFG, "IA32_L2_QOS_CFG", Rdt)
            .needs(Facilities::L2CAT)
            .writable(rdt::CDP_ENABLE),
        M::new(regs::IA32_QM_EVTSEL, "IA32_QM_EVTSEL", Rdt).writable(rdt::QmEventSelect::WRITABLE),
        M::new(regs::IA32_QM_CTR, "IA32_QM_CTR", Rdt).no_write(),
        M::new(regs::IA32_PQR_ASSOC, "IA32_PQR_ASSOC", Rdt).writable(rdt::Association::WRITABLE),
        M::new(regs::IA32_L3_QOS_MASK_0, "IA32_L3_QOS_MASK_n", Rdt)
            .run(rdt::L3_COS)
            .needs(Facilities::L3CAT)
            .writable(rdt::full_mask(rdt::L3_MASK_BITS)),
        M::new(regs::IA32_L2_QOS_MASK_0, "IA32_L2_QOS_MASK_n", Rdt)
            .run(rdt::L2_COS)
            .needs(Facilities::L2CAT)
            .writable(rdt::full_mask(rdt::L2_MASK_BITS)),
        M::new(
            regs::IA32_L2_QOS_EXT_BW_THRTL_0,
            "IA32_L2_QoS_Ext_BW_Thrtl_n",
            Rdt,
        )
        .run(rdt::MBA_COS)
        .needs(Facilities::MBA)
        .writable(0xffff),
        M::new(regs::MSR_LBR_INFO_0, "MSR_LBR_INFO_x", Branch)
            .run(32)
            .needs(Facilities::LBR)
            .writable(0xe000_0000_0000_ffff),
        M::new(regs::IA32_EFER, "IA32_EFER", Processor).kvm(Passthrough),
        M::new(regs::IA32_STAR, "IA32_STAR", Processor).kvm(Passthrough),
        M::new(regs::IA32_LSTAR, "IA32_LSTAR", Processor).kvm(Passthrough),
        M::new(regs::IA32_CSTAR, "IA32_CSTAR", Processor).kvm(Passthrough),
        M::new(regs::IA32_FMASK, "IA32_FMASK", Stored)
            .writable(0xffff_ffff)
            .kvm(Mirrored),
        M::new(regs::IA32_FS_BASE, "IA32_FS_BASE", Processor).kvm(Passthrough),
        M::new(regs::IA32_GS_BASE, "IA32_GS_BASE", Processor).kvm(Passthrough),
        M::new(regs::IA32_KERNEL_GS_BASE, "IA32_KERNEL_GS_BASE", Processor).kvm(Passthrough),
        M::new(regs::IA32_TSC_AUX, "IA32_TSC_AUX", Tsc)
            .needs(Facilities::RDTSCP)
            .writable(0xffff_ffff)
            .kvm(Mirrored),
    ]
};

/// The row that covers `index`.
pub fn find(index: u32) -> Option<&'static MsrSpec> {
    let after = TABLE.partition_point(|spec| spec.index <= index);
    let spec = TABLE.get(after.checked_sub(1)?)?;
    spec.covers(index).then_some(spec)
}

/// Every (row, MSR number) whose value the table's owner stores, by index.
pub(super) fn stored_indices() -> impl Iterator<Item = (&'static MsrSpec, u32)> {
    TABLE
        .iter()
        .filter(|spec| spec.owner == Owner::Stored)
        .flat_map(|spec| (spec.index..spec.index + spec.count).map(move |index| (spec, index)))
}
