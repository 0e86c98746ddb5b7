//! What an engine must count, and how far it may run before the next [`Pmu::sync`].

use bitflags::bitflags;
use hindsight_regs::pmu::EventSelect;

use super::counter::{ALL, Pmu, RunningCounter, bit};
use super::events::{EventKind, EventKinds, Ring};
use super::pebs::PebsDue;
use super::selection::PebsTiming;

/// The ring bits of all counters in IA32_FIXED_CTR_CTRL.
const FIXED_COUNTERS_ON: u64 = 0x3333;

bitflags! {
    /// What the totals of an engine must contain, beyond retired instructions.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct PmuNeeds: u16 {
        /// Some counter runs.
        const COUNTING = 1 << 0;
        /// Taken branches, by kind.
        const BRANCHES = 1 << 1;
        /// Conditional branches that are not taken.
        const NOT_TAKEN = 1 << 2;
        /// Loads and stores.
        const ACCESSES = 1 << 3;
        /// Unhalted core cycles or ticks of the TSC; without [`PmuNeeds::RING_CYCLES`] they may be in
        /// either ring.
        const CYCLES = 1 << 4;
        /// Those by ring.
        const RING_CYCLES = 1 << 5;
        /// A PEBS record may become due, which needs the address of the last instruction.
        const RECORDS = 1 << 6;
        /// Which branches were mispredicted.
        const PREDICTOR = 1 << 7;
        /// Hits and misses of the caches, for code and data.
        const CACHES = 1 << 8;
    }
}

/// How many more events the engine may execute, by ring. `u64::MAX` is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventQuota {
    /// Events in both rings together.
    pub both: u64,
    /// Events in one ring, by [`Ring`].
    pub ring: [u64; 2],
}

impl EventQuota {
    /// No limit.
    pub const NONE: Self = Self {
        both: u64::MAX,
        ring: [u64::MAX; 2],
    };

    /// How many more events may happen in `ring`; at 0, [`Pmu::sync`] is due.
    pub fn left(&self, ring: Ring) -> u64 {
        self.both.min(self.ring[ring as usize])
    }

    /// Subtracts `count` events that happened in `ring`.
    pub const fn spend(&mut self, ring: Ring, count: u64) {
        spend(&mut self.both, count);
        spend(&mut self.ring[ring as usize], count);
    }

    /// Whether in some ring no more events may happen.
    pub const fn is_used_up(&self) -> bool {
        self.both == 0 || self.ring[0] == 0 || self.ring[1] == 0
    }

    /// The smallest of the limits.
    pub fn least(&self) -> u64 {
        self.both.min(self.ring[0]).min(self.ring[1])
    }

    /// The smaller of both quotas, limit by limit.
    #[must_use]
    pub fn min(&self, other: &Self) -> Self {
        Self {
            both: self.both.min(other.both),
            ring: [0, 1].map(|n| self.ring[n].min(other.ring[n])),
        }
    }

    /// Converts every limit by `f`, for another unit of counting.
    #[must_use]
    pub fn map(&self, f: impl Fn(u64) -> u64) -> Self {
        let one = |limit| if limit == u64::MAX { limit } else { f(limit) };
        Self {
            both: one(self.both),
            ring: self.ring.map(one),
        }
    }

    fn tighten(&mut self, source: &RunningCounter, left: u64) {
        let limit = match (source.rings.os, source.rings.user) {
            (true, true) => &mut self.both,
            (true, false) => &mut self.ring[Ring::Os as usize],
            _ => &mut self.ring[Ring::User as usize],
        };
        *limit = left.min(*limit);
    }
}

const fn spend(limit: &mut u64, count: u64) {
    if *limit != u64::MAX {
        *limit = limit.saturating_sub(count);
    }
}

/// How many events of each sort may happen before the next [`Pmu::sync`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmuLimits {
    /// Retired instructions.
    pub instructions: EventQuota,
    /// Branches of any kind, those that are not taken among them if [`PmuNeeds::NOT_TAKEN`].
    pub branches: EventQuota,
    /// Instructions that read or write memory, or references to the L3.
    pub accesses: EventQuota,
    /// Unhalted core cycles.
    pub cycles: EventQuota,
    /// Unhalted ticks of the TSC.
    pub ticks: EventQuota,
    /// The last instruction before a limit of instructions or cycles must be executed alone,
    /// because a PEBS record describes it.
    pub last_alone: bool,
}

impl PmuLimits {
    /// No limit.
    pub const NONE: Self = Self {
        instructions: EventQuota::NONE,
        branches: EventQuota::NONE,
        accesses: EventQuota::NONE,
        cycles: EventQuota::NONE,
        ticks: EventQuota::NONE,
        last_alone: false,
    };
}

/// What an engine that executes instruction after instruction does for the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineCounting {
    /// Retired instructions before the next [`Pmu::sync`].
    pub instructions: EventQuota,
    /// The last of them must be executed alone, see [`PmuLimits::last_alone`].
    pub last_alone: bool,
    /// Report each instruction that reads or writes memory. The quota is the number of accesses
    /// before the next [`Pmu::sync`].
    pub accesses: Option<EventQuota>,
    /// Report the lines of code that instructions are fetched from as well.
    pub fetches: bool,
    /// A number that changes when another set of cache models observes the accesses.
    pub cache_models: u8,
    /// Accesses that are certain to hit the line that was used last in their set of the L1, and to
    /// leave its state as it is, may be reported together: they need no address.
    pub batches: bool,
    /// A PEBS record to store as soon as the address of the last instruction is known.
    pub record: Option<PebsDue>,
}

impl EngineCounting {
    /// No counter limits the engine.
    pub const NONE: Self = Self {
        instructions: EventQuota::NONE,
        last_alone: false,
        accesses: None,
        fetches: false,
        cache_models: 0,
        batches: false,
        record: None,
    };

    /// Whether [`Pmu::sync`] is due before the next instruction.
    pub fn is_due(&self) -> bool {
        self.instructions.is_used_up() || self.accesses.is_some_and(|quota| quota.is_used_up())
    }
}

/// What advances with time.
const CLOCKS: EventKinds = EventKinds::CYCLES.union(EventKinds::TSC_TICKS);

impl Pmu {
    /// What the totals must contain for the counters that run.
    pub fn needs(&self) -> PmuNeeds {
        let mut needs = PmuNeeds::empty();
        for source in self.running.iter().flatten() {
            let kinds = source.event.kinds;
            needs |= PmuNeeds::COUNTING;
            for (some, need) in [
                (EventKinds::BRANCHES, PmuNeeds::BRANCHES),
                (EventKinds::of(&[EventKind::NotTaken]), PmuNeeds::NOT_TAKEN),
                (EventKinds::ACCESSES, PmuNeeds::ACCESSES),
                (CLOCKS, PmuNeeds::CYCLES),
                (
                    EventKinds::MISPREDICTED,
                    PmuNeeds::BRANCHES
                        .union(PmuNeeds::NOT_TAKEN)
                        .union(PmuNeeds::PREDICTOR),
                ),
                (EventKinds::CACHES, PmuNeeds::CACHES),
            ] {
                if kinds.intersects(some) {
                    needs |= need;
                }
            }
            if kinds.intersects(CLOCKS) && !source.rings.is_all() {
                needs |= PmuNeeds::RING_CYCLES;
            }
            if source.precise.is_some() {
                needs |= PmuNeeds::RECORDS;
            }
            if source.data.is_some() && self.config.uarch {
                needs |= PmuNeeds::CACHES;
            }
        }
        if self.metrics_rings().is_some() && self.config.uarch {
            needs |= PmuNeeds::BRANCHES
                | PmuNeeds::NOT_TAKEN
                | PmuNeeds::PREDICTOR
                | PmuNeeds::ACCESSES
                | PmuNeeds::CACHES;
        }
        needs
    }

    /// Whether some counter is enabled.
    ///
    /// The global enable and freeze bits do not matter, because handlers of overflows toggle them
    /// all the time. A counter of cycles counts as well: under KVM, RDPMC does not exit.
    pub fn is_set_up(&self) -> bool {
        let fixed = FIXED_COUNTERS_ON & self.fixed_control != 0;
        fixed
            || self
                .selects
                .iter()
                .any(|&select| EventSelect(select).has(EventSelect::ENABLE))
    }

    /// Whether some counter is set up to take PEBS records; see [`Pmu::is_set_up`].
    pub fn takes_records(&self) -> bool {
        (0..ALL)
            .filter_map(|n| self.selected(n))
            .any(|source| source.precise.is_some())
    }

    /// How far the engine may run after the last [`Pmu::sync`].
    pub fn limits(&self) -> PmuLimits {
        let mut limits = PmuLimits::NONE;
        for (counter, source) in self.running.iter().enumerate() {
            let Some(source) = source else { continue };
            if !source.interrupts && source.precise.is_none() {
                // Its overflow only sets a status bit, which the next `sync` does early enough.
                continue;
            }
            let armed = source.precise.is_some() && self.armed & bit(counter) != 0;
            let left = if armed {
                1
            } else {
                self.counter_mask + 1 - self.values[counter]
            };
            debug_assert!(left != 0, "an engine can execute at least one event");
            let ratio = self.config.tsc_hz / u64::from(self.model.reference_hz);
            limits.tighten(source, left, ratio);
        }
        limits
    }
}

impl PmuLimits {
    /// `ratio` is the number of ticks of the TSC in one of the reference clock.
    fn tighten(&mut self, source: &RunningCounter, left: u64, ratio: u64) {
        let kinds = source.event.kinds;
        if kinds.intersects(EventKinds::INSTRUCTIONS) {
            self.instructions.tighten(source, left);
        }
        if kinds.intersects(EventKinds::BRANCHES) || kinds.intersects(EventKinds::MISPREDICTED) {
            self.branches.tighten(source, left);
        }
        if kinds.intersects(EventKinds::ACCESSES) {
            self.accesses.tighten(source, left);
        }
        if kinds.intersects(EventKinds::CYCLES) {
            self.cycles
                .tighten(source, left.div_ceil(source.event.weight()));
        }
        if kinds.intersects(EventKinds::TSC_TICKS) {
            let ticks = if source.event.crystal {
                // The first crystal tick may be due at once; the others take at least `ratio` each.
                (left - 1).saturating_mul(ratio).max(1)
            } else {
                left
            };
            self.ticks.tighten(source, ticks);
        }
        self.last_alone |= source.precise == Some(PebsTiming::Here);
    }
}
