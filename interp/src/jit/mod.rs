//! The second execution tier: [`hindsight_translate`] translates hot blocks.
//!
//! A unit replaces the handler of the operation at which it begins: the first one of a block, or
//! the one after an instruction that is not translated. Executing that operation enters the unit.
//! When the unit reaches an instruction that it cannot execute, the interpreter continues at that
//! instruction's operation. So the interpreter handles everything but the fast path: faults,
//! devices, watchpoints, breakpoints, events and modified code.
//!
//! A unit is entered only where the interpreter's fast path would apply too: with the rights and at
//! the RIP for which it was made.

#![expect(unsafe_code, reason = "operations are reached through stored pointers")]

mod counted;
mod enter;
mod flags;
mod make;
mod source;

use crate::branch_buffer::{BranchRecords, BtsWindow};
use crate::code::{AddressHasher, BlockEntry, OpId, ReplacedHandler};
use crate::core::Core;
use crate::interpreter::UnitExits;
use crate::mmu::TlbSet;
use hindsight_translate::{AccessFormat, JumpKeys, Rights, TlbKey, Translator, UnitId};
use source::SourceBlock;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;

/// What the interpreter knows about a unit.
#[derive(Debug)]
struct Compiled {
    blocks: Vec<SourceBlock>,
    /// Whether one of its blocks was invalidated.
    ///
    /// The unit may be entered again once all blocks are valid again, because their code is then
    /// unchanged.
    suspended: bool,
}

/// Maximum number of units that begin at one operation.
///
/// Code that is mapped at several addresses needs one unit for each, and so does each mode.
const UNITS: usize = 4;

/// How units record branches and report accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UnitMode {
    records: BranchRecords,
    accesses: Option<AccessFormat>,
}

impl UnitMode {
    /// A number of at most 5 bits that identifies the mode.
    fn key(self) -> u64 {
        let accesses = match self.accesses {
            None => 0,
            Some(AccessFormat { fetches: false }) => 1,
            Some(AccessFormat { fetches: true }) => 2,
        };
        accesses << 3 | self.records as u64
    }
}

/// An operation at which units are entered.
#[derive(Clone, Copy, Debug)]
struct EntryPoint {
    /// The units, each for another RIP of the block or another mode.
    units: [Option<(u64, UnitMode, UnitId)>; UNITS],
    /// Number of units that were made for this entry point.
    made: usize,
    /// How often no unit fitted, since the last one was made.
    misses: u64,
    /// The operation: its block, and its index in the block.
    block: BlockEntry<Core>,
    op: usize,
    /// The operation's own handler, which the unit replaces.
    replaced: ReplacedHandler<Core>,
}

impl EntryPoint {
    /// Returns the unit of a mode for a block at a RIP.
    fn unit_for(&self, rip: u64, mode: UnitMode) -> Option<UnitId> {
        let mut units = self.units.iter().flatten();
        let found = units.find(|(at, how, _)| *at == rip && *how == mode)?;
        Some(found.2)
    }

    /// Adds a unit; if the table is full, it replaces the oldest one.
    fn add(&mut self, rip: u64, mode: UnitMode, unit: UnitId) {
        let mut units = self.units.iter();
        let found = units.position(|u| u.is_none_or(|(at, how, _)| at == rip && how == mode));
        self.units[found.unwrap_or(self.made % UNITS)] = Some((rip, mode, unit));
        self.made += 1;
    }
}

/// Statistics of the translator.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct JitStats {
    /// Instructions retired in translated code.
    pub(crate) retired: u64,
    /// Units that were made.
    pub(crate) units: u64,
    /// Times that all units were dropped because their memory was full.
    pub(crate) evictions: u64,
    /// How often units were left.
    pub(crate) exits: UnitExits,
}

/// Translated code of one processor.
#[derive(Debug)]
pub(crate) struct Jit {
    /// Maximum size of the code in bytes.
    capacity: usize,
    /// `None` before the first unit, or if the host cannot provide the memory.
    translator: Option<Translator>,
    failed: bool,
    /// The units, indexed by [`UnitId::index`].
    compiled: Vec<Compiled>,
    entries: HashMap<OpId, EntryPoint, BuildHasherDefault<AddressHasher>>,
    /// How often a unit that reports accesses could have begun at an operation.
    ///
    /// The interpreter executes such code one instruction at a time, and counts no runs of blocks.
    tries: HashMap<OpId, u64, BuildHasherDefault<AddressHasher>>,
    /// By index of a block: its run counter, and the units that contain it.
    blocks: HashMap<u32, (u32, Vec<UnitId>)>,
    /// By [`Rights`]: the stamps of the TLBs for which the translator's TLB is valid.
    ///
    /// `contexts` is the same for the jump cache.
    tlb_stamps: [TlbKey; 2],
    contexts: [JumpKeys; 2],
    stats: JitStats,
    /// The unit that `choose_entry` chose, which runs next.
    chosen: Option<UnitId>,
    /// Whether translated code runs, or has called back.
    pub(crate) in_unit: bool,
    /// Where the unit that runs next stores BTS records.
    bts_window: Option<BtsWindow>,
    /// The operation at which a unit was left, and which the interpreter must execute.
    left_at: Option<OpId>,
    /// Whether the next instruction must be executed alone, because a unit that reports accesses
    /// was left there.
    steps_next: bool,
}

// SAFETY: its pointers refer to blocks of the code cache that it is used with. Both belong to the
// same processor and move to another thread together.
unsafe impl Send for Jit {}

impl Default for Jit {
    fn default() -> Self {
        Self {
            capacity: 64 << 20,
            translator: None,
            failed: cfg!(any(miri, hindsight_sanitizer)),
            compiled: Vec::new(),
            entries: HashMap::default(),
            tries: HashMap::default(),
            blocks: HashMap::new(),
            tlb_stamps: [(0, 0); 2],
            contexts: [JumpKeys::default(); 2],
            stats: JitStats::default(),
            chosen: None,
            in_unit: false,
            bts_window: None,
            left_at: None,
            steps_next: false,
        }
    }
}

impl Jit {
    /// The default number of times that a block is entered before it is translated.
    pub(crate) const HOT_AFTER: u64 = 50;

    /// Counts a try at an operation; returns whether there were enough to translate its block.
    fn is_hot(&mut self, id: OpId, after: u64) -> bool {
        let tries = self.tries.entry(id).or_default();
        *tries += 1;
        *tries == after
    }

    /// Returns how often translated code has entered a block.
    fn runs(&self, index: u32) -> u64 {
        match (self.blocks.get(&index), &self.translator) {
            (Some((slot, _)), Some(translator)) => translator.runs(*slot),
            _ => 0,
        }
    }

    pub(crate) fn translator(&self) -> Option<&Translator> {
        self.translator.as_ref()
    }

    /// Sets the maximum size of the code in bytes.
    ///
    /// This has no effect after the first unit was made.
    pub(crate) fn set_capacity(&mut self, bytes: usize) {
        self.capacity = bytes;
    }

    /// Returns the statistics, and the size of the code in bytes.
    pub(crate) fn stats(&self) -> (JitStats, usize) {
        let bytes = self.translator.as_ref().map_or(0, Translator::bytes);
        (self.stats, bytes)
    }

    /// Removes the page that contains a linear address from TLBs and jump caches.
    pub(crate) fn evict(&mut self, lin: u64, large: bool) {
        if let Some(translator) = &mut self.translator {
            translator.evict(lin, large);
        }
    }

    fn clear(&mut self) {
        if let Some(translator) = &mut self.translator {
            translator.reset();
        }
        self.compiled.clear();
        self.entries.clear();
        self.tries.clear();
        self.blocks.clear();
    }
}

/// Returns the TLB set that code with these rights uses.
fn set_of(rights: Rights) -> TlbSet {
    match rights {
        Rights::Supervisor => TlbSet::Supervisor,
        Rights::User => TlbSet::User,
    }
}

/// Returns the rights of translated code that uses a TLB set, if any may.
fn rights_of(set: TlbSet) -> Option<Rights> {
    match set {
        TlbSet::Supervisor => Some(Rights::Supervisor),
        TlbSet::User => Some(Rights::User),
        _ => None,
    }
}

impl Core {
    /// Moves the counts of block runs from translated code to the blocks.
    pub(crate) fn collect_runs(&self) {
        let Some(translator) = &self.jit.translator else {
            return;
        };
        for (&index, (slot, _)) in &self.jit.blocks {
            self.code.add_runs(index, translator.take_runs(*slot));
        }
    }

    /// Drops all translated code.
    fn drop_translations(&mut self) {
        self.collect_runs();
        // Give the operations their own handlers back: the blocks stay.
        for point in std::mem::take(&mut self.jit.entries).into_values() {
            // SAFETY: only `tidy_code` frees blocks, and it clears the entries.
            let op = unsafe { point.block.live().first_op().at(point.op) };
            op.restore_handler(point.replaced);
        }
        self.jit.clear();
        self.jit.stats.evictions += 1;
    }

    /// Frees all decoded blocks and their units, if the cache is full or stale.
    ///
    /// # Safety
    /// As for [`CodeCache::tidy`](crate::code::CodeCache::tidy).
    pub(crate) unsafe fn tidy_code(&mut self) {
        if self.code.is_to_be_dropped() {
            self.collect_runs();
            self.jit.clear();
        }
        // SAFETY: the caller keeps the contract of this function, and the pointers to blocks in
        // `jit` have been cleared.
        unsafe { self.code.tidy() };
    }
}
