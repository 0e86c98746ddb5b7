//! The kinds of events that engines count, and their totals.
//!
//! Which of them an event selection counts is in [`super::selection`].

use crate::branch::{Branch, BranchClass};
use crate::transaction::{AbortCause, TransactionEvent};

/// Kind of a countable event.
///
/// Every branch instruction is one of the six kinds of branches, and also an
/// [`EventKind::Instruction`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum EventKind {
    /// An instruction retired; a repeated string instruction once, when it completes.
    Instruction,
    /// A conditional branch was taken, LOOPcc and JCXZ among them.
    TakenConditional,
    /// A conditional branch was not taken.
    NotTaken,
    /// A near jump.
    Jump,
    /// A near call.
    Call,
    /// A near return.
    Return,
    /// A far branch: far JMP, CALL and RET, IRET, SYSCALL and its like, software interrupts.
    Far,
    /// An instruction that reads memory.
    Load,
    /// An instruction that writes memory.
    Store,
    /// A cycle of the core: one for each retired instruction, and one for each further iteration of a
    /// repeated string instruction.
    Cycle,
    /// The processor left the halted state.
    Wake,
    /// A conditional branch was taken, and mispredicted.
    MispredictedTaken,
    /// A conditional branch was not taken, and mispredicted.
    MispredictedNotTaken,
    /// A near jump or return was mispredicted.
    MispredictedJump,
    /// A near call was mispredicted.
    MispredictedCall,
    /// An instruction whose loads all hit the L1.
    LoadL1,
    /// An instruction whose furthest load hit the L2.
    LoadL2,
    /// An instruction whose furthest load hit the L3.
    LoadL3,
    /// An instruction whose furthest load was served by memory.
    LoadMemory,
    /// An instruction whose slowest load took longer than MSR_PEBS_LD_LAT_THRESHOLD.
    LateLoad,
    /// A locked instruction that reads.
    LockedLoad,
    /// A locked instruction that writes.
    LockedStore,
    /// An instruction with a load that crosses a cache line.
    SplitLoad,
    /// An instruction with a store that crosses a cache line.
    SplitStore,
    /// A reference to the L3.
    LlcReference,
    /// A miss of the L3.
    LlcMiss,
    /// A transaction began.
    RtmStart,
    /// A transaction committed.
    RtmCommit,
    /// A transaction aborted.
    RtmAbort,
    /// A transaction aborted because another processor accessed its lines.
    RtmConflict,
    /// A transaction aborted because it wrote more lines than the L1 holds.
    RtmCapacity,
    /// A line was filled into the L1 for data.
    L1Replacement,
    /// A load requested a line from the L3, which had it.
    OffcoreReadHit,
    /// A load requested a line from the L3, which read it from memory.
    OffcoreReadMiss,
    /// A store requested a line from the L3, which had it.
    OffcoreOwnHit,
    /// A store requested a line from the L3, which read it from memory.
    OffcoreOwnMiss,
    /// A fetch requested a line from the L3, which had it.
    OffcoreCodeHit,
    /// A fetch requested a line from the L3, which read it from memory.
    OffcoreCodeMiss,
    /// A tick of the TSC during which the processor was not halted.
    TscTick,
}

/// Number of kinds.
const KINDS: usize = EventKind::TscTick as usize + 1;

/// The privilege ring in which an event happened.
///
/// Instructions and branches that change the privilege level belong to the ring they start in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Ring {
    /// Privilege level 0.
    Os,
    /// Privilege levels 1 to 3.
    User,
}

impl Ring {
    /// The ring of a privilege level, 0 to 3.
    pub const fn of(cpl: u8) -> Self {
        debug_assert!(cpl < 4, "there are four privilege levels");
        if cpl == 0 { Self::Os } else { Self::User }
    }
}

/// A set of rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rings {
    /// Privilege level 0.
    pub os: bool,
    /// Privilege levels 1 to 3.
    pub user: bool,
}

impl Rings {
    /// Whether the set has no ring.
    pub const fn is_empty(self) -> bool {
        !self.os && !self.user
    }

    /// Whether the set has both rings.
    pub const fn is_all(self) -> bool {
        self.os && self.user
    }
}

/// A set of kinds; a counter counts the sum of its kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventKinds(u64);

impl EventKinds {
    /// The empty set.
    pub const NONE: Self = Self(0);
    /// Unhalted core cycles.
    pub const CYCLES: Self = Self::of(&[EventKind::Cycle]);
    /// Unhalted ticks of the TSC.
    pub const TSC_TICKS: Self = Self::of(&[EventKind::TscTick]);
    /// Retired instructions.
    pub const INSTRUCTIONS: Self = Self::of(&[EventKind::Instruction]);
    /// The cache level that served the loads of an instruction.
    pub const LEVELS: Self = Self::of(&[
        EventKind::LoadL1,
        EventKind::LoadL2,
        EventKind::LoadL3,
        EventKind::LoadMemory,
        EventKind::LateLoad,
    ]);
    /// References and misses of the L3, and fills of the L1.
    pub const LINES: Self = Self::of(&[
        EventKind::LlcReference,
        EventKind::LlcMiss,
        EventKind::L1Replacement,
        EventKind::OffcoreReadHit,
        EventKind::OffcoreReadMiss,
        EventKind::OffcoreOwnHit,
        EventKind::OffcoreOwnMiss,
        EventKind::OffcoreCodeHit,
        EventKind::OffcoreCodeMiss,
    ]);
    /// The kinds that only the cache model reports.
    pub const CACHES: Self = Self(Self::LEVELS.0 | Self::LINES.0);
    /// The kinds that occur with accesses to memory.
    pub const ACCESSES: Self = Self(
        Self::CACHES.0
            | Self::of(&[
                EventKind::Load,
                EventKind::Store,
                EventKind::LockedLoad,
                EventKind::LockedStore,
                EventKind::SplitLoad,
                EventKind::SplitStore,
            ])
            .0,
    );
    /// Mispredicted branches.
    pub const MISPREDICTED: Self =
        Self(Self::MISPREDICTED_TAKEN.0 | Self::of(&[EventKind::MispredictedNotTaken]).0);
    /// Mispredicted near branches that were taken.
    pub const MISPREDICTED_TAKEN: Self = Self::of(&[
        EventKind::MispredictedTaken,
        EventKind::MispredictedJump,
        EventKind::MispredictedCall,
    ]);
    /// The kinds that only the predictor and cache models report.
    pub const MODELLED: Self = Self(Self::MISPREDICTED.0 | Self::CACHES.0);
    /// Conditional branches, taken or not.
    pub const CONDITIONAL: Self = Self::of(&[EventKind::TakenConditional, EventKind::NotTaken]);
    /// Near branches that are taken.
    pub const NEAR_TAKEN: Self = Self::of(&[
        EventKind::TakenConditional,
        EventKind::Jump,
        EventKind::Call,
        EventKind::Return,
    ]);
    /// All branch instructions.
    pub const BRANCHES: Self =
        Self(Self::CONDITIONAL.0 | Self::NEAR_TAKEN.0 | Self::of(&[EventKind::Far]).0);

    /// The set of these kinds.
    pub const fn of(kinds: &[EventKind]) -> Self {
        let (mut set, mut i) = (0, 0);
        while i < kinds.len() {
            set |= 1 << kinds[i] as u8;
            i += 1;
        }
        Self(set)
    }

    /// The kinds of either set.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether a kind is in both sets.
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// Batches of fewer branches are added one by one.
const SMALL_BATCH: usize = 64;

/// Entries of a table by [`key`].
const KEYS: usize = 64;
const _: () = assert!(
    4 * BranchClass::ALL.len() <= KEYS,
    "every key is below KEYS"
);

/// Class, ring and prediction as a number below [`KEYS`].
const fn key(class: BranchClass, ring: Ring, mispredicted: bool) -> usize {
    (class as usize) << 2 | (ring as usize) << 1 | mispredicted as usize
}

/// How often each kind of event has happened, by ring.
///
/// Only differences count, modulo 2^64. A snapshot has no [`EventKind::TscTick`]: in deterministic
/// runs, which alone can be saved, the core's cycles are the ticks of the TSC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(
    feature = "serde",
    serde(into = "SavedTotals", try_from = "SavedTotals")
)]
pub struct EventTotals([[u64; 2]; KINDS]);

/// Number of kinds in a snapshot: all but the last.
#[cfg(feature = "serde")]
const SAVED_KINDS: usize = EventKind::TscTick as usize;

/// The totals in a snapshot, in the order of the kinds.
#[cfg(feature = "serde")]
type SavedTotals = Vec<[u64; 2]>;

#[cfg(feature = "serde")]
impl From<EventTotals> for SavedTotals {
    fn from(totals: EventTotals) -> Self {
        totals.0[..SAVED_KINDS].to_vec()
    }
}

#[cfg(feature = "serde")]
impl TryFrom<SavedTotals> for EventTotals {
    type Error = &'static str;

    fn try_from(saved: SavedTotals) -> Result<Self, Self::Error> {
        let saved: [[u64; 2]; SAVED_KINDS] = saved
            .try_into()
            .map_err(|_| "another number of event kinds")?;
        let mut totals = Self::default();
        totals.0[..SAVED_KINDS].copy_from_slice(&saved);
        totals.0[EventKind::TscTick as usize] = saved[EventKind::Cycle as usize];
        Ok(totals)
    }
}

impl Default for EventTotals {
    fn default() -> Self {
        Self([[0; 2]; KINDS])
    }
}

impl EventTotals {
    /// Adds `count` events of a kind.
    pub const fn add(&mut self, kind: EventKind, ring: Ring, count: u64) {
        let total = &mut self.0[kind as usize][ring as usize];
        *total = total.wrapping_add(count);
    }

    /// Adds the branches that an engine reported.
    pub fn add_branches(&mut self, branches: &[Branch]) {
        if branches.len() < SMALL_BATCH {
            for branch in branches {
                self.add_alike(branch.class, Ring::of(branch.cpl), branch.mispredicted, 1);
            }
            return;
        }
        // A long batch is first counted by key. Neighbours are often alike: four tables take turns,
        // so that no increment waits for the one before.
        let mut tables = [[0_u64; KEYS]; 4];
        for group in branches.chunks(4) {
            for (table, b) in tables.iter_mut().zip(group) {
                table[key(b.class, Ring::of(b.cpl), b.mispredicted) % KEYS] += 1;
            }
        }
        let count = |key: usize| tables.iter().map(|table| table[key]).sum();
        for class in BranchClass::ALL {
            for ring in [Ring::Os, Ring::User] {
                for mispredicted in [false, true] {
                    let key = key(class, ring, mispredicted);
                    self.add_alike(class, ring, mispredicted, count(key));
                }
            }
        }
    }

    /// Adds near branches of one class that an engine counted; it predicted none.
    pub fn add_class(&mut self, class: BranchClass, ring: Ring, count: u64) {
        self.add_alike(class, ring, false, count);
    }

    /// Adds `count` branches of one class and ring, mispredicted or not.
    fn add_alike(&mut self, class: BranchClass, ring: Ring, mispredicted: bool, count: u64) {
        let kind = match class {
            BranchClass::Conditional => EventKind::TakenConditional,
            BranchClass::NotTaken => EventKind::NotTaken,
            BranchClass::DirectJump | BranchClass::IndirectJump => EventKind::Jump,
            BranchClass::DirectCall | BranchClass::CallNext | BranchClass::IndirectCall => {
                EventKind::Call
            }
            BranchClass::Return => EventKind::Return,
            BranchClass::Far | BranchClass::SoftwareInterrupt => EventKind::Far,
            // No branch instructions (rule EVT-17).
            BranchClass::Exception
            | BranchClass::Debug
            | BranchClass::Interrupt
            | BranchClass::Abort => return,
        };
        self.add(kind, ring, count);
        if mispredicted {
            let mispredicted = match kind {
                EventKind::TakenConditional => EventKind::MispredictedTaken,
                EventKind::NotTaken => EventKind::MispredictedNotTaken,
                EventKind::Call => EventKind::MispredictedCall,
                _ => EventKind::MispredictedJump,
            };
            self.add(mispredicted, ring, count);
        }
    }

    /// Adds the events of a transaction's begin or end.
    pub const fn add_transaction_event(&mut self, event: TransactionEvent, ring: Ring) {
        let kind = match event {
            TransactionEvent::Begun => EventKind::RtmStart,
            TransactionEvent::Committed => EventKind::RtmCommit,
            TransactionEvent::Aborted(cause) => {
                match cause {
                    AbortCause::Conflict => self.add(EventKind::RtmConflict, ring, 1),
                    AbortCause::Writes => self.add(EventKind::RtmCapacity, ring, 1),
                    _ => {}
                }
                EventKind::RtmAbort
            }
        };
        self.add(kind, ring, 1);
    }

    /// Sets the total of a kind, for an engine that counts it by itself.
    pub const fn set(&mut self, kind: EventKind, ring: Ring, total: u64) {
        self.0[kind as usize][ring as usize] = total;
    }

    /// The total of a kind.
    pub const fn get(&self, kind: EventKind, ring: Ring) -> u64 {
        self.0[kind as usize][ring as usize]
    }

    /// The sum over these kinds and rings, modulo 2^64.
    pub fn sum(&self, kinds: EventKinds, rings: Rings) -> u64 {
        let mut sum = 0_u64;
        for (kind, [os, user]) in self.0.iter().enumerate() {
            if kinds.0 >> kind & 1 != 0 {
                sum = sum
                    .wrapping_add(if rings.os { *os } else { 0 })
                    .wrapping_add(if rings.user { *user } else { 0 });
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branch_class_numbers_are_consecutive() {
        let numbers = BranchClass::ALL.map(|class| class as usize);
        assert!(numbers.into_iter().eq(0..=BranchClass::NotTaken as usize));
    }

    #[test]
    fn long_batch_counts_like_single_branches() {
        let branch = |class, cpl, mispredicted| Branch {
            from: 1,
            to: 2,
            at: 0,
            class,
            cpl,
            to_cpl: cpl,
            mispredicted,
        };
        // Each combination another number of times.
        let mut branches = Vec::new();
        for class in BranchClass::ALL {
            for (cpl, mispredicted) in [(0, false), (0, true), (3, false), (3, true)] {
                let count = branches.len() % 7 + 1;
                branches.extend(vec![branch(class, cpl, mispredicted); count]);
            }
        }
        assert!(branches.len() >= SMALL_BATCH);
        let (mut together, mut alone) = (EventTotals::default(), EventTotals::default());
        together.add_branches(&branches);
        for one in &branches {
            alone.add_branches(std::slice::from_ref(one));
        }
        assert_eq!(together, alone);
        assert_ne!(alone, EventTotals::default());
    }
}
