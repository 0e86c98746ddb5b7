//! What can be counted: the kinds of events that engines tell, and the encodings that select them.
//! SDM Vol. 3B, "Pre-defined Architectural Performance Events", and the event list of the processor.

use hindsight_regs::pmu::EventSelect;
use serde::{Deserialize, Serialize};

use crate::branch::{Branch, BranchClass};
use crate::transaction::{Cause, Step};

/// Something that happens while a processor runs. Every branch instruction is one of the six kinds
/// of branches, and also an [`Kind::Instruction`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// An instruction retired; a repeated string instruction once, when it completes.
    Instruction,
    /// A conditional branch that was taken, LOOPcc and JCXZ among them.
    TakenConditional,
    /// A conditional branch that was not taken.
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
    /// A tick of the TSC during which the processor was not halted; the core runs at that rate.
    Cycle,
    /// The processor left the halted state.
    Wake,
    /// A conditional branch that was taken, and mispredicted.
    MissedTaken,
    /// A conditional branch that was not taken, and mispredicted.
    MissedNotTaken,
    /// A near jump or return that was mispredicted.
    MissedJump,
    /// A near call that was mispredicted.
    MissedCall,
    /// An instruction whose loads were all served by the first level of cache.
    LoadL1,
    /// One whose furthest load was served by the second level.
    LoadL2,
    /// One whose furthest load was served by the last level.
    LoadL3,
    /// One whose furthest load was served by memory.
    LoadMemory,
    /// One whose slowest load took longer than the threshold.
    LateLoad,
    /// An instruction that locked the bus, and reads.
    LockedLoad,
    /// An instruction that locked the bus, and writes.
    LockedStore,
    /// An instruction with a load across two lines of cache.
    SplitLoad,
    /// An instruction with a store across two lines of cache.
    SplitStore,
    /// A line that was looked for in the last level of cache.
    LastReference,
    /// A line that was not found there.
    LastMiss,
    /// A transaction began.
    RegionStart,
    /// A transaction committed.
    RegionCommit,
    /// A transaction was aborted.
    RegionAbort,
    /// One was, because somebody else accessed its lines.
    RegionConflict,
    /// One was, because it wrote more lines than the first level of cache holds.
    RegionCapacity,
}

/// How many kinds there are.
const KINDS: usize = Kind::RegionCapacity as usize + 1;

/// Where an event happened. Instructions and branches that change the privilege level belong to the
/// ring they start in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Ring {
    /// Privilege level 0.
    Os,
    /// Privilege levels 1 to 3.
    User,
}

impl Ring {
    /// The ring of a privilege level.
    pub const fn of(cpl: u8) -> Self {
        if cpl == 0 { Self::Os } else { Self::User }
    }
}

/// A set of rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rings {
    /// Privilege level 0 is in it.
    pub os: bool,
    /// The other levels are in it.
    pub user: bool,
}

impl Rings {
    /// Whether nothing is in it.
    pub const fn is_empty(self) -> bool {
        !self.os && !self.user
    }

    /// Whether all levels are in it.
    pub const fn is_all(self) -> bool {
        self.os && self.user
    }
}

/// A set of kinds; an event counts the sum of its kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds(u32);

impl Kinds {
    /// No kind.
    pub const NONE: Self = Self(0);
    /// Unhalted cycles.
    pub const CYCLES: Self = Self::of(&[Kind::Cycle]);
    /// Retired instructions.
    pub const INSTRUCTIONS: Self = Self::of(&[Kind::Instruction]);
    /// Where the loads of an instruction were served.
    pub const LEVELS: Self = Self::of(&[
        Kind::LoadL1,
        Kind::LoadL2,
        Kind::LoadL3,
        Kind::LoadMemory,
        Kind::LateLoad,
    ]);
    /// What comes to the last level of cache.
    pub const LAST_LEVEL: Self = Self::of(&[Kind::LastReference, Kind::LastMiss]);
    /// What only the model of caches tells.
    pub const CACHES: Self = Self(Self::LEVELS.0 | Self::LAST_LEVEL.0);
    /// What comes with accesses to memory.
    pub const ACCESSES: Self = Self(
        Self::CACHES.0
            | Self::of(&[
                Kind::Load,
                Kind::Store,
                Kind::LockedLoad,
                Kind::LockedStore,
                Kind::SplitLoad,
                Kind::SplitStore,
            ])
            .0,
    );
    /// Mispredicted branches.
    pub const MISSED: Self = Self(Self::MISSED_TAKEN.0 | Self::of(&[Kind::MissedNotTaken]).0);
    /// Mispredicted near branches that were taken.
    pub const MISSED_TAKEN: Self =
        Self::of(&[Kind::MissedTaken, Kind::MissedJump, Kind::MissedCall]);
    /// What only models tell.
    pub const MODELLED: Self = Self(Self::MISSED.0 | Self::CACHES.0);
    /// Conditional branches, taken or not.
    pub const CONDITIONAL: Self = Self::of(&[Kind::TakenConditional, Kind::NotTaken]);
    /// Near branches that are taken.
    pub const NEAR_TAKEN: Self =
        Self::of(&[Kind::TakenConditional, Kind::Jump, Kind::Call, Kind::Return]);
    /// All branch instructions.
    pub const BRANCHES: Self =
        Self(Self::CONDITIONAL.0 | Self::NEAR_TAKEN.0 | Self::of(&[Kind::Far]).0);

    /// These kinds.
    pub const fn of(kinds: &[Kind]) -> Self {
        let (mut set, mut i) = (0, 0);
        while i < kinds.len() {
            set |= 1 << kinds[i] as u8;
            i += 1;
        }
        Self(set)
    }

    /// Whether any kind is in both sets.
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// So many branches are added one by one.
const FEW: usize = 64;

/// Places in a table of [`key`]s.
const KEYS: usize = 64;
const _: () = assert!(4 * BranchClass::ALL.len() <= KEYS);

/// Class, ring and prediction as a number below [`KEYS`].
const fn key(class: BranchClass, ring: Ring, missed: bool) -> usize {
    (class as usize) << 2 | (ring as usize) << 1 | missed as usize
}

/// How often each kind of event happened, per ring. Only differences count, modulo 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventTotals([[u64; 2]; KINDS]);

impl EventTotals {
    /// `count` more events of a kind.
    pub const fn add(&mut self, kind: Kind, ring: Ring, count: u64) {
        let total = &mut self.0[kind as usize][ring as usize];
        *total = total.wrapping_add(count);
    }

    /// Branches that an engine noted.
    pub fn add_branches(&mut self, branches: &[Branch]) {
        if branches.len() < FEW {
            for branch in branches {
                self.add_alike(branch.class, Ring::of(branch.cpl), branch.mispredicted, 1);
            }
            return;
        }
        // Of many, those that are alike are counted first. Neighbours often are: two tables take turns, so
        // that no count waits for the one before.
        let mut tables = [[0_u64; KEYS]; 2];
        for pair in branches.chunks(2) {
            for (table, b) in tables.iter_mut().zip(pair) {
                table[key(b.class, Ring::of(b.cpl), b.mispredicted) % KEYS] += 1;
            }
        }
        let [even, odd] = tables;
        for class in BranchClass::ALL {
            for ring in [Ring::Os, Ring::User] {
                for missed in [false, true] {
                    let key = key(class, ring, missed);
                    self.add_alike(class, ring, missed, even[key] + odd[key]);
                }
            }
        }
    }

    /// `count` branches of a class, of one ring, mispredicted or not.
    fn add_alike(&mut self, class: BranchClass, ring: Ring, missed: bool, count: u64) {
        let kind = match class {
            BranchClass::Conditional => Kind::TakenConditional,
            BranchClass::NotTaken => Kind::NotTaken,
            BranchClass::DirectJump | BranchClass::IndirectJump => Kind::Jump,
            BranchClass::DirectCall | BranchClass::CallNext | BranchClass::IndirectCall => {
                Kind::Call
            }
            BranchClass::Return => Kind::Return,
            BranchClass::Far | BranchClass::SoftwareInterrupt => Kind::Far,
            // No branch instructions (rule EVT-17).
            BranchClass::Exception
            | BranchClass::Debug
            | BranchClass::Interrupt
            | BranchClass::Abort => return,
        };
        self.add(kind, ring, count);
        if missed {
            let missed = match kind {
                Kind::TakenConditional => Kind::MissedTaken,
                Kind::NotTaken => Kind::MissedNotTaken,
                Kind::Call => Kind::MissedCall,
                _ => Kind::MissedJump,
            };
            self.add(missed, ring, count);
        }
    }

    /// A step of a transaction.
    pub const fn add_step(&mut self, step: Step, ring: Ring) {
        let kind = match step {
            Step::Begun => Kind::RegionStart,
            Step::Committed => Kind::RegionCommit,
            Step::Aborted(cause) => {
                match cause {
                    Cause::Conflict => self.add(Kind::RegionConflict, ring, 1),
                    Cause::Writes => self.add(Kind::RegionCapacity, ring, 1),
                    _ => {}
                }
                Kind::RegionAbort
            }
        };
        self.add(kind, ring, 1);
    }

    /// The total of a kind, from an engine that counts it by itself.
    pub const fn set(&mut self, kind: Kind, ring: Ring, total: u64) {
        self.0[kind as usize][ring as usize] = total;
    }

    /// The total of a kind.
    pub const fn get(&self, kind: Kind, ring: Ring) -> u64 {
        self.0[kind as usize][ring as usize]
    }

    /// Events of these kinds in these rings.
    pub fn sum(&self, kinds: Kinds, rings: Rings) -> u64 {
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

/// When a PEBS counter that overflowed has its record taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precise {
    /// At the next occurrence of the event (rule PEBS-03).
    Next,
    /// At the instruction that overflows, or the first boundary after it.
    Here,
}

/// Which access of an instruction a PEBS record tells the address of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataOf {
    /// The load.
    Load,
    /// The store.
    Store,
}

/// What a counter counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// The sum of these.
    pub kinds: Kinds,
    /// Counted at the rate of the crystal, not of the TSC.
    pub crystal: bool,
    /// What PEBS can do with it.
    pub precise: Option<Precise>,
    /// What its records tell of the data.
    pub data: Option<DataOf>,
}

impl Event {
    /// An event without PEBS.
    pub const fn plain(kinds: Kinds) -> Self {
        Self {
            kinds,
            crystal: false,
            precise: None,
            data: None,
        }
    }

    const fn precise(kinds: Kinds, precise: Precise) -> Self {
        Self {
            precise: Some(precise),
            ..Self::plain(kinds)
        }
    }

    const fn with_data(kinds: &[Kind], data: DataOf) -> Self {
        Self {
            data: Some(data),
            ..Self::precise(Kinds::of(kinds), Precise::Next)
        }
    }
}

/// A row of the event table: event select, unit mask, what it counts.
type Row = (u8, u8, Event);

/// The events that count something (rules EVT-01 to EVT-12); all others count nothing (EVT-09).
const EVENTS: &[Row] = {
    const fn branch(umask: u8, kinds: Kinds) -> Row {
        (0xc4, umask, Event::precise(kinds, Precise::Next))
    }
    const fn missed(umask: u8, kinds: Kinds) -> Row {
        (0xc5, umask, Event::precise(kinds, Precise::Next))
    }
    const fn load(event: u8, umask: u8, kinds: &[Kind]) -> Row {
        (event, umask, Event::with_data(kinds, DataOf::Load))
    }
    const fn store(umask: u8, kind: Kind) -> Row {
        (0xd0, umask, Event::with_data(&[kind], DataOf::Store))
    }
    const fn region(event: u8, umask: u8, kind: Kind) -> Row {
        (event, umask, Event::plain(Kinds::of(&[kind])))
    }
    const CRYSTAL: Event = Event {
        crystal: true,
        ..Event::plain(Kinds::CYCLES)
    };
    &[
        (0x3c, 0x00, Event::plain(Kinds::CYCLES)),
        (0x3c, 0x01, CRYSTAL),
        (
            0xc0,
            0x00,
            Event::precise(Kinds::INSTRUCTIONS, Precise::Next),
        ),
        branch(0x00, Kinds::BRANCHES),
        branch(0x01, Kinds::CONDITIONAL),
        branch(0x02, Kinds::of(&[Kind::Call])),
        branch(0x04, Kinds::BRANCHES),
        branch(0x08, Kinds::of(&[Kind::Return])),
        branch(0x10, Kinds::of(&[Kind::NotTaken])),
        branch(0x20, Kinds::NEAR_TAKEN),
        branch(0x40, Kinds::of(&[Kind::Far])),
        (0x2e, 0x4f, Event::plain(Kinds::of(&[Kind::LastReference]))),
        (0x2e, 0x41, Event::plain(Kinds::of(&[Kind::LastMiss]))),
        missed(0x00, Kinds::MISSED),
        missed(0x01, Kinds::of(&[Kind::MissedTaken, Kind::MissedNotTaken])),
        missed(0x02, Kinds::of(&[Kind::MissedCall])),
        missed(0x04, Kinds::MISSED),
        missed(0x20, Kinds::MISSED_TAKEN),
        load(0xcd, 0x01, &[Kind::LateLoad]),
        load(0xd0, 0x21, &[Kind::LockedLoad]),
        store(0x22, Kind::LockedStore),
        load(0xd0, 0x41, &[Kind::SplitLoad]),
        store(0x42, Kind::SplitStore),
        load(0xd0, 0x81, &[Kind::Load]),
        store(0x82, Kind::Store),
        load(0xd1, 0x01, &[Kind::LoadL1]),
        load(0xd1, 0x02, &[Kind::LoadL2]),
        load(0xd1, 0x04, &[Kind::LoadL3]),
        load(0xd1, 0x08, &[Kind::LoadL2, Kind::LoadL3, Kind::LoadMemory]),
        load(0xd1, 0x10, &[Kind::LoadL3, Kind::LoadMemory]),
        load(0xd1, 0x20, &[Kind::LoadMemory]),
        region(0xc9, 0x01, Kind::RegionStart),
        region(0xc9, 0x02, Kind::RegionCommit),
        (
            0xc9,
            0x04,
            Event::precise(Kinds::of(&[Kind::RegionAbort]), Precise::Next),
        ),
        region(0x54, 0x01, Kind::RegionConflict),
        region(0x54, 0x02, Kind::RegionCapacity),
    ]
};

/// The counter that has INST_RETIRED.PREC_DIST, C0H/01H.
const PREC_DIST_COUNTER: usize = 1;
/// The counter mask of the cycle encodings that perf uses: more than can retire in a cycle.
const ALL_CYCLES_MASK: u8 = 0x10;

impl Event {
    /// What general-purpose counter `counter` counts with this selection, the enable bits aside.
    pub fn selected(select: EventSelect, counter: usize) -> Self {
        let (event, umask) = (select.event(), select.umask());
        let instructions =
            event == 0xc0 && (umask == 0x00 || (umask == 0x01 && counter == PREC_DIST_COUNTER));
        let edge = select.has(EventSelect::EDGE);
        let inverted = select.has(EventSelect::INVERT);
        match (select.cmask(), edge) {
            // INV without a counter mask compares nothing (rule PMU-30).
            (0, false) if instructions && umask == 0x01 => {
                Self::precise(Kinds::INSTRUCTIONS, Precise::Here)
            }
            (0, false) => EVENTS
                .iter()
                .find(|row| (row.0, row.1) == (event, umask))
                .map_or_else(Self::default, |row| row.2),
            // Fewer than 16 instructions retire in every cycle (rule EVT-10).
            (ALL_CYCLES_MASK, false) if instructions && inverted => {
                Self::precise(Kinds::CYCLES, Precise::Here)
            }
            // The edges of "not halted" (rule EVT-11).
            (0, true) if (event, umask) == (0x3c, 0x00) => Self::plain(Kinds::of(&[Kind::Wake])),
            // Other combinations count nothing (rule PMU-31).
            _ => Self::default(),
        }
    }

    /// What fixed counter `index` counts: instructions, core cycles, cycles at the rate of the TSC.
    pub const fn fixed(index: usize) -> Self {
        Self::plain(match index {
            0 => Kinds::INSTRUCTIONS,
            _ => Kinds::CYCLES,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_count_the_same_together_and_one_by_one() {
        let numbers = BranchClass::ALL.map(|class| class as usize);
        let last = BranchClass::NotTaken as usize;
        assert!(numbers.into_iter().eq(0..=last), "every class, once");
        let branch = |class, cpl, mispredicted| Branch {
            from: 1,
            to: 2,
            at: 0,
            class,
            cpl,
            to_cpl: cpl,
            mispredicted,
        };
        // Every kind another number of times.
        let mut branches = Vec::new();
        for class in BranchClass::ALL {
            for (cpl, missed) in [(0, false), (0, true), (3, false), (3, true)] {
                let count = branches.len() % 7 + 1;
                branches.extend(vec![branch(class, cpl, missed); count]);
            }
        }
        assert!(branches.len() >= FEW);
        let (mut together, mut alone) = (EventTotals::default(), EventTotals::default());
        together.add_branches(&branches);
        for one in &branches {
            alone.add_branches(std::slice::from_ref(one));
        }
        assert_eq!(together, alone);
        assert_ne!(alone, EventTotals::default());
    }
}
