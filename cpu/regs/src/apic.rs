//! Local APIC. SDM Vol. 3A, chapter "Advanced Programmable Interrupt Controller (APIC)".

use bitflags::bitflags;

/// Physical address of the registers after reset.
pub const DEFAULT_BASE: u64 = 0xfee0_0000;

bitflags! {
    /// Flags of IA32_APIC_BASE; the base address is in the bits from 12 on.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ApicBase: u64 {
        /// Bootstrap processor.
        const BSP = 1 << 8;
        /// x2APIC mode.
        const EXTD = 1 << 10;
        /// APIC global enable.
        const EN = 1 << 11;
    }
}

/// A register: its offset in the memory-mapped page. The x2APIC MSR is `0x800 + offset / 16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApicRegister(pub u16);

impl ApicRegister {
    /// Local APIC ID.
    pub const ID: Self = Self(0x020);
    /// Version.
    pub const VERSION: Self = Self(0x030);
    /// Task priority.
    pub const TPR: Self = Self(0x080);
    /// Processor priority.
    pub const PPR: Self = Self(0x0a0);
    /// End of interrupt.
    pub const EOI: Self = Self(0x0b0);
    /// Logical destination.
    pub const LDR: Self = Self(0x0d0);
    /// Destination format; absent in x2APIC mode.
    pub const DFR: Self = Self(0x0e0);
    /// Spurious-interrupt vector.
    pub const SVR: Self = Self(0x0f0);
    /// In service, first of eight.
    pub const ISR: Self = Self(0x100);
    /// Trigger mode, first of eight.
    pub const TMR: Self = Self(0x180);
    /// Interrupt request, first of eight.
    pub const IRR: Self = Self(0x200);
    /// Error status.
    pub const ESR: Self = Self(0x280);
    /// Interrupt command, low half; the whole 64 bits in x2APIC mode.
    pub const ICR: Self = Self(0x300);
    /// Interrupt command, high half; absent in x2APIC mode.
    pub const ICR_HIGH: Self = Self(0x310);
    /// LVT timer.
    pub const LVT_TIMER: Self = Self(0x320);
    /// LVT thermal sensor.
    pub const LVT_THERMAL: Self = Self(0x330);
    /// LVT performance monitoring.
    pub const LVT_PMC: Self = Self(0x340);
    /// LVT LINT0.
    pub const LVT_LINT0: Self = Self(0x350);
    /// LVT LINT1.
    pub const LVT_LINT1: Self = Self(0x360);
    /// LVT error.
    pub const LVT_ERROR: Self = Self(0x370);
    /// Initial count of the timer.
    pub const TIMER_INITIAL: Self = Self(0x380);
    /// Current count of the timer.
    pub const TIMER_CURRENT: Self = Self(0x390);
    /// Divide configuration of the timer.
    pub const TIMER_DIVIDE: Self = Self(0x3e0);
    /// Self IPI; only in x2APIC mode.
    pub const SELF_IPI: Self = Self(0x3f0);

    /// MSR of this register in x2APIC mode.
    pub const fn x2apic_msr(self) -> u32 {
        // A widening that `From` cannot do in a const fn.
        0x800 + (self.0 >> 4) as u32
    }
}

/// LVT: the entry is masked.
pub const LVT_MASKED: u32 = 1 << 16;
/// LVT timer, mode field 01b: periodic.
pub const LVT_TIMER_PERIODIC: u32 = 0b01 << 17;
/// LVT timer, mode field 10b: TSC deadline.
pub const LVT_TIMER_DEADLINE: u32 = 0b10 << 17;
/// SVR: the APIC is enabled by software.
pub const SVR_ENABLE: u32 = 1 << 8;

/// ICR delivery mode 100b: NMI.
pub const ICR_NMI: u32 = 0b100 << 8;
/// ICR delivery mode 010b: SMI.
pub const ICR_SMI: u32 = 0b010 << 8;
/// ICR delivery mode 101b: INIT.
pub const ICR_INIT: u32 = 0b101 << 8;
/// ICR delivery mode 110b: start-up.
pub const ICR_STARTUP: u32 = 0b110 << 8;
/// ICR delivery status: send pending. xAPIC only.
pub const ICR_PENDING: u32 = 1 << 12;
/// ICR level: assert.
pub const ICR_ASSERT: u32 = 1 << 14;
/// ICR shorthand 01b: self.
pub const ICR_SELF: u32 = 0b01 << 18;
/// ICR shorthand 10b: all including self.
pub const ICR_ALL: u32 = 0b10 << 18;
/// ICR shorthand 11b: all excluding self.
pub const ICR_OTHERS: u32 = 0b11 << 18;
/// ICR destination mode: logical.
pub const ICR_LOGICAL: u32 = 1 << 11;

/// ESR: an illegal vector was sent.
pub const ESR_SEND_ILLEGAL_VECTOR: u32 = 1 << 5;
/// ESR: an illegal register address was accessed.
pub const ESR_ILLEGAL_REGISTER: u32 = 1 << 7;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apic_base_bits_match_the_manual() {
        assert_eq!(ApicBase::all().bits(), 0xd00);
    }

    #[test]
    fn x2apic_msrs_match_the_manual() {
        assert_eq!(ApicRegister::ID.x2apic_msr(), 0x802);
        assert_eq!(ApicRegister::LVT_PMC.x2apic_msr(), 0x834);
        assert_eq!(ApicRegister::ICR.x2apic_msr(), 0x830);
        assert_eq!(ApicRegister::TIMER_DIVIDE.x2apic_msr(), 0x83e);
        assert_eq!(ApicRegister::SELF_IPI.x2apic_msr(), 0x83f);
    }

    #[test]
    fn icr_of_the_init_and_startup_sequence_matches_the_manual() {
        assert_eq!(ICR_OTHERS | ICR_ASSERT | ICR_INIT, 0x000c_4500);
        assert_eq!(ICR_OTHERS | ICR_ASSERT | ICR_STARTUP | 0x08, 0x000c_4608);
        assert_eq!(ICR_ALL | ICR_ASSERT | ICR_NMI, 0x0008_4400);
        assert_eq!(ICR_SELF | ICR_LOGICAL | ICR_PENDING, 0x0004_1800);
    }

    #[test]
    fn lvt_timer_fields_match_the_manual() {
        assert_eq!(LVT_MASKED | LVT_TIMER_PERIODIC, 0x0003_0000);
        assert_eq!(LVT_TIMER_DEADLINE, 0x0004_0000);
        assert_eq!(SVR_ENABLE | 0xff, 0x1ff);
    }

    #[test]
    fn esr_bits_match_the_manual() {
        assert_eq!(ESR_SEND_ILLEGAL_VECTOR, 0x20);
        assert_eq!(ESR_ILLEGAL_REGISTER, 0x80);
    }
}
