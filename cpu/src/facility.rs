//! What a virtual processor has: the facilities that CPUID and the MSRs show consistently.

use bitflags::bitflags;
use serde::{Deserialize, Serialize};

bitflags! {
    /// The optional facilities of the virtual processor. One that is absent takes its CPUID bits,
    /// its MSRs and its control bits with it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Facilities: u64 {
        /// x2APIC mode of the local APIC: CPUID.1:ECX\[21\].
        const X2APIC = 1 << 0;
        /// TSC-deadline mode of the APIC timer: CPUID.1:ECX\[24\].
        const TSC_DEADLINE = 1 << 1;
        /// IA32_TSC_ADJUST: CPUID.7.0:EBX\[1\].
        const TSC_ADJUST = 1 << 2;
        /// RDTSCP and IA32_TSC_AUX: CPUID.80000001H:EDX\[27\].
        const RDTSCP = 1 << 3;
        /// Single-step on branches: IA32_DEBUGCTL.BTF.
        const BTF = 1 << 4;
        /// The last-branch-record stack.
        const LBR = 1 << 5;
        /// The DS area with branch trace store.
        const BTS = 1 << 6;
        /// Performance counters.
        const PMU = 1 << 7;
        /// Precise event-based sampling.
        const PEBS = 1 << 8;
        /// Restricted transactional memory and its debugging.
        const RTM = 1 << 9;
        /// Monitoring of L3 occupancy: CPUID.0FH.1:EDX\[0\].
        const CMT = 1 << 10;
        /// Monitoring of memory bandwidth: CPUID.0FH.1:EDX\[2:1\].
        const MBM = 1 << 11;
        /// Capacity masks of the L3: CPUID.10H.0:EBX\[1\].
        const L3CAT = 1 << 12;
        /// Masks for code and for data: CPUID.10H.1:ECX\[2\].
        const CDP = 1 << 13;
        /// Delay values for memory bandwidth: CPUID.10H.0:EBX\[3\].
        const MBA = 1 << 14;
        /// Capacity masks of the L2, with CDP: CPUID.10H.0:EBX\[2\].
        const L2CAT = 1 << 15;
        /// Eight general-purpose counters in place of four: CPUID.0AH:EAX\[15:8\].
        const PMU8 = 1 << 16;
        /// System-management interrupts reach the guest.
        const SMM = 1 << 17;
    }
}

impl Facilities {
    /// What this version of Hindsight provides when the guest runs natively.
    pub const NATIVE: Self = Self::X2APIC
        .union(Self::TSC_DEADLINE)
        .union(Self::TSC_ADJUST)
        .union(Self::RDTSCP);

    /// What the interpreter provides.
    pub const OBSERVED: Self = Self::NATIVE
        .union(Self::BTF)
        .union(Self::LBR)
        .union(Self::BTS)
        .union(Self::PMU)
        .union(Self::PEBS)
        .union(Self::RDT);

    /// All that profiles can ask of the interpreter.
    pub const INTERPRETED: Self = Self::OBSERVED
        .union(Self::L2CAT)
        .union(Self::PMU8)
        .union(Self::SMM)
        .union(Self::RTM);

    /// Resource monitoring and allocation as the processor has it.
    pub const RDT: Self = Self::RDT_MONITORING
        .union(Self::L3CAT)
        .union(Self::CDP)
        .union(Self::MBA);

    /// Any of these announces resource monitoring.
    pub const RDT_MONITORING: Self = Self::CMT.union(Self::MBM);

    /// Any of these announces resource allocation.
    pub const RDT_ALLOCATION: Self = Self::L3CAT.union(Self::L2CAT).union(Self::MBA);

    /// General-purpose counters.
    pub const fn gp_counters(self) -> u32 {
        if self.contains(Self::PMU8) { 8 } else { 4 }
    }

    /// The value of IA32_PERF_CAPABILITIES, or `None` where CPUID.1:ECX.PDCM is clear.
    /// SDM Vol. 3B, "IA32_PERF_CAPABILITIES".
    pub const fn perf_capabilities(self) -> Option<u64> {
        let mut value = 0;
        if self.contains(Self::LBR) {
            value |= 5;
        }
        if self.contains(Self::PEBS) {
            value |= 0b11 << 6 | 3 << 8;
        }
        if self.contains(Self::PMU) {
            value |= 1 << 12 | 1 << 13;
        }
        if value == 0 { None } else { Some(value) }
    }

    /// The writable bits of IA32_DEBUGCTL. SDM Vol. 3B, "IA32_DEBUGCTL MSR".
    pub const fn debugctl_mask(self) -> u64 {
        let mut mask = 0;
        if self.contains(Self::LBR) {
            mask |= 1;
        }
        if self.contains(Self::BTF) {
            mask |= 1 << 1;
        }
        if self.contains(Self::BTS) {
            mask |= 0b1_1111 << 6;
        }
        if self.contains(Self::PMU) {
            mask |= 0b1111 << 11;
        }
        if self.contains(Self::RTM) {
            mask |= 1 << 15;
        }
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_facilities_give_the_values_of_the_processor() {
        let all = Facilities::all();
        assert_eq!(all.perf_capabilities(), Some(0x33c5));
        assert_eq!(all.debugctl_mask(), 0xffc3);
        assert_eq!(all.difference(Facilities::RTM).debugctl_mask(), 0x7fc3);
    }

    #[test]
    fn profile_without_pebs_reports_3005() {
        let profile = Facilities::all().difference(Facilities::PEBS);
        assert_eq!(profile.perf_capabilities(), Some(0x3005));
    }
}
