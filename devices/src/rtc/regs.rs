//! Registers of the MC146818. Motorola MC146818 data sheet, "Registers".

use bitfield_struct::bitfield;
use bitflags::bitflags;

/// Index of a register of the time, the alarm, control or firmware.
pub(super) mod index {
    pub(crate) const SECONDS: u8 = 0x00;
    pub(crate) const SECONDS_ALARM: u8 = 0x01;
    pub(crate) const MINUTES: u8 = 0x02;
    pub(crate) const MINUTES_ALARM: u8 = 0x03;
    pub(crate) const HOURS: u8 = 0x04;
    pub(crate) const HOURS_ALARM: u8 = 0x05;
    pub(crate) const WEEKDAY: u8 = 0x06;
    pub(crate) const DAY: u8 = 0x07;
    pub(crate) const MONTH: u8 = 0x08;
    pub(crate) const YEAR: u8 = 0x09;
    pub(crate) const A: u8 = 0x0a;
    pub(crate) const B: u8 = 0x0b;
    pub(crate) const C: u8 = 0x0c;
    pub(crate) const D: u8 = 0x0d;
    /// The century, as PC firmware keeps it.
    pub(crate) const CENTURY: u8 = 0x32;
}

/// Register A.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub(super) struct RegisterA {
    /// RS: selects the period of the periodic interrupt; 0 disables it.
    #[bits(4)]
    pub(super) rate_select: u8,
    /// DV: 010 for a 32.768-kHz oscillator; 11x holds the divider in reset.
    #[bits(3)]
    pub(super) divider: u8,
    /// UIP: an update of the time registers is in progress; read-only.
    pub(super) update_in_progress: bool,
}

impl RegisterA {
    /// The value that PC firmware leaves: 32.768 kHz, 1024 periodic interrupts per second.
    pub(super) const FIRMWARE: Self = Self::new().with_divider(0b010).with_rate_select(0b0110);

    /// Whether the divider is held in reset, so that the time does not advance.
    pub(super) const fn divider_in_reset(self) -> bool {
        self.divider() & 0b110 == 0b110
    }
}

bitflags! {
    /// Register B.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct RegisterB: u8 {
        /// DSE: daylight saving; without effect.
        const DAYLIGHT_SAVING = 1 << 0;
        /// 24/12: hours are 0 to 23, not 1 to 12 with a PM bit.
        const HOURS_24 = 1 << 1;
        /// DM: time registers are binary, not BCD.
        const BINARY = 1 << 2;
        /// SQWE: square-wave output.
        const SQUARE_WAVE = 1 << 3;
        /// UIE: update-ended interrupt enable.
        const UPDATE = 1 << 4;
        /// AIE: alarm interrupt enable.
        const ALARM = 1 << 5;
        /// PIE: periodic interrupt enable.
        const PERIODIC = 1 << 6;
        /// SET: updates are stopped while software sets the time.
        const SET = 1 << 7;
    }
}

bitflags! {
    /// Register C: interrupt flags, cleared by a read.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct RegisterC: u8 {
        /// UF: an update has ended.
        const UPDATE = 1 << 4;
        /// AF: the time matched the alarm.
        const ALARM = 1 << 5;
        /// PF: a period of the periodic interrupt has passed.
        const PERIODIC = 1 << 6;
        /// IRQF: an enabled flag is set.
        const IRQ = 1 << 7;
    }
}

impl RegisterC {
    /// The flags whose interrupts `enables` enables.
    pub(super) const fn enabled(self, enables: RegisterB) -> Self {
        // Enables and flags have the same bits.
        Self::from_bits_truncate(self.bits() & enables.bits())
            .intersection(Self::UPDATE.union(Self::ALARM).union(Self::PERIODIC))
    }
}

/// Register D, bit 7: the battery is good, and time and memory are valid.
pub(super) const VALID_TIME: u8 = 1 << 7;

/// Alarm bytes from here on match any value: bits 7:6 are set.
pub(super) const ALARM_DONT_CARE: u8 = 0xc0;

/// Bit 7 of an hour in 12-hour form.
pub(super) const PM: u8 = 1 << 7;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn register_fields_match_the_data_sheet() {
        assert_eq!(u8::from(RegisterA::FIRMWARE), 0x26);
        assert!(RegisterA::from(0x76).divider_in_reset());
        assert!(RegisterA::from(0x60).divider_in_reset());
        assert!(!RegisterA::from(0x5f).divider_in_reset());
        assert_eq!(RegisterB::all().bits(), 0xff);
        assert_eq!(RegisterC::all().bits(), 0xf0);
    }

    #[test]
    fn enables_and_flags_have_the_same_bits() {
        let pairs = [
            (RegisterB::UPDATE, RegisterC::UPDATE),
            (RegisterB::ALARM, RegisterC::ALARM),
            (RegisterB::PERIODIC, RegisterC::PERIODIC),
        ];
        for (enable, flag) in pairs {
            assert_eq!(RegisterC::all().enabled(enable), flag);
        }
        assert_eq!(RegisterC::all().enabled(RegisterB::SET), RegisterC::empty());
    }
}
