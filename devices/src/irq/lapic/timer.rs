//! The local APIC timer. SDM Vol. 3A, "APIC Timer" and "TSC-Deadline Mode".
//!
//! The count is never stored: it follows from the crystal's count at which it reaches 0. So a
//! periodic timer does not drift, however late it is looked at; periods that passed unseen give one
//! interrupt.

use super::regs::lvt;
use super::{Lapic, state};
use crate::clock::Ticks;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    OneShot,
    Periodic,
    TscDeadline,
    /// Bits 18:17 = 11b: nothing runs.
    Reserved,
}

impl Mode {
    fn of(entry: u32) -> Self {
        match (entry >> 17) & 3 {
            0 => Self::OneShot,
            1 => Self::Periodic,
            2 => Self::TscDeadline,
            _ => Self::Reserved,
        }
    }

    fn counts(self) -> bool {
        matches!(self, Self::OneShot | Self::Periodic)
    }
}

impl Lapic {
    fn mode(&self) -> Mode {
        Mode::of(self.s.lvt[lvt::TIMER])
    }

    /// Crystal cycles per count: 1 to 128, from bits 3, 1 and 0.
    fn divisor(&self) -> u64 {
        let bits = self.s.divide & 3 | (self.s.divide >> 1) & 4;
        1 << ((bits + 1) & 7)
    }

    /// When the timer next raises an interrupt.
    pub fn due(&self) -> Option<Ticks> {
        self.due
    }

    pub(super) fn update_due(&mut self) {
        let masked = self.s.lvt[lvt::TIMER] & lvt::MASKED != 0;
        self.due = match self.mode() {
            // A masked timer is brought up to date when software looks.
            _ if masked => None,
            Mode::OneShot | Mode::Periodic => self.s.zero_at.map(|zero| self.crystal.ticks(zero)),
            Mode::TscDeadline if self.s.tsc_deadline != 0 => {
                let left = self
                    .s
                    .tsc_deadline
                    .wrapping_sub(self.seen.wrapping_add(self.s.tsc_offset));
                // A deadline beyond the end of the clock never comes.
                self.seen.checked_add(left)
            }
            Mode::TscDeadline | Mode::Reserved => None,
        };
    }

    /// Fires the timer if it is due.
    pub fn advance(&mut self, now: Ticks) {
        self.seen = now;
        match self.mode() {
            Mode::TscDeadline => {
                let tsc = now.wrapping_add(self.s.tsc_offset);
                if self.s.tsc_deadline != 0 && tsc >= self.s.tsc_deadline {
                    self.s.tsc_deadline = 0;
                    self.fire();
                }
            }
            mode @ (Mode::OneShot | Mode::Periodic) => {
                let count = self.crystal.count(now);
                let Some(zero) = self.s.zero_at.filter(|&zero| zero <= count) else {
                    return;
                };
                let period = u64::from(self.s.initial_count) * self.divisor();
                self.s.zero_at = (mode == Mode::Periodic && period != 0)
                    .then(|| ((count - zero) / period).saturating_add(1))
                    .and_then(|periods| zero.checked_add(periods.checked_mul(period)?));
                self.fire();
            }
            Mode::Reserved => return,
        }
        self.update_due();
    }

    fn fire(&mut self) {
        let entry = self.s.lvt[lvt::TIMER];
        if entry & lvt::MASKED == 0 {
            self.accept((entry & 0xff) as u8, false);
        }
    }

    pub(super) fn current_count(&mut self, now: Ticks) -> u32 {
        self.advance(now);
        let count = self.crystal.count(now);
        let left = self.s.zero_at.map_or(0, |zero| zero.saturating_sub(count));
        u32::try_from(left.div_ceil(self.divisor())).unwrap_or(u32::MAX)
    }

    fn start(&mut self, count: u32, now: Ticks) {
        let left = u64::from(count) * self.divisor();
        let zero = self.crystal.count(now).saturating_add(left);
        self.s.zero_at = (count != 0).then_some(zero);
    }

    pub(super) fn write_initial_count(&mut self, value: u32, now: Ticks) {
        if self.mode() == Mode::TscDeadline {
            return;
        }
        self.advance(now);
        self.s.initial_count = value;
        self.s.zero_at = None;
        if self.mode().counts() {
            self.start(value, now);
        }
        self.update_due();
    }

    /// The count goes on from where it is, at the new rate.
    pub(super) fn write_divide(&mut self, value: u32, now: Ticks) {
        let count = self.current_count(now);
        self.s.divide = value & 0b1011;
        if self.s.zero_at.is_some() {
            self.start(count, now);
        }
        self.update_due();
    }

    pub(super) fn write_lvt_timer(&mut self, value: u32, now: Ticks) {
        self.advance(now);
        let old = self.mode();
        let masked = if self.is_software_enabled() {
            0
        } else {
            lvt::MASKED
        };
        self.s.lvt[lvt::TIMER] = value & state::lvt_writable(lvt::TIMER, self.features) | masked;
        let new = self.mode();
        if old != new && !(old.counts() && new.counts()) {
            self.s.zero_at = None;
            self.s.tsc_deadline = 0;
        }
        self.update_due();
    }

    /// IA32_TSC_DEADLINE: 0 if not armed, or in another mode.
    pub fn tsc_deadline(&mut self, now: Ticks) -> u64 {
        self.advance(now);
        self.s.tsc_deadline
    }

    /// Writes IA32_TSC_DEADLINE; ignored in another mode. `tsc_offset` is guest TSC less clock
    /// ticks.
    pub fn set_tsc_deadline(&mut self, value: u64, tsc_offset: u64, now: Ticks) {
        self.advance(now);
        self.s.tsc_offset = tsc_offset;
        if self.mode() == Mode::TscDeadline {
            self.s.tsc_deadline = value;
        }
        self.advance(now);
    }

    /// The guest's TSC was moved: an armed deadline may have passed.
    pub fn set_tsc_offset(&mut self, tsc_offset: u64, now: Ticks) {
        self.s.tsc_offset = tsc_offset;
        self.advance(now);
    }
}
