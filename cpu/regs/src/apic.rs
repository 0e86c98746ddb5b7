//! Local APIC. SDM Vol. 3A, chapter "Advanced Programmable Interrupt Controller (APIC)".

use bitflags::bitflags;

/// Physical address of the registers after reset.
pub const DEFAULT_BASE: u64 = 0xfee0_0000;
/// Bytes of the page that holds the registers in xAPIC mode.
pub const PAGE_SIZE: u64 = 0x1000;
/// First MSR of the registers in x2APIC mode.
pub const X2APIC_MSR_FIRST: u32 = 0x800;
/// Last MSR of the range that is reserved for the registers in x2APIC mode.
pub const X2APIC_MSR_LAST: u32 = 0x8ff;
/// The lowest legal vector of a fixed or lowest-priority interrupt; 0 to 15 are errors.
pub const VECTOR_MIN: u8 = 16;

bitflags! {
    /// Flags of IA32_APIC_BASE; the base address is in the bits from 12 on.
    ///
    /// SDM Vol. 3A, "Local APIC Status and Location".
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct ApicBase: u64 {
        /// Bootstrap processor.
        const BSP = 1 << 8;
        /// x2APIC mode.
        const EXTD = 1 << 10;
        /// APIC global enable.
        const EN = 1 << 11;
    }
}

impl ApicBase {
    /// The flags of a value of IA32_APIC_BASE.
    pub const fn of(value: u64) -> Self {
        Self::from_bits_truncate(value)
    }

    /// Address of the register page of a value of IA32_APIC_BASE, in xAPIC mode only.
    pub const fn page(value: u64) -> Option<u64> {
        let flags = Self::of(value);
        if flags.contains(Self::EN) && !flags.contains(Self::EXTD) {
            Some(value & !(PAGE_SIZE - 1))
        } else {
            None
        }
    }
}

/// A register, by its offset in the memory-mapped page.
///
/// The x2APIC MSR is `0x800 + offset / 16`. SDM Vol. 3A, "The Local APIC Block Diagram" (table
/// "Local APIC Register Address Map") and "x2APIC Register Address Space".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApicRegister(pub u16);

impl ApicRegister {
    /// Local APIC ID.
    pub const ID: Self = Self(0x020);
    /// Version.
    pub const VERSION: Self = Self(0x030);
    /// Task priority.
    pub const TPR: Self = Self(0x080);
    /// Arbitration priority; absent in x2APIC mode.
    pub const APR: Self = Self(0x090);
    /// Processor priority.
    pub const PPR: Self = Self(0x0a0);
    /// End of interrupt.
    pub const EOI: Self = Self(0x0b0);
    /// Remote read; absent in x2APIC mode.
    pub const RRD: Self = Self(0x0c0);
    /// Logical destination.
    pub const LDR: Self = Self(0x0d0);
    /// Destination format; absent in x2APIC mode.
    pub const DFR: Self = Self(0x0e0);
    /// Spurious-interrupt vector, [`Svr`].
    pub const SVR: Self = Self(0x0f0);
    /// In service, first of eight.
    pub const ISR: Self = Self(0x100);
    /// Trigger mode, first of eight.
    pub const TMR: Self = Self(0x180);
    /// Interrupt request, first of eight.
    pub const IRR: Self = Self(0x200);
    /// Error status, [`Esr`].
    pub const ESR: Self = Self(0x280);
    /// Interrupt command, low half; the whole 64 bits in x2APIC mode. See [`Icr`].
    pub const ICR: Self = Self(0x300);
    /// Interrupt command, high half; absent in x2APIC mode.
    pub const ICR_HIGH: Self = Self(0x310);
    /// LVT timer, the first [`LvtEntry`].
    pub const LVT_TIMER: Self = Self(0x320);
    /// LVT thermal sensor.
    pub const LVT_THERMAL: Self = Self(0x330);
    /// LVT performance monitoring.
    pub const LVT_PMC: Self = Self(0x340);
    /// LVT LINT0.
    pub const LVT_LINT0: Self = Self(0x350);
    /// LVT LINT1.
    pub const LVT_LINT1: Self = Self(0x360);
    /// LVT error, the last [`LvtEntry`].
    pub const LVT_ERROR: Self = Self(0x370);
    /// Initial count of the timer.
    pub const TIMER_INITIAL: Self = Self(0x380);
    /// Current count of the timer.
    pub const TIMER_CURRENT: Self = Self(0x390);
    /// Divide configuration of the timer, [`TimerDivide`].
    pub const TIMER_DIVIDE: Self = Self(0x3e0);
    /// Self IPI; only in x2APIC mode.
    pub const SELF_IPI: Self = Self(0x3f0);

    /// MSR of this register in x2APIC mode.
    pub const fn x2apic_msr(self) -> u32 {
        // A widening that `From` cannot do in a const fn.
        X2APIC_MSR_FIRST + (self.0 >> 4) as u32
    }

    /// The register of an x2APIC MSR, if the number is in the reserved range.
    pub const fn from_x2apic_msr(msr: u32) -> Option<Self> {
        if msr < X2APIC_MSR_FIRST || msr > X2APIC_MSR_LAST {
            return None;
        }
        Some(Self(((msr & 0xff) as u16) << 4))
    }

    /// Index of this register in a run of `count` registers that begins with `first`.
    pub const fn index_from(self, first: Self, count: u16) -> Option<usize> {
        if self.0 < first.0 || self.0 & 0xf != 0 {
            return None;
        }
        let index = (self.0 - first.0) >> 4;
        if index < count {
            Some(index as usize)
        } else {
            None
        }
    }
}

/// What an interrupt message does at its destination: three bits of ICR, LVT and I/O APIC entries.
///
/// SDM Vol. 3A, "Interrupt Command Register (ICR)" and "Local Vector Table".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryMode {
    /// 000: a vectored interrupt for every destination.
    Fixed,
    /// 001: a vectored interrupt for the destination with the lowest processor priority.
    LowestPriority,
    /// 010: system-management interrupt.
    Smi,
    /// 100: non-maskable interrupt.
    Nmi,
    /// 101: INIT.
    Init,
    /// 110: start-up IPI; the vector is the number of the 4-KiB page to start at.
    StartUp,
    /// 111: the vector comes from an external controller (8259A).
    ExtInt,
}

impl DeliveryMode {
    /// The mode that the low three bits of `bits` encode; `None` for the reserved 011.
    pub const fn from_bits(bits: u32) -> Option<Self> {
        match bits & 0b111 {
            0b000 => Some(Self::Fixed),
            0b001 => Some(Self::LowestPriority),
            0b010 => Some(Self::Smi),
            0b100 => Some(Self::Nmi),
            0b101 => Some(Self::Init),
            0b110 => Some(Self::StartUp),
            0b111 => Some(Self::ExtInt),
            _ => None,
        }
    }

    /// Whether the message carries a vector that the local APIC checks against [`VECTOR_MIN`].
    pub const fn is_vectored(self) -> bool {
        matches!(self, Self::Fixed | Self::LowestPriority)
    }
}

/// Mode of the local APIC timer: bits 18:17 of its LVT entry. SDM Vol. 3A, "APIC Timer".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LapicTimerMode {
    /// 00: counts down once.
    OneShot,
    /// 01: reloads the initial count at 0.
    Periodic,
    /// 10: fires when the TSC reaches IA32_TSC_DEADLINE.
    TscDeadline,
    /// 11: reserved.
    Reserved,
}

impl LapicTimerMode {
    /// Whether the timer counts the initial count down in this mode.
    pub const fn counts_down(self) -> bool {
        matches!(self, Self::OneShot | Self::Periodic)
    }
}

/// An entry of the local vector table. SDM Vol. 3A, "Local Vector Table".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct LvtEntry(pub u32);

impl LvtEntry {
    /// Delivery status, read-only: send pending.
    pub const DELIVERY_STATUS: u32 = 1 << 12;
    /// Remote IRR, read-only: a level-triggered interrupt was accepted. LINT pins only.
    pub const REMOTE_IRR: u32 = 1 << 14;
    /// Level-triggered. LINT pins only.
    pub const LEVEL: u32 = 1 << 15;
    /// The entry is masked.
    pub const MASKED: u32 = LVT_MASKED;
    /// TSC-deadline mode of the timer; reserved without CPUID.1:ECX\[24\].
    pub const TIMER_DEADLINE: u32 = LVT_TIMER_DEADLINE;

    /// The vector, bits 7:0.
    pub const fn vector(self) -> u8 {
        self.0.to_le_bytes()[0]
    }

    /// The delivery mode, bits 10:8; `None` for the reserved encoding.
    pub const fn delivery_mode(self) -> Option<DeliveryMode> {
        DeliveryMode::from_bits(self.0 >> 8)
    }

    /// Whether the entry is masked.
    pub const fn is_masked(self) -> bool {
        self.0 & Self::MASKED != 0
    }

    /// Whether the entry is level-triggered.
    pub const fn is_level(self) -> bool {
        self.0 & Self::LEVEL != 0
    }

    /// Whether remote IRR is set.
    pub const fn remote_irr(self) -> bool {
        self.0 & Self::REMOTE_IRR != 0
    }

    /// Mode of the timer, bits 18:17; meaningful in the timer's entry only.
    pub const fn timer_mode(self) -> LapicTimerMode {
        match self.0 >> 17 & 0b11 {
            0b00 => LapicTimerMode::OneShot,
            0b01 => LapicTimerMode::Periodic,
            0b10 => LapicTimerMode::TscDeadline,
            _ => LapicTimerMode::Reserved,
        }
    }

    /// This entry with these bits set.
    #[must_use]
    pub const fn with(self, bits: u32) -> Self {
        Self(self.0 | bits)
    }

    /// This entry with these bits cleared.
    #[must_use]
    pub const fn without(self, bits: u32) -> Self {
        Self(self.0 & !bits)
    }
}

bitflags! {
    /// Flags of the spurious-interrupt vector register; the vector is in bits 7:0.
    ///
    /// SDM Vol. 3A, "Spurious Interrupt".
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Svr: u32 {
        /// The APIC is enabled by software.
        const ENABLE = 1 << 8;
        /// Focus processor checking is disabled; without effect on current processors.
        const NO_FOCUS_CHECK = 1 << 9;
        /// An EOI is not broadcast to the I/O APICs.
        const NO_EOI_BROADCAST = 1 << 12;
    }
}

bitflags! {
    /// Error status register. SDM Vol. 3A, "Error Handling".
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Esr: u32 {
        /// An IPI with an illegal vector was to be sent.
        const SEND_ILLEGAL_VECTOR = 1 << 5;
        /// An interrupt with an illegal vector was received.
        const RECEIVE_ILLEGAL_VECTOR = 1 << 6;
        /// A register that does not exist was accessed.
        const ILLEGAL_REGISTER = 1 << 7;
    }
}

/// Destination shorthand: bits 19:18 of the ICR. SDM Vol. 3A, "Interrupt Command Register (ICR)".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shorthand {
    /// 00: no shorthand; the destination field selects the receivers.
    None,
    /// 01: the sender.
    Myself,
    /// 10: all, with the sender.
    All,
    /// 11: all but the sender.
    Others,
}

/// Interrupt command register. SDM Vol. 3A, "Interrupt Command Register (ICR)".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Icr(pub u64);

impl Icr {
    /// The vector, bits 7:0.
    pub const fn vector(self) -> u8 {
        self.0.to_le_bytes()[0]
    }

    /// The delivery mode, bits 10:8; `None` for the reserved encoding.
    pub const fn delivery_mode(self) -> Option<DeliveryMode> {
        DeliveryMode::from_bits((self.0 >> 8 & 0b111) as u32)
    }

    /// Whether the destination is logical, bit 11.
    pub const fn is_logical(self) -> bool {
        self.0 & ICR_LOGICAL as u64 != 0
    }

    /// Whether the level is "assert", bit 14.
    pub const fn is_asserted(self) -> bool {
        self.0 & ICR_ASSERT as u64 != 0
    }

    /// Whether the trigger mode is "level", bit 15.
    pub const fn is_level(self) -> bool {
        self.0 & 1 << 15 != 0
    }

    /// The shorthand, bits 19:18.
    pub const fn shorthand(self) -> Shorthand {
        match self.0 >> 18 & 0b11 {
            0b00 => Shorthand::None,
            0b01 => Shorthand::Myself,
            0b10 => Shorthand::All,
            _ => Shorthand::Others,
        }
    }

    /// The destination of xAPIC mode, bits 63:56.
    pub const fn xapic_destination(self) -> u8 {
        self.0.to_le_bytes()[7]
    }

    /// The destination of x2APIC mode, bits 63:32.
    pub const fn x2apic_destination(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Divide configuration of the timer. SDM Vol. 3A, "APIC Timer".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct TimerDivide(pub u32);

impl TimerDivide {
    /// The bits that exist: 3, 1 and 0.
    pub const MASK: u32 = 0b1011;

    /// Cycles of the crystal per count: a power of two from 1 to 128.
    pub const fn divisor(self) -> u32 {
        let field = self.0 & 0b11 | self.0 >> 1 & 0b100;
        1 << ((field + 1) & 0b111)
    }
}

/// LVT: the entry is masked.
pub const LVT_MASKED: u32 = 1 << 16;
/// LVT timer, mode field 01b: periodic.
pub const LVT_TIMER_PERIODIC: u32 = 0b01 << 17;
/// LVT timer, mode field 10b: TSC deadline.
pub const LVT_TIMER_DEADLINE: u32 = 0b10 << 17;
/// SVR: the APIC is enabled by software.
pub const SVR_ENABLE: u32 = Svr::ENABLE.bits();

/// ICR delivery mode 100b: NMI.
pub const ICR_NMI: u32 = 0b100 << 8;
/// ICR delivery mode 010b: SMI.
pub const ICR_SMI: u32 = 0b010 << 8;
/// ICR delivery mode 101b: INIT.
pub const ICR_INIT: u32 = 0b101 << 8;
/// ICR delivery mode 110b: start-up.
pub const ICR_STARTUP: u32 = 0b110 << 8;
/// ICR destination mode: logical.
pub const ICR_LOGICAL: u32 = 1 << 11;
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

/// ESR: an illegal vector was sent.
pub const ESR_SEND_ILLEGAL_VECTOR: u32 = Esr::SEND_ILLEGAL_VECTOR.bits();
/// ESR: an illegal register address was accessed.
pub const ESR_ILLEGAL_REGISTER: u32 = Esr::ILLEGAL_REGISTER.bits();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apic_base_bits_match_the_manual() {
        assert_eq!(ApicBase::all().bits(), 0xd00);
        assert_eq!(ApicBase::page(0xfee0_0900), Some(0xfee0_0000));
        assert_eq!(ApicBase::page(0xfee0_0d00), None, "x2APIC mode");
        assert_eq!(ApicBase::page(0xfee0_0100), None, "disabled");
    }

    #[test]
    fn x2apic_msrs_match_the_manual() {
        assert_eq!(ApicRegister::ID.x2apic_msr(), 0x802);
        assert_eq!(ApicRegister::LVT_PMC.x2apic_msr(), 0x834);
        assert_eq!(ApicRegister::ICR.x2apic_msr(), 0x830);
        assert_eq!(ApicRegister::TIMER_DIVIDE.x2apic_msr(), 0x83e);
        assert_eq!(ApicRegister::SELF_IPI.x2apic_msr(), 0x83f);
        let icr = ApicRegister::from_x2apic_msr(0x830);
        assert_eq!(icr, Some(ApicRegister::ICR));
        assert_eq!(ApicRegister::from_x2apic_msr(0x7ff), None);
        assert_eq!(ApicRegister::from_x2apic_msr(0x900), None);
    }

    #[test]
    fn register_index_counts_within_its_run() {
        let isr7 = ApicRegister(0x170);
        assert_eq!(isr7.index_from(ApicRegister::ISR, 8), Some(7));
        assert_eq!(isr7.index_from(ApicRegister::TMR, 8), None);
        assert_eq!(ApicRegister::TMR.index_from(ApicRegister::ISR, 8), None);
        assert_eq!(ApicRegister(0x104).index_from(ApicRegister::ISR, 8), None);
    }

    #[test]
    fn icr_of_the_init_and_startup_sequence_matches_the_manual() {
        assert_eq!(ICR_OTHERS | ICR_ASSERT | ICR_INIT, 0x000c_4500);
        assert_eq!(ICR_OTHERS | ICR_ASSERT | ICR_STARTUP | 0x08, 0x000c_4608);
        assert_eq!(ICR_ALL | ICR_ASSERT | ICR_NMI, 0x0008_4400);
        assert_eq!(ICR_SELF | ICR_LOGICAL | ICR_PENDING, 0x0004_1800);
        let icr = Icr(0x0300_0000_000c_c608);
        assert_eq!(icr.delivery_mode(), Some(DeliveryMode::StartUp));
        assert_eq!((icr.vector(), icr.shorthand()), (8, Shorthand::Others));
        assert!(icr.is_asserted() && icr.is_level() && !icr.is_logical());
        assert_eq!(icr.xapic_destination(), 3);
        assert_eq!(icr.x2apic_destination(), 0x0300_0000);
    }

    #[test]
    fn delivery_modes_match_the_manual() {
        let modes = [0, 1, 2, 3, 4, 5, 6, 7].map(DeliveryMode::from_bits);
        use DeliveryMode as D;
        let named = [D::Fixed, D::LowestPriority, D::Smi].map(Some);
        assert_eq!(modes[..3], named);
        assert_eq!(modes[3], None);
        let named = [D::Nmi, D::Init, D::StartUp, D::ExtInt].map(Some);
        assert_eq!(modes[4..], named);
    }

    #[test]
    fn lvt_fields_match_the_manual() {
        assert_eq!(LVT_MASKED | LVT_TIMER_PERIODIC, 0x0003_0000);
        assert_eq!(LVT_TIMER_DEADLINE, 0x0004_0000);
        let entry = LvtEntry(0x5_c441);
        assert_eq!(entry.vector(), 0x41);
        assert_eq!(entry.delivery_mode(), Some(DeliveryMode::Nmi));
        assert!(entry.is_masked() && entry.is_level() && entry.remote_irr());
        assert_eq!(entry.timer_mode(), LapicTimerMode::TscDeadline);
        assert_eq!(LvtEntry::DELIVERY_STATUS, 0x1000);
        assert_eq!(entry.without(LvtEntry::MASKED).0, 0x4_c441);
        assert_eq!(LvtEntry(0x41).with(LvtEntry::LEVEL).0, 0x8041);
    }

    #[test]
    fn svr_and_esr_bits_match_the_manual() {
        assert_eq!(SVR_ENABLE | 0xff, 0x1ff);
        assert_eq!(Svr::all().bits(), 0x1300);
        assert_eq!(Esr::all().bits(), 0xe0);
    }

    #[test]
    fn timer_divisors_match_the_manual() {
        let divisors = [
            0b0000, 0b0001, 0b0010, 0b0011, 0b1000, 0b1001, 0b1010, 0b1011,
        ]
        .map(|bits| TimerDivide(bits).divisor());
        assert_eq!(divisors, [2, 4, 8, 16, 32, 64, 128, 1]);
    }
}
