//! What an engine must watch, and how far it may run before the counters must be looked at.

use bitflags::bitflags;
use hindsight_regs::pmu::{COUNTER_MASK, EventSelect};

use super::counter::{ALL, Pmu, Source};
use super::events::{Kind, Kinds, Precise, Ring};
use super::pebs::Due;

/// In IA32_FIXED_CTR_CTRL, the ring bits of all counters.
const FIXED_COUNTERS_ON: u64 = 0x333;

bitflags! {
    /// What an engine must tell in its totals, beyond retired instructions.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Needs: u16 {
        /// Some counter runs at all.
        const COUNTING = 1 << 0;
        /// Taken branches, by kind.
        const BRANCHES = 1 << 1;
        /// Conditional branches that are not taken.
        const NOT_TAKEN = 1 << 2;
        /// Loads and stores.
        const ACCESSES = 1 << 3;
        /// Unhalted cycles. Without [`Needs::RING_CYCLES`] it does not matter in which ring.
        const CYCLES = 1 << 4;
        /// Unhalted cycles of one ring.
        const RING_CYCLES = 1 << 5;
        /// A PEBS record may become due: where the last instruction stood must be known then.
        const RECORDS = 1 << 6;
        /// Which branches were mispredicted.
        const PREDICTOR = 1 << 7;
        /// What the caches do with code and data.
        const CACHES = 1 << 8;
    }
}

/// How many more events of some sort may happen, by the ring they happen in. `u64::MAX`: any number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// In both rings together.
    pub both: u64,
    /// In one ring, by [`Ring`].
    pub ring: [u64; 2],
}

impl Quota {
    /// No limit.
    pub const NONE: Self = Self {
        both: u64::MAX,
        ring: [u64::MAX; 2],
    };

    /// How many more may happen while the processor stays in `ring`; 0: look at the counters first.
    pub fn left(&self, ring: Ring) -> u64 {
        self.both.min(self.ring[ring as usize])
    }

    /// `count` of them happened in `ring`.
    pub const fn spend(&mut self, ring: Ring, count: u64) {
        spend(&mut self.both, count);
        spend(&mut self.ring[ring as usize], count);
    }

    /// In some ring, no more may happen.
    pub const fn is_used_up(&self) -> bool {
        self.both == 0 || self.ring[0] == 0 || self.ring[1] == 0
    }

    /// The smallest of the limits.
    pub fn least(&self) -> u64 {
        self.both.min(self.ring[0]).min(self.ring[1])
    }

    /// The stricter of both limits.
    #[must_use]
    pub fn min(&self, other: &Self) -> Self {
        Self {
            both: self.both.min(other.both),
            ring: [0, 1].map(|n| self.ring[n].min(other.ring[n])),
        }
    }

    /// Another unit: every limit that there is goes through `f`.
    #[must_use]
    pub fn map(&self, f: impl Fn(u64) -> u64) -> Self {
        let one = |limit| if limit == u64::MAX { limit } else { f(limit) };
        Self {
            both: one(self.both),
            ring: self.ring.map(one),
        }
    }

    fn tighten(&mut self, source: &Source, left: u64) {
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

/// How far an engine may run before the next [`Pmu::sync`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Retired instructions.
    pub instructions: Quota,
    /// Branches of any kind, those that are not taken among them if [`Needs::NOT_TAKEN`].
    pub branches: Quota,
    /// Instructions that read or write memory, or lines that come to the last level of cache.
    pub accesses: Quota,
    /// Unhalted ticks of the TSC.
    pub cycles: Quota,
    /// The counters want the last instruction before a limit of instructions or cycles executed
    /// alone, because it will be in a PEBS record.
    pub last_alone: bool,
}

impl Limits {
    /// No limit.
    pub const NONE: Self = Self {
        instructions: Quota::NONE,
        branches: Quota::NONE,
        accesses: Quota::NONE,
        cycles: Quota::NONE,
        last_alone: false,
    };
}

/// What an engine that executes instruction after instruction does for the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counting {
    /// Retired instructions before the next look at the counters.
    pub instructions: Quota,
    /// The last of them is executed alone, see [`Limits::last_alone`].
    pub last_alone: bool,
    /// Instructions that read or write memory are told one by one; so many of them before the next
    /// look at the counters.
    pub accesses: Option<Quota>,
    /// Lines of code are told as well, with the instructions.
    pub fetches: bool,
    /// A PEBS record is to be stored as soon as it is known which instruction was the last.
    pub record: Option<Due>,
}

impl Counting {
    /// Nothing is counted that has to be looked at.
    pub const NONE: Self = Self {
        instructions: Quota::NONE,
        last_alone: false,
        accesses: None,
        fetches: false,
        record: None,
    };

    /// The counters must be looked at before the next instruction.
    pub fn is_due(&self) -> bool {
        self.instructions.is_used_up() || self.accesses.is_some_and(|quota| quota.is_used_up())
    }
}

impl Pmu {
    /// What must be counted for the counters that run.
    pub fn needs(&self) -> Needs {
        let mut needs = Needs::empty();
        for source in self.sources.iter().flatten() {
            let kinds = source.event.kinds;
            needs |= Needs::COUNTING;
            for (some, need) in [
                (Kinds::BRANCHES, Needs::BRANCHES),
                (Kinds::of(&[Kind::NotTaken]), Needs::NOT_TAKEN),
                (Kinds::ACCESSES, Needs::ACCESSES),
                (Kinds::CYCLES, Needs::CYCLES),
                (
                    Kinds::MISSED,
                    Needs::BRANCHES
                        .union(Needs::NOT_TAKEN)
                        .union(Needs::PREDICTOR),
                ),
                (Kinds::CACHES, Needs::CACHES),
            ] {
                if kinds.meets(some) {
                    needs |= need;
                }
            }
            if kinds.meets(Kinds::CYCLES) && !source.rings.is_all() {
                needs |= Needs::RING_CYCLES;
            }
            if source.precise.is_some() {
                needs |= Needs::RECORDS;
            }
            if source.data.is_some() && self.config.models {
                needs |= Needs::CACHES;
            }
        }
        needs
    }

    /// Some counter is switched on. Even one of cycles, which come from the clock, needs an engine
    /// of our own: RDPMC never leaves a guest that runs under KVM. The global enable and freeze
    /// bits do not count: handlers of overflows flip them all the time.
    pub fn is_set_up(&self) -> bool {
        let fixed = FIXED_COUNTERS_ON & self.fixed_control != 0;
        fixed
            || self
                .selects
                .iter()
                .any(|&select| EventSelect(select).has(EventSelect::ENABLE))
    }

    /// Some counter is set up to take PEBS records; see [`Pmu::is_set_up`].
    pub fn takes_records(&self) -> bool {
        (0..ALL)
            .filter_map(|n| self.selected(n))
            .any(|source| source.precise.is_some())
    }

    /// How far the engine may run from the totals seen last.
    pub fn limits(&self) -> Limits {
        let mut limits = Limits::NONE;
        for (counter, source) in self.sources.iter().enumerate() {
            let Some(source) = source else { continue };
            if !source.interrupts && source.precise.is_none() {
                // Its overflow only sets a status bit, and the next `sync` is soon enough for that.
                continue;
            }
            let armed = source.precise.is_some() && self.armed >> counter & 1 != 0;
            let left = if armed {
                1
            } else {
                COUNTER_MASK + 1 - self.values[counter]
            };
            limits.tighten(source, left, self.config.tsc_hz);
        }
        limits
    }
}

impl Limits {
    fn tighten(&mut self, source: &Source, left: u64, tsc_hz: u64) {
        let kinds = source.event.kinds;
        if kinds.meets(Kinds::INSTRUCTIONS) {
            self.instructions.tighten(source, left);
        }
        if kinds.meets(Kinds::BRANCHES) || kinds.meets(Kinds::MISSED) {
            self.branches.tighten(source, left);
        }
        if kinds.meets(Kinds::ACCESSES) {
            self.accesses.tighten(source, left);
        }
        if kinds.meets(Kinds::CYCLES) {
            let ratio = tsc_hz / u64::from(crate::cpuid::CRYSTAL_HZ);
            let ticks = if source.event.crystal {
                // The first tick may come at once, the others take at least `ratio` each.
                (left - 1).saturating_mul(ratio).max(1)
            } else {
                left
            };
            self.cycles.tighten(source, ticks);
        }
        self.last_alone |= source.precise == Some(Precise::Here);
    }
}
