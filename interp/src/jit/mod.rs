//! The second execution tier: hot blocks are translated by [`hindsight_translate`].
//!
//! A translated unit takes the place of the handler of the operation at which it begins, the first of
//! its block or one behind an instruction that is not translated. Whoever executes that operation
//! enters the unit; whatever the unit cannot do it leaves to the operations of its blocks, which
//! continue at exactly that instruction. So everything but the fast path is the interpreter's:
//! faults, devices, watchpoints, breakpoints, events, modified code.
//!
//! A unit is entered only where the fast path of the interpreter would serve, too: with the rights
//! and at the addresses that it was made for.

#![expect(unsafe_code, reason = "operations are reached through stored pointers")]

mod enter;
mod flags;
mod make;
mod source;

use crate::code::{AddressHasher, BlockEntry, OpId, ReplacedHandler};
use crate::core::Core;
use crate::mmu::TlbSet;
use hindsight_translate::{Rights, Translator, UnitId};
use source::SourceBlock;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;

/// The interpreter's data about a unit.
#[derive(Debug)]
struct Compiled {
    blocks: Vec<SourceBlock>,
    /// One of its blocks was invalidated. The unit may be entered again when all blocks are valid
    /// again: their code is then unchanged.
    suspended: bool,
}

/// Units that one operation can begin: code that is mapped at several addresses has one for each.
const UNITS: usize = 4;

/// An operation at which units are entered.
#[derive(Clone, Copy, Debug)]
struct EntryPoint {
    /// Each for another RIP.
    units: [Option<(u64, UnitId)>; UNITS],
    /// Units that were made for it.
    made: usize,
    /// How often no unit was for the RIP, since the last one was made.
    misses: u64,
    /// The operation: its block, and its index there.
    block: BlockEntry<Core>,
    op: usize,
    /// The handler of the operation, in whose place the unit is.
    replaced: ReplacedHandler<Core>,
}

impl EntryPoint {
    /// The unit for code whose block is at a RIP.
    fn unit_for(&self, rip: u64) -> Option<UnitId> {
        let mut units = self.units.iter().flatten();
        units.find(|(at, _)| *at == rip).map(|(_, unit)| *unit)
    }

    /// Adds the unit for a RIP, in place of the oldest one if there are too many.
    fn add(&mut self, rip: u64, unit: UnitId) {
        let mut units = self.units.iter();
        let found = units.position(|u| u.is_none_or(|(at, _)| at == rip));
        self.units[found.unwrap_or(self.made % UNITS)] = Some((rip, unit));
        self.made += 1;
    }
}

/// How much is translated, for statistics.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct JitStats {
    /// Instructions retired in translated code.
    pub(crate) retired: u64,
    /// Units made.
    pub(crate) units: u64,
    /// Times that all units were dropped because their memory was full.
    pub(crate) evictions: u64,
}

/// Translated code of one processor.
#[derive(Debug)]
pub(crate) struct Jit {
    /// Bytes of code at most.
    capacity: usize,
    /// None before the first unit, or if the host has no memory for it.
    translator: Option<Translator>,
    failed: bool,
    /// By [`UnitId::index`].
    compiled: Vec<Compiled>,
    entries: HashMap<OpId, EntryPoint, BuildHasherDefault<AddressHasher>>,
    /// By index of a block: its counter of runs, and the units that contain it.
    blocks: HashMap<u32, (u32, Vec<UnitId>)>,
    /// By [`Rights`]: what the TLB and the jump cache of translated code are valid for.
    tlb_epochs: [(u64, u64); 2],
    contexts: [u64; 2],
    stats: JitStats,
    /// The unit to be run.
    chosen: Option<UnitId>,
    /// The operation that the interpreter was to execute when a unit was left.
    left_at: Option<OpId>,
}

// SAFETY: the pointers in it lead to blocks of the code cache that it is used with, which is sent
// along.
unsafe impl Send for Jit {}

impl Default for Jit {
    fn default() -> Self {
        Self {
            capacity: 64 << 20,
            translator: None,
            failed: cfg!(any(miri, hindsight_sanitizer)),
            compiled: Vec::new(),
            entries: HashMap::default(),
            blocks: HashMap::new(),
            tlb_epochs: [(0, 0); 2],
            contexts: [0; 2],
            stats: JitStats::default(),
            chosen: None,
            left_at: None,
        }
    }
}

impl Jit {
    /// How often a block is entered before it is translated, unless that is set.
    pub(crate) const HOT_AFTER: u64 = 50;

    /// How often a block was entered from translated code.
    fn runs(&self, index: u32) -> u64 {
        match (self.blocks.get(&index), &self.translator) {
            (Some((slot, _)), Some(translator)) => translator.runs(*slot),
            _ => 0,
        }
    }

    /// Sets the most bytes of code, if none was made yet.
    pub(crate) fn set_capacity(&mut self, bytes: usize) {
        self.capacity = bytes;
    }

    /// Statistics, and the bytes of code that there are.
    pub(crate) fn stats(&self) -> (JitStats, usize) {
        let bytes = self.translator.as_ref().map_or(0, Translator::bytes);
        (self.stats, bytes)
    }

    fn clear(&mut self) {
        if let Some(translator) = &mut self.translator {
            translator.reset();
        }
        self.compiled.clear();
        self.entries.clear();
        self.blocks.clear();
    }
}

/// The set of the TLB in which translated code of a kind finds pages.
fn set_of(rights: Rights) -> TlbSet {
    match rights {
        Rights::Supervisor => TlbSet::Supervisor,
        Rights::User => TlbSet::User,
    }
}

/// The kind of translated code that has the rights of a set of the TLB.
fn rights_of(set: TlbSet) -> Option<Rights> {
    match set {
        TlbSet::Supervisor => Some(Rights::Supervisor),
        TlbSet::User => Some(Rights::User),
        _ => None,
    }
}

impl Core {
    /// Adds the runs of blocks in translated code to those that the blocks count themselves.
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
        // The operations keep their handlers as long as they exist.
        for point in std::mem::take(&mut self.jit.entries).into_values() {
            // SAFETY: blocks are freed by `tidy_code` only, which clears the entries.
            let op = unsafe { point.block.live().first_op().at(point.op) };
            op.restore_handler(point.replaced);
        }
        self.jit.clear();
        self.jit.stats.evictions += 1;
    }

    /// Frees all decoded blocks, and what was translated of them, if the cache is full or stale.
    ///
    /// # Safety
    /// As for [`CodeCache::tidy`](crate::code::CodeCache::tidy).
    pub(crate) unsafe fn tidy_code(&mut self) {
        if self.code.is_to_be_dropped() {
            self.collect_runs();
            self.jit.clear();
        }
        // SAFETY: the contract of this function; the translator's pointers to blocks are gone.
        unsafe { self.code.tidy() };
    }
}
