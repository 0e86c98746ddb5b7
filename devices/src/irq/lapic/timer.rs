//! The local APIC timer. SDM Vol. 3A, "APIC Timer" and "TSC-Deadline Mode".
//!
//! The count is never stored: it follows from the crystal's count at which it reaches 0. So a
//! periodic timer does not drift, however late [`Lapic::advance`] is called; several periods that
//! end between two calls raise one interrupt.

use hindsight_regs::apic::{LapicTimerMode, TimerDivide};

use super::Lapic;
use super::regs::lvt;
use crate::clock::Ticks;

impl Lapic {
    pub(super) fn timer_mode(&self) -> LapicTimerMode {
        self.s.lvt[lvt::TIMER].timer_mode()
    }

    /// Crystal cycles per count: 1 to 128.
    fn divisor(&self) -> u64 {
        self.s.divide.divisor().into()
    }

    /// The time at which the timer next raises an interrupt.
    pub fn due(&self) -> Option<Ticks> {
        self.due
    }

    pub(super) fn update_due(&mut self) {
        self.due = match self.timer_mode() {
            // A masked timer is advanced when software reads it.
            _ if self.s.lvt[lvt::TIMER].is_masked() => None,
            LapicTimerMode::OneShot | LapicTimerMode::Periodic => {
                self.s.zero_at.map(|zero| self.crystal.ticks(zero))
            }
            LapicTimerMode::TscDeadline if self.s.tsc_deadline != 0 => {
                let tsc = self.advanced_to.wrapping_add(self.s.tsc_offset);
                let left = self.s.tsc_deadline.wrapping_sub(tsc);
                // A deadline beyond the end of the clock never comes.
                self.advanced_to.checked_add(left)
            }
            LapicTimerMode::TscDeadline | LapicTimerMode::Reserved => None,
        };
    }

    /// Advances the timer to a time; fires it if it is due.
    pub fn advance(&mut self, now: Ticks) {
        self.advanced_to = now;
        match self.timer_mode() {
            LapicTimerMode::TscDeadline => {
                let tsc = now.wrapping_add(self.s.tsc_offset);
                if self.s.tsc_deadline != 0 && tsc >= self.s.tsc_deadline {
                    self.s.tsc_deadline = 0;
                    self.fire();
                }
            }
            mode @ (LapicTimerMode::OneShot | LapicTimerMode::Periodic) => {
                let count = self.crystal.count(now);
                let Some(zero) = self.s.zero_at.filter(|&zero| zero <= count) else {
                    return;
                };
                let period = u64::from(self.s.initial_count) * self.divisor();
                self.s.zero_at = (mode == LapicTimerMode::Periodic && period != 0)
                    .then(|| ((count - zero) / period).saturating_add(1))
                    .and_then(|periods| zero.checked_add(periods.checked_mul(period)?));
                self.fire();
            }
            LapicTimerMode::Reserved => return,
        }
        self.update_due();
    }

    fn fire(&mut self) {
        let entry = self.s.lvt[lvt::TIMER];
        if !entry.is_masked() {
            self.accept(entry.vector(), false);
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
        if self.timer_mode() == LapicTimerMode::TscDeadline {
            return;
        }
        self.advance(now);
        self.s.initial_count = value;
        self.s.zero_at = None;
        if self.timer_mode().counts_down() {
            self.start(value, now);
        }
        self.update_due();
    }

    /// Writes the divide configuration: the current count continues at the new rate.
    pub(super) fn write_divide(&mut self, value: u32, now: Ticks) {
        let count = self.current_count(now);
        self.s.divide = TimerDivide(value & TimerDivide::MASK);
        if self.s.zero_at.is_some() {
            self.start(count, now);
        }
        self.update_due();
    }

    pub(super) fn write_lvt_timer(&mut self, value: u32, now: Ticks) {
        self.advance(now);
        let old = self.timer_mode();
        self.s.lvt[lvt::TIMER] = self.writable_lvt(lvt::TIMER, value);
        let new = self.timer_mode();
        if old != new && !(old.counts_down() && new.counts_down()) {
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

    /// Writes IA32_TSC_DEADLINE; ignored in another mode.
    ///
    /// `tsc_offset` is the guest's TSC less clock ticks.
    pub fn set_tsc_deadline(&mut self, value: u64, tsc_offset: u64, now: Ticks) {
        self.advance(now);
        self.s.tsc_offset = tsc_offset;
        if self.timer_mode() == LapicTimerMode::TscDeadline {
            self.s.tsc_deadline = value;
        }
        self.advance(now);
    }

    /// Sets the guest's TSC less clock ticks: an armed deadline may have passed by it.
    pub fn set_tsc_offset(&mut self, tsc_offset: u64, now: Ticks) {
        self.s.tsc_offset = tsc_offset;
        self.advance(now);
    }
}
