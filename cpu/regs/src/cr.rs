//! Control registers. SDM Vol. 3A, "Control Registers" and "Extended Feature Enable Register".

use bitflags::bitflags;

bitflags! {
    /// CR0. SDM Vol. 3A, "Control Registers".
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct Cr0: u64 {
        /// Protection enable.
        const PE = 1 << 0;
        /// Monitor coprocessor.
        const MP = 1 << 1;
        /// Emulation: x87 instructions raise #NM.
        const EM = 1 << 2;
        /// Task switched.
        const TS = 1 << 3;
        /// Extension type; always 1.
        const ET = 1 << 4;
        /// Numeric error.
        const NE = 1 << 5;
        /// Write protect: supervisor writes to read-only pages fault.
        const WP = 1 << 16;
        /// Alignment mask.
        const AM = 1 << 18;
        /// Not write-through.
        const NW = 1 << 29;
        /// Cache disable.
        const CD = 1 << 30;
        /// Paging.
        const PG = 1 << 31;
    }

    /// CR4. SDM Vol. 3A, "Control Registers".
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct Cr4: u64 {
        /// Virtual-8086 mode extensions.
        const VME = 1 << 0;
        /// Protected-mode virtual interrupts.
        const PVI = 1 << 1;
        /// Time-stamp disable: RDTSC and RDTSCP raise #GP above CPL 0.
        const TSD = 1 << 2;
        /// Debugging extensions: I/O breakpoints work, and DR4 and DR5 are no aliases.
        const DE = 1 << 3;
        /// Page-size extensions.
        const PSE = 1 << 4;
        /// Physical-address extension.
        const PAE = 1 << 5;
        /// Machine-check enable.
        const MCE = 1 << 6;
        /// Global pages.
        const PGE = 1 << 7;
        /// Performance-counter enable: RDPMC works above CPL 0.
        const PCE = 1 << 8;
        /// FXSAVE and FXRSTOR support.
        const OSFXSR = 1 << 9;
        /// Unmasked SIMD exceptions.
        const OSXMMEXCPT = 1 << 10;
        /// User-mode instruction prevention.
        const UMIP = 1 << 11;
        /// FSGSBASE instructions.
        const FSGSBASE = 1 << 16;
        /// Process-context identifiers.
        const PCIDE = 1 << 17;
        /// XSAVE and extended states.
        const OSXSAVE = 1 << 18;
        /// Supervisor-mode execution prevention.
        const SMEP = 1 << 20;
        /// Supervisor-mode access prevention.
        const SMAP = 1 << 21;
        /// Protection keys for user pages.
        const PKE = 1 << 22;
    }

    /// IA32_EFER. SDM Vol. 3A, "Extended Feature Enable Register".
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct Efer: u64 {
        /// SYSCALL enable.
        const SCE = 1 << 0;
        /// IA-32e mode enable.
        const LME = 1 << 8;
        /// IA-32e mode active.
        const LMA = 1 << 10;
        /// Execute-disable enable.
        const NXE = 1 << 11;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cr0_of_64_bit_mode_matches_the_manual() {
        let cr0 = Cr0::PG | Cr0::WP | Cr0::NE | Cr0::ET | Cr0::PE;
        assert_eq!(cr0.bits(), 0x8001_0031);
        assert_eq!(Cr0::all().bits(), 0xe005_003f);
    }

    #[test]
    fn cr4_bits_match_the_manual() {
        assert_eq!(Cr4::all().bits(), 0x0077_0fff);
        assert_eq!((Cr4::TSD | Cr4::DE | Cr4::PCE).bits(), 0x10c);
    }

    #[test]
    fn efer_bits_match_the_manual() {
        assert_eq!(Efer::all().bits(), 0xd01);
    }
}
