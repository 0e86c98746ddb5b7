//! Facilities of a virtual processor: what CPUID and the MSRs show consistently.

use bitflags::bitflags;
use hindsight_regs::branch::DebugCtl;

bitflags! {
    /// The optional facilities of the virtual processor.
    ///
    /// A facility that is absent takes its CPUID bits, its MSRs and its control bits with it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
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
        /// Processor event-based sampling.
        const PEBS = 1 << 8;
        /// Restricted transactional memory and its debugging.
        const RTM = 1 << 9;
        /// Monitoring of L3 occupancy: CPUID.0FH.1:EDX\[0\].
        const CMT = 1 << 10;
        /// Monitoring of memory bandwidth: CPUID.0FH.1:EDX\[2:1\].
        const MBM = 1 << 11;
        /// Capacity masks of the L3: CPUID.10H.0:EBX\[1\].
        const L3CAT = 1 << 12;
        /// Separate L3 masks for code and data: CPUID.10H.1:ECX\[2\].
        const CDP = 1 << 13;
        /// Delay values for memory bandwidth: CPUID.10H.0:EBX\[3\].
        const MBA = 1 << 14;
        /// Capacity masks of the L2, with code and data prioritization: CPUID.10H.0:EBX\[2\].
        const L2CAT = 1 << 15;
        /// Eight general-purpose counters in place of four: CPUID.0AH:EAX\[15:8\].
        const PMU8 = 1 << 16;
        /// System-management interrupts reach the guest.
        const SMM = 1 << 17;
    }
}

/// Facilities by their names in profiles. `rdt` stands for several.
pub(crate) const NAMES: &[(&str, Facilities)] = &[
    ("x2apic", Facilities::X2APIC),
    ("tsc-deadline", Facilities::TSC_DEADLINE),
    ("tsc-adjust", Facilities::TSC_ADJUST),
    ("rdtscp", Facilities::RDTSCP),
    ("btf", Facilities::BTF),
    ("lbr", Facilities::LBR),
    ("bts", Facilities::BTS),
    ("pmu", Facilities::PMU),
    ("pebs", Facilities::PEBS),
    ("rtm", Facilities::RTM),
    ("rdt", Facilities::RDT),
    ("cmt", Facilities::CMT),
    ("mbm", Facilities::MBM),
    ("l3cat", Facilities::L3CAT),
    ("cdp", Facilities::CDP),
    ("mba", Facilities::MBA),
    ("l2cat", Facilities::L2CAT),
    ("smm", Facilities::SMM),
];

/// The facilities of this name in profiles.
pub(crate) fn parse_facility(name: &str) -> Option<Facilities> {
    let found = NAMES.iter().find(|&&(known, _)| known == name);
    found.map(|&(_, facilities)| facilities)
}

/// Bits of a register by the facility that brings them.
type FacilityBits = &'static [(Facilities, u64)];

/// The writable bits of IA32_DEBUGCTL. SDM Vol. 3B, "IA32_DEBUGCTL MSR".
pub(crate) const DEBUGCTL_BITS: FacilityBits = &[
    (Facilities::LBR, DebugCtl::LBR.bits()),
    (Facilities::BTF, DebugCtl::BTF.bits()),
    (
        Facilities::BTS,
        DebugCtl::TR
            .union(DebugCtl::BTS)
            .union(DebugCtl::BTINT)
            .union(DebugCtl::BTS_OFF_OS)
            .union(DebugCtl::BTS_OFF_USR)
            .bits(),
    ),
    (
        Facilities::PMU,
        DebugCtl::FREEZE_LBRS_ON_PMI
            .union(DebugCtl::FREEZE_PERFMON_ON_PMI)
            .union(DebugCtl::UNCORE_PMI_EN)
            .union(DebugCtl::FREEZE_WHILE_SMM)
            .bits(),
    ),
    (Facilities::RTM, DebugCtl::RTM.bits()),
];

impl Facilities {
    /// The facilities that this version of Hindsight provides to a guest under KVM.
    pub const KVM: Self = Self::X2APIC
        .union(Self::TSC_DEADLINE)
        .union(Self::TSC_ADJUST)
        .union(Self::RDTSCP);

    /// The facilities of the default profile in the interpreter.
    pub const INTERP_DEFAULT: Self = Self::KVM
        .union(Self::BTF)
        .union(Self::LBR)
        .union(Self::BTS)
        .union(Self::PMU)
        .union(Self::PEBS)
        .union(Self::RDT);

    /// All facilities that a profile can request from the interpreter.
    pub const INTERP: Self = Self::INTERP_DEFAULT
        .union(Self::L2CAT)
        .union(Self::PMU8)
        .union(Self::SMM)
        .union(Self::RTM);

    /// Resource monitoring and allocation of the default processor.
    pub const RDT: Self = Self::RDT_MONITORING
        .union(Self::L3CAT)
        .union(Self::CDP)
        .union(Self::MBA);

    /// The facilities of which any announces resource monitoring.
    pub const RDT_MONITORING: Self = Self::CMT.union(Self::MBM);

    /// The facilities of which any announces resource allocation.
    pub const RDT_ALLOCATION: Self = Self::L3CAT.union(Self::L2CAT).union(Self::MBA);

    /// The facilities of which any brings the DS area.
    pub const DEBUG_STORE: Self = Self::BTS.union(Self::PEBS);

    /// The facilities of which any brings IA32_PERF_CAPABILITIES.
    pub const PERF_CAPABILITIES: Self = Self::LBR.union(Self::PEBS).union(Self::PMU);

    /// The names of the facilities, as profiles spell them.
    pub fn names(self) -> Vec<&'static str> {
        let mut list: Vec<_> = NAMES
            .iter()
            .filter(|&&(name, facility)| name != "rdt" && self.contains(facility))
            .map(|&(name, _)| name)
            .collect();
        if self.contains(Self::PMU8) {
            list.push("pmu=8");
        }
        list
    }

    /// The writable bits of IA32_DEBUGCTL. SDM Vol. 3B, "IA32_DEBUGCTL MSR".
    pub const fn debugctl_mask(self) -> u64 {
        self.bits_of(DEBUGCTL_BITS)
    }

    /// All bits in `table` whose facility is present.
    pub(crate) const fn bits_of(self, table: FacilityBits) -> u64 {
        let (mut bits, mut row) = (0, 0);
        while row < table.len() {
            if self.contains(table[row].0) {
                bits |= table[row].1;
            }
            row += 1;
        }
        bits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_facilities_give_the_register_values_of_the_processor() {
        let all = Facilities::all();
        assert_eq!(all.debugctl_mask(), 0xffc3);
        assert_eq!(all.difference(Facilities::RTM).debugctl_mask(), 0x7fc3);
    }
}
