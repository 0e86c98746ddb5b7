//! The totals behind one vCPU's performance counters: events that an engine reports, and cycles,
//! which are the clock's ticks less the time in which the vCPU was halted.

use hindsight_cpu::pmu::{EventKind, EventTotals, Ring};
use hindsight_devices::clock::Ticks;

use crate::state::{PmuTotalsState, RingShare};

/// Totals of one vCPU since the machine was created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PmuTotals {
    /// All but the cycles, which [`PmuTotals::up_to`] fills in.
    pub totals: EventTotals,
    /// Ticks spent halted, up to `halted_since`.
    halted: Ticks,
    /// When the vCPU halted, while it is halted.
    halted_since: Option<Ticks>,
    /// Where both rings stood when cycles were last given to them.
    split: RingShare,
}

impl PmuTotals {
    /// Sets the instructions retired so far, and how many of them at CPL 1 to 3.
    pub fn retired(&mut self, count: u64, user: u64) {
        let system = count.wrapping_sub(user);
        self.totals.set(EventKind::Instruction, Ring::Os, system);
        self.totals.set(EventKind::Instruction, Ring::User, user);
    }

    /// Instructions retired so far.
    pub fn instructions(&self) -> u64 {
        let of = |ring| self.totals.get(EventKind::Instruction, ring);
        of(Ring::Os).wrapping_add(of(Ring::User))
    }

    /// Instructions retired at CPL 1 to 3 so far.
    pub fn user(&self) -> u64 {
        self.totals.get(EventKind::Instruction, Ring::User)
    }

    /// The state to save.
    pub fn save(&self) -> PmuTotalsState {
        PmuTotalsState {
            totals: self.totals,
            halted: self.halted,
            halted_since: self.halted_since,
            split: self.split,
        }
    }

    /// Restores a saved state.
    pub fn restore(&mut self, state: &PmuTotalsState) {
        *self = Self {
            totals: state.totals,
            halted: state.halted,
            halted_since: state.halted_since,
            split: state.split,
        };
    }

    /// Marks the vCPU as halted, if it is not yet.
    pub fn halt(&mut self, now: Ticks) {
        self.halted_since.get_or_insert(now);
    }

    /// Marks the vCPU as running. Returns whether it was halted.
    pub fn wake(&mut self, now: Ticks) -> bool {
        let Some(since) = self.halted_since.take() else {
            return false;
        };
        self.halted = self.halted.wrapping_add(now.saturating_sub(since));
        self.totals.add(EventKind::Wake, Ring::Os, 1);
        true
    }

    /// The totals at `now`.
    ///
    /// Deviation: the cycles since the last call are divided among the rings in proportion to the
    /// instructions that each has retired. Where an instruction is a cycle, as in deterministic mode,
    /// that is exact.
    pub fn up_to(&mut self, now: Ticks) -> EventTotals {
        let since = self
            .halted_since
            .map_or(0, |since| now.saturating_sub(since));
        let cycles = now.saturating_sub(self.halted.saturating_add(since));
        let instructions =
            [Ring::Os, Ring::User].map(|r| self.totals.get(EventKind::Instruction, r));
        let new = cycles.saturating_sub(self.split.cycles);
        let [system, user] =
            [0, 1].map(|r| u128::from(instructions[r].wrapping_sub(self.split.instructions[r])));
        let share = (u128::from(new) * user).checked_div(system + user);
        let share = u64::try_from(share.unwrap_or(0)).unwrap_or(new);
        self.totals.add(EventKind::Cycle, Ring::User, share);
        self.totals
            .add(EventKind::Cycle, Ring::Os, new - share.min(new));
        self.split = RingShare {
            cycles: cycles.max(self.split.cycles),
            instructions,
        };
        self.totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycles(totals: &EventTotals) -> [u64; 2] {
        [Ring::Os, Ring::User].map(|ring| totals.get(EventKind::Cycle, ring))
    }

    #[test]
    fn halted_time_adds_no_cycles() {
        let mut events = PmuTotals::default();
        events.halt(100);
        events.halt(150);
        assert_eq!(cycles(&events.up_to(200)), [100, 0]);
        assert!(events.wake(300));
        assert!(!events.wake(310));
        assert_eq!(cycles(&events.up_to(350)), [150, 0]);
        assert_eq!(events.totals.get(EventKind::Wake, Ring::Os), 1);
    }

    #[test]
    fn cycles_are_divided_among_rings_by_instructions() {
        let mut events = PmuTotals::default();
        events.retired(40, 30);
        assert_eq!(cycles(&events.up_to(40)), [10, 30]);
        events.retired(60, 30);
        assert_eq!(cycles(&events.up_to(80)), [50, 30]);
        // No instruction retired: the cycles count for CPL 0.
        assert_eq!(cycles(&events.up_to(90)), [60, 30]);
    }

    #[test]
    fn paused_clock_adds_no_cycles() {
        let mut events = PmuTotals::default();
        events.retired(10, 10);
        assert_eq!(cycles(&events.up_to(7)), [0, 7]);
        events.retired(20, 20);
        assert_eq!(cycles(&events.up_to(7)), [0, 7]);
    }
}
