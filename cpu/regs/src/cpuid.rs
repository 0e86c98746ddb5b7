//! CPUID feature bits. SDM Vol. 2A, "CPUID - CPU Identification".
//!
//! Each feature is named once, with its leaf, sub-leaf, register and bit.

/// One of the four output registers of CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum CpuidOutput {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

/// Leaf, register and bit by which CPUID announces a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Feature {
    /// Input EAX.
    pub leaf: u32,
    /// Input ECX.
    pub subleaf: u32,
    /// The register that holds the bit.
    pub output: CpuidOutput,
    /// The bit, 0 to 31.
    pub bit: u8,
}

impl Feature {
    const fn new(leaf: u32, output: CpuidOutput, bit: u8) -> Self {
        Self {
            leaf,
            subleaf: 0,
            output,
            bit,
        }
    }

    /// The feature's bit as a mask of its register.
    pub const fn mask(self) -> u32 {
        debug_assert!(self.bit < 32, "a register has 32 bits");
        1 << self.bit
    }

    /// 64-bit DS area.
    pub const DTES64: Self = Self::new(1, CpuidOutput::Ecx, 2);
    /// MONITOR and MWAIT.
    pub const MONITOR: Self = Self::new(1, CpuidOutput::Ecx, 3);
    /// CPL-qualified debug store.
    pub const DS_CPL: Self = Self::new(1, CpuidOutput::Ecx, 4);
    /// IA32_DEBUG_INTERFACE.
    pub const SDBG: Self = Self::new(1, CpuidOutput::Ecx, 11);
    /// IA32_PERF_CAPABILITIES.
    pub const PDCM: Self = Self::new(1, CpuidOutput::Ecx, 15);
    /// x2APIC mode.
    pub const X2APIC: Self = Self::new(1, CpuidOutput::Ecx, 21);
    /// TSC-deadline mode of the APIC timer.
    pub const TSC_DEADLINE: Self = Self::new(1, CpuidOutput::Ecx, 24);
    /// Process-context identifiers.
    pub const PCID: Self = Self::new(1, CpuidOutput::Ecx, 17);
    /// XSAVE.
    pub const XSAVE: Self = Self::new(1, CpuidOutput::Ecx, 26);
    /// A hypervisor is present.
    pub const HYPERVISOR: Self = Self::new(1, CpuidOutput::Ecx, 31);
    /// Debugging extensions.
    pub const DE: Self = Self::new(1, CpuidOutput::Edx, 2);
    /// Time-stamp counter.
    pub const TSC: Self = Self::new(1, CpuidOutput::Edx, 4);
    /// RDMSR and WRMSR.
    pub const MSR: Self = Self::new(1, CpuidOutput::Edx, 5);
    /// Local APIC.
    pub const APIC: Self = Self::new(1, CpuidOutput::Edx, 9);
    /// Debug store.
    pub const DS: Self = Self::new(1, CpuidOutput::Edx, 21);
    /// RDFSBASE and its like.
    pub const FSGSBASE: Self = Self::new(7, CpuidOutput::Ebx, 0);
    /// IA32_TSC_ADJUST.
    pub const TSC_ADJUST: Self = Self::new(7, CpuidOutput::Ebx, 1);
    /// Hardware lock elision.
    pub const HLE: Self = Self::new(7, CpuidOutput::Ebx, 4);
    /// 256-bit integer instructions.
    pub const AVX2: Self = Self::new(7, CpuidOutput::Ebx, 5);
    /// Supervisor-mode execution prevention.
    pub const SMEP: Self = Self::new(7, CpuidOutput::Ebx, 7);
    /// Restricted transactional memory.
    pub const RTM: Self = Self::new(7, CpuidOutput::Ebx, 11);
    /// Resource-director monitoring.
    pub const RDT_M: Self = Self::new(7, CpuidOutput::Ebx, 12);
    /// Resource-director allocation.
    pub const RDT_A: Self = Self::new(7, CpuidOutput::Ebx, 15);
    /// Supervisor-mode access prevention.
    pub const SMAP: Self = Self::new(7, CpuidOutput::Ebx, 20);
    /// Processor trace.
    pub const PT: Self = Self::new(7, CpuidOutput::Ebx, 25);
    /// User-mode instruction prevention.
    pub const UMIP: Self = Self::new(7, CpuidOutput::Ecx, 2);
    /// Protection keys for user pages.
    pub const PKU: Self = Self::new(7, CpuidOutput::Ecx, 3);
    /// RDPID.
    pub const RDPID: Self = Self::new(7, CpuidOutput::Ecx, 22);
    /// VERW overwrites microarchitectural buffers.
    pub const MD_CLEAR: Self = Self::new(7, CpuidOutput::Edx, 10);
    /// IA32_SPEC_CTRL.IBRS and IA32_PRED_CMD.IBPB.
    pub const SPEC_CTRL: Self = Self::new(7, CpuidOutput::Edx, 26);
    /// IA32_SPEC_CTRL.STIBP.
    pub const STIBP: Self = Self::new(7, CpuidOutput::Edx, 27);
    /// IA32_FLUSH_CMD.
    pub const L1D_FLUSH: Self = Self::new(7, CpuidOutput::Edx, 28);
    /// IA32_SPEC_CTRL.SSBD.
    pub const SSBD: Self = Self::new(7, CpuidOutput::Edx, 31);
    /// Architectural LBR.
    pub const ARCH_LBR: Self = Self::new(7, CpuidOutput::Edx, 19);
    /// IA32_ARCH_CAPABILITIES.
    pub const ARCH_CAPABILITIES: Self = Self::new(7, CpuidOutput::Edx, 29);
    /// IA32_MPERF and IA32_APERF.
    pub const APERFMPERF: Self = Self::new(6, CpuidOutput::Ecx, 0);
    /// SYSCALL and SYSRET.
    pub const SYSCALL: Self = Self::new(0x8000_0001, CpuidOutput::Edx, 11);
    /// Execute disable.
    pub const NX: Self = Self::new(0x8000_0001, CpuidOutput::Edx, 20);
    /// RDTSCP and IA32_TSC_AUX.
    pub const RDTSCP: Self = Self::new(0x8000_0001, CpuidOutput::Edx, 27);
    /// Intel 64.
    pub const LONG_MODE: Self = Self::new(0x8000_0001, CpuidOutput::Edx, 29);
    /// Invariant TSC.
    pub const INVARIANT_TSC: Self = Self::new(0x8000_0007, CpuidOutput::Edx, 8);
}

/// Leaf of the TSC and crystal ratio.
pub const LEAF_TSC: u32 = 0x15;
/// Leaf of the nominal frequencies.
pub const LEAF_FREQUENCY: u32 = 0x16;
/// Leaf of architectural LBR.
pub const LEAF_LBR: u32 = 0x1c;
/// First hypervisor leaf; EBX, ECX and EDX hold a signature.
pub const LEAF_HYPERVISOR: u32 = 0x4000_0000;

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(features: &[Feature], leaf: u32, output: CpuidOutput) -> u32 {
        features
            .iter()
            .inspect(|f| assert_eq!((f.leaf, f.subleaf, f.output), (leaf, 0, output)))
            .fold(0, |mask, f| mask | f.mask())
    }

    #[test]
    fn leaf_1_features_match_the_manual() {
        use Feature as F;
        let ecx = [F::DTES64, F::MONITOR, F::DS_CPL, F::SDBG, F::PDCM];
        assert_eq!(mask(&ecx, 1, CpuidOutput::Ecx), 0x0000_881c);
        let ecx = [F::PCID, F::X2APIC, F::TSC_DEADLINE, F::XSAVE, F::HYPERVISOR];
        assert_eq!(mask(&ecx, 1, CpuidOutput::Ecx), 0x8522_0000);
        let edx = [F::DE, F::TSC, F::MSR, F::APIC, F::DS];
        assert_eq!(mask(&edx, 1, CpuidOutput::Edx), 0x0020_0234);
    }

    #[test]
    fn leaf_7_features_match_the_manual() {
        use Feature as F;
        let ebx = [F::TSC_ADJUST, F::HLE, F::RTM, F::RDT_M, F::RDT_A, F::PT];
        assert_eq!(mask(&ebx, 7, CpuidOutput::Ebx), 0x0200_9812);
        let ebx = [F::FSGSBASE, F::SMEP, F::SMAP];
        assert_eq!(mask(&ebx, 7, CpuidOutput::Ebx), 0x0010_0081);
        let ecx = [F::UMIP, F::PKU, F::RDPID];
        assert_eq!(mask(&ecx, 7, CpuidOutput::Ecx), 0x0040_000c);
        assert_eq!(
            mask(&[F::ARCH_LBR, F::ARCH_CAPABILITIES], 7, CpuidOutput::Edx),
            0x2008_0000
        );
        let speculation = [F::MD_CLEAR, F::SPEC_CTRL, F::STIBP, F::L1D_FLUSH, F::SSBD];
        assert_eq!(mask(&speculation, 7, CpuidOutput::Edx), 0x9c00_0400);
    }

    #[test]
    fn other_leaves_match_the_manual() {
        use Feature as F;
        assert_eq!(mask(&[F::APERFMPERF], 6, CpuidOutput::Ecx), 1);
        let edx = [F::SYSCALL, F::NX, F::RDTSCP, F::LONG_MODE];
        assert_eq!(mask(&edx, 0x8000_0001, CpuidOutput::Edx), 0x2810_0800);
        assert_eq!(
            mask(&[F::INVARIANT_TSC], 0x8000_0007, CpuidOutput::Edx),
            0x100
        );
        assert_eq!(
            (LEAF_TSC, LEAF_FREQUENCY, LEAF_LBR, LEAF_HYPERVISOR),
            (0x15, 0x16, 0x1c, 0x4000_0000)
        );
    }
}
