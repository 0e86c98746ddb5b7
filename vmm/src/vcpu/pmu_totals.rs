//! The totals behind one vCPU's performance counters: events that an engine reports, and ticks,
//! which are the clock's less the time in which the vCPU was halted.

use hindsight_cpu::pmu::{EventKind, EventTotals, Ring};
use hindsight_devices::clock::Ticks;

use crate::state::{PmuTotalsState, RingShare};

/// Totals of one vCPU since the machine was created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PmuTotals {
    /// All but cycles and ticks, which [`PmuTotals::up_to`] fills in.
    pub totals: EventTotals,
    /// Ticks spent halted, up to `halted_since`.
    halted: Ticks,
    /// When the vCPU halted, while it is halted.
    halted_since: Option<Ticks>,
    /// Where both rings stood when cycles were last given to them.
    split: RingShare,
    /// Core cycles that an engine has executed, and how many of them were given to the rings; `None`
    /// if they are the ticks of the clock, as in deterministic runs.
    core: Option<CoreCycles>,
}

/// Core cycles of one vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CoreCycles {
    executed: u64,
    split: u64,
}

impl PmuTotals {
    /// Sets the instructions retired so far, and how many of them at CPL 1 to 3.
    pub fn retired(&mut self, count: u64, user: u64) {
        let system = count.wrapping_sub(user);
        self.totals.set(EventKind::Instruction, Ring::Os, system);
        self.totals.set(EventKind::Instruction, Ring::User, user);
    }

    /// Sets the core cycles executed so far, where they are not the ticks of the clock.
    pub fn set_core_cycles(&mut self, executed: u64) {
        self.core.get_or_insert_default().executed = executed;
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
            core: None,
        };
    }

    /// Marks the vCPU as halted. Returns whether it was not yet.
    pub fn halt(&mut self, now: Ticks) -> bool {
        let is_new = self.halted_since.is_none();
        self.halted_since.get_or_insert(now);
        is_new
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
    /// Deviation: the cycles and ticks since the last call are divided among the rings in proportion
    /// to the instructions that each has retired. For cycles that is exact unless a repeated string
    /// instruction and a change of the privilege level are in the same interval; in deterministic
    /// runs, a cycle is a tick.
    pub fn up_to(&mut self, now: Ticks) -> EventTotals {
        let since = self
            .halted_since
            .map_or(0, |since| now.saturating_sub(since));
        let ticks = now.saturating_sub(self.halted.saturating_add(since));
        let instructions =
            [Ring::Os, Ring::User].map(|r| self.totals.get(EventKind::Instruction, r));
        let new = ticks.saturating_sub(self.split.cycles);
        let retired = [0, 1].map(|r| instructions[r].wrapping_sub(self.split.instructions[r]));
        self.divide(EventKind::TscTick, new, retired);
        let cycles = self.core.as_mut().map_or(new, CoreCycles::take);
        self.divide(EventKind::Cycle, cycles, retired);
        self.split = RingShare {
            cycles: ticks.max(self.split.cycles),
            instructions,
        };
        self.totals
    }

    /// Adds `new` events, divided among the rings in proportion to the instructions `retired`.
    fn divide(&mut self, kind: EventKind, new: u64, retired: [u64; 2]) {
        let [system, user] = retired.map(u128::from);
        let share = (u128::from(new) * user).checked_div(system + user);
        let share = u64::try_from(share.unwrap_or(0)).unwrap_or(new).min(new);
        self.totals.add(kind, Ring::User, share);
        self.totals.add(kind, Ring::Os, new - share);
    }
}

impl CoreCycles {
    /// The cycles since the last call.
    const fn take(&mut self) -> u64 {
        let new = self.executed.saturating_sub(self.split);
        self.split += new;
        new
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
        assert!(events.halt(100));
        assert!(!events.halt(150));
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
    fn executed_cycles_are_not_the_ticks_of_the_clock() {
        let mut events = PmuTotals::default();
        events.retired(30, 10);
        events.set_core_cycles(60);
        let totals = events.up_to(9000);
        assert_eq!(cycles(&totals), [40, 20]);
        let ticks = [Ring::Os, Ring::User].map(|ring| totals.get(EventKind::TscTick, ring));
        assert_eq!(ticks, [6000, 3000]);
        events.halt(9000);
        assert_eq!(events.up_to(20_000), totals);
        assert!(events.wake(20_000));
        events.retired(35, 10);
        events.set_core_cycles(65);
        assert_eq!(cycles(&events.up_to(20_100)), [45, 20]);
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
