//! MSRs that say what a processor has. SDM Vol. 4, "Architectural MSRs".

use bitflags::bitflags;

bitflags! {
    /// IA32_MISC_ENABLE. SDM Vol. 4, table "IA-32 Architectural MSRs", 1A0H.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct MiscEnable: u64 {
        /// Fast-string operation.
        const FAST_STRINGS = 1 << 0;
        /// Automatic thermal control circuit.
        const AUTOMATIC_TCC = 1 << 3;
        /// Performance monitoring is available; read-only.
        const PERFMON_AVAILABLE = 1 << 7;
        /// Branch trace store is unavailable; read-only.
        const BTS_UNAVAILABLE = 1 << 11;
        /// Processor event-based sampling is unavailable; read-only.
        const PEBS_UNAVAILABLE = 1 << 12;
        /// Enhanced Intel SpeedStep Technology.
        const SPEED_STEP = 1 << 16;
        /// MONITOR and MWAIT.
        const MONITOR_FSM = 1 << 18;
        /// CPUID.0:EAX is limited to 2.
        const LIMIT_CPUID = 1 << 22;
        /// xTPR messages are disabled.
        const XTPR_DISABLE = 1 << 23;
        /// Execute disable is hidden.
        const XD_DISABLE = 1 << 34;
        /// Turbo mode is disabled.
        const TURBO_DISABLE = 1 << 38;
    }
}

bitflags! {
    /// IA32_ARCH_CAPABILITIES. SDM Vol. 4, table "IA-32 Architectural MSRs", 10AH.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ArchCapabilities: u64 {
        /// Not susceptible to rogue data cache load (Meltdown).
        const RDCL_NO = 1 << 0;
        /// Enhanced IBRS: IA32_SPEC_CTRL.IBRS may stay set.
        const IBRS_ALL = 1 << 1;
        /// VM entry need not flush the L1 data cache.
        const SKIP_L1DFL_VMENTRY = 1 << 3;
        /// Not susceptible to speculative store bypass.
        const SSB_NO = 1 << 4;
        /// Not susceptible to microarchitectural data sampling.
        const MDS_NO = 1 << 5;
        /// Not susceptible to machine checks by page-size changes.
        const IF_PSCHANGE_MC_NO = 1 << 6;
        /// Not susceptible to TSX asynchronous abort.
        const TAA_NO = 1 << 8;
        /// Not susceptible to shared buffers data read.
        const SBDR_SSDP_NO = 1 << 13;
        /// Not susceptible to fill buffer stale data propagator.
        const FBSDP_NO = 1 << 14;
        /// Not susceptible to primary stale data propagator.
        const PSDP_NO = 1 << 15;
        /// Not susceptible to branch history injection.
        const BHI_NO = 1 << 20;
        /// Not susceptible to post-barrier return stack buffer issues.
        const PBRSB_NO = 1 << 24;
        /// Not susceptible to gather data sampling.
        const GDS_NO = 1 << 26;
        /// Not susceptible to register file data sampling.
        const RFDS_NO = 1 << 27;
        /// Not susceptible to indirect target selection.
        const ITS_NO = 1 << 62;
    }
}

/// Fields of IA32_PERF_CAPABILITIES. SDM Vol. 3B, "IA32_PERF_CAPABILITIES MSR Enumeration".
pub mod perf {
    /// PEBS records are taken after the eventing instruction.
    pub const PEBS_TRAP: u64 = 1 << 6;
    /// PEBS records hold architectural registers.
    pub const PEBS_ARCH_REG: u64 = 1 << 7;
    /// First bit of the format of PEBS records, bits 11:8.
    pub const PEBS_FORMAT_SHIFT: u32 = 8;
    /// IA32_DEBUGCTL.FREEZE_WHILE_SMM exists.
    pub const FREEZE_WHILE_SMM: u64 = 1 << 12;
    /// Counters can be written in full width through IA32_A_PMCx.
    pub const FULL_WIDTH_WRITE: u64 = 1 << 13;
    /// PEBS baseline: adaptive records, of all events in all counters.
    pub const PEBS_BASELINE: u64 = 1 << 14;
    /// MSR_PERF_METRICS exists.
    pub const PERF_METRICS: u64 = 1 << 15;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misc_enable_bits_match_the_manual() {
        assert_eq!(MiscEnable::all().bits(), 0x44_00c5_1889);
    }

    #[test]
    fn arch_capabilities_bits_match_the_manual() {
        assert_eq!(ArchCapabilities::all().bits(), 0x4000_0000_0d10_e17b);
    }

    #[test]
    fn perf_capabilities_fields_match_the_manual() {
        let pebs = perf::PEBS_TRAP | perf::PEBS_ARCH_REG | 3 << perf::PEBS_FORMAT_SHIFT;
        let counters = perf::FREEZE_WHILE_SMM | perf::FULL_WIDTH_WRITE;
        assert_eq!(5 | pebs | counters, 0x33c5);
    }
}
