//! RFLAGS. SDM Vol. 1, "EFLAGS Register"; Vol. 3A, "System Flags and Fields in the EFLAGS
//! Register".

use bitflags::bitflags;

bitflags! {
    /// RFLAGS. SDM Vol. 1, "EFLAGS Register".
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct Rflags: u64 {
        /// Carry.
        const CF = 1 << 0;
        /// Bit 1, always 1.
        const FIXED = 1 << 1;
        /// Parity.
        const PF = 1 << 2;
        /// Auxiliary carry.
        const AF = 1 << 4;
        /// Zero.
        const ZF = 1 << 6;
        /// Sign.
        const SF = 1 << 7;
        /// Trap: single step.
        const TF = 1 << 8;
        /// Interrupt enable.
        const IF = 1 << 9;
        /// Direction.
        const DF = 1 << 10;
        /// Overflow.
        const OF = 1 << 11;
        /// I/O privilege level, two bits.
        const IOPL = 3 << 12;
        /// Nested task.
        const NT = 1 << 14;
        /// Resume: instruction breakpoints are ignored for one instruction.
        const RF = 1 << 16;
        /// Virtual-8086 mode.
        const VM = 1 << 17;
        /// Alignment check, or access control.
        const AC = 1 << 18;
        /// Virtual interrupt.
        const VIF = 1 << 19;
        /// Virtual interrupt pending.
        const VIP = 1 << 20;
        /// CPUID can be executed.
        const ID = 1 << 21;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rflags_bits_match_the_manual() {
        assert_eq!(Rflags::all().bits(), 0x003f_7fd7);
        assert_eq!((Rflags::TF | Rflags::RF).bits(), 0x1_0100);
    }
}
