//! Translates, links, enters and unlinks units.

#![expect(
    unsafe_code,
    reason = "generated code is entered, and its data are in its arena"
)]

use crate::analysis::{BranchFormat, UnitAnalysis, UnitSource};
use crate::arena::Arena;
use crate::emit::{Addresses, Emitter, ExitPoint, FirstNumbers, Retry, UnitCode};
use crate::flags::FlagState;
use crate::layout::{
    Context, Data, JUMPS, JumpEntry, RUN_COUNTERS, Rights, TLB_ENTRIES, unused_tag,
};
use crate::stubs::{self, Stubs};
use crate::vector::VectorLevel;
use std::io;
use std::ptr::NonNull;

/// Returns the host address of an access that misses the TLB, or 0.
///
/// Translated code calls it with [`EntryState::callback_data`], the linear address, and the exit
/// number to pass to [`Translator::access`]. If it returns 0, the unit is left before the
/// instruction.
pub type Callback = extern "sysv64" fn(data: usize, linear: u64, exit: u32) -> u64;

/// The default MXCSR, which Rust code requires.
const HOST_MXCSR: u32 = 0x1f80;

/// Identifies a unit; valid until [`Translator::reset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId(u32);

impl UnitId {
    /// The unit's number; units are numbered from 0.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Identifies an edge; valid until [`Translator::reset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeId(u32);

/// Why a unit was not translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotTranslated {
    /// The unit would have too few instructions to be worth entering.
    ///
    /// If the instruction that ends it, which the caller must execute, is in the first block, the
    /// value is the index of that instruction.
    TooShort(Option<usize>),
    /// The code memory is full; [`Translator::reset`] empties it.
    Full,
}

/// A guest block that a unit contains.
#[derive(Clone, Copy, Debug)]
pub struct UnitBlock {
    /// RIP of its first instruction.
    pub rip: u64,
    /// Number of its instructions.
    pub count: u32,
}

/// A unit: a piece of translated code.
#[derive(Debug)]
pub struct Unit {
    /// The guest blocks of the unit.
    ///
    /// The code begins at the instruction [`Unit::start`] of the first block. It may end before the
    /// end of the last block, at an instruction that the caller must execute.
    pub blocks: Vec<UnitBlock>,
    /// Index in the first block of the instruction at which the code begins.
    pub start: usize,
    /// Index of the instruction that ends the code because the caller must execute it.
    ///
    /// `None` unless that instruction is in the first block.
    pub stop: Option<usize>,
    /// The rights with which the unit accesses memory.
    pub rights: Rights,
    /// How the unit records branches; `None` if it records none.
    pub branch_format: Option<BranchFormat>,
    /// The vector registers that the unit uses.
    pub vectors: VectorLevel,
    /// Instructions of all blocks: what other units subtract from the budget.
    charge: u32,
    /// Entry addresses for other units.
    ///
    /// `code` checks that the vector registers are loaded, `loaded` is for units that have loaded
    /// them, and `entry` is for the caller.
    code: u64,
    loaded: u64,
    entry: u64,
    sees_flags: bool,
    incoming: Vec<u32>,
}

impl Unit {
    /// Instructions of all blocks but the first.
    ///
    /// The caller has charged the first block already, and charges these before it enters the unit.
    pub fn charge_beyond_first(&self) -> u32 {
        self.charge - self.blocks.first().map_or(0, |b| b.count)
    }

    /// Instructions of all blocks, without those before [`Unit::start`].
    pub fn charge_from_start(&self) -> u32 {
        self.charge - u32::try_from(self.start).unwrap_or(0)
    }

    /// Instructions of a block from `index` to its end.
    pub fn rest_of_block(&self, block: usize, index: usize) -> i64 {
        let count = self.blocks.get(block).map_or(0, |b| i64::from(b.count));
        count - i64::try_from(index).unwrap_or(count)
    }
}

/// An edge of a unit: its code addresses, and the unit that it is linked to.
#[derive(Clone, Copy, Debug)]
struct LiveEdge {
    from: u32,
    target_rip: u64,
    stores: (u64, usize),
    /// The first bytes of the stores, which a jump over the stores may replace.
    first_bytes: [u8; 5],
    charge: u64,
    jump: u64,
    unlinked: u64,
    rest: u32,
    target: Option<u32>,
}

/// The caller's state when it enters translated code.
#[derive(Clone, Copy, Debug)]
pub struct EntryState {
    /// Cycles that the code may use before it must be left.
    pub budget: i64,
    /// Bases of FS and GS.
    pub segment_base: [u64; 2],
    /// The first argument of the callback.
    pub callback_data: usize,
    /// Address of the branch buffer's next entry.
    pub branch_next: usize,
    /// Address of the entry at which the buffer must be processed.
    pub branch_due: usize,
    /// Address of the guest's vector registers.
    ///
    /// 32 registers of 64 bytes, followed by 8 opmask registers of 8 bytes.
    pub vectors: usize,
    /// The vector registers that translated code may use.
    ///
    /// [`VectorLevel::None`] unless all floating-point exceptions of MXCSR are masked.
    pub vectors_allowed: VectorLevel,
    /// MXCSR.
    pub mxcsr: u32,
    /// Instructions that will have retired when the budget is used up, modulo 2^32.
    pub end_stamp: u32,
}

/// Where and why translated code was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitExit {
    /// Before an instruction that the caller must execute.
    Instruction {
        /// The unit.
        unit: UnitId,
        /// Index of the block.
        block: usize,
        /// Index of the instruction.
        index: usize,
    },
    /// At an edge that is not linked; [`Translator::link`] can link it to a unit.
    Edge {
        /// RIP.
        rip: u64,
        /// The edge.
        edge: EdgeId,
    },
    /// At a direct jump to another page whose target is not in the jump cache.
    Jump {
        /// RIP.
        rip: u64,
    },
    /// At a jump to a unit that has more instructions than the budget has left.
    Budget {
        /// RIP.
        rip: u64,
        /// Instructions of that unit, if known.
        charge: Option<u32>,
    },
    /// After a branch was recorded that fills the branch buffer.
    Branches {
        /// RIP.
        rip: u64,
    },
}

/// The guest's state when translated code was left.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// Where and why the code was left.
    pub exit: UnitExit,
    /// The rest of the budget.
    pub budget: i64,
    /// The values from which the arithmetic flags are computed.
    pub flags: FlagState,
    /// Address of the branch buffer's next entry.
    pub branch_next: usize,
    /// MXCSR.
    pub mxcsr: u32,
}

/// Translated code that [`Translator::prepare`] has made ready to run.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Entry {
    enter: u64,
}

impl Entry {
    /// Runs the code until it is left.
    ///
    /// # Safety
    /// - `registers` must point to the guest's 16 general registers in the order of their encoding,
    ///   valid for reads and writes.
    /// - The translator must not be borrowed, and must not be reset before this returns.
    /// - The pages that were passed to [`Translator::enter_page`] since the last flush must be
    ///   valid guest memory.
    /// - The branch buffer of [`EntryState`] must have room up to the entry at which it must be
    ///   processed.
    /// - The vector registers of [`EntryState`] must be valid for reads and writes.
    pub unsafe fn run(self, registers: *mut u64) {
        let enter = usize::try_from(self.enter).unwrap_or(0);
        let code = std::ptr::with_exposed_provenance::<u8>(enter);
        // SAFETY: the stub is a function with this signature.
        let enter: extern "sysv64" fn(*mut u64) = unsafe { std::mem::transmute(code) };
        enter(registers);
    }
}

/// The translator of one processor.
#[derive(Debug)]
pub struct Translator {
    arena: Arena,
    stubs: Stubs,
    /// Bytes of the stubs, which precede the units in code memory.
    shared: usize,
    addresses: Addresses,
    units: Vec<Unit>,
    edges: Vec<LiveEdge>,
    exits: Vec<(UnitId, ExitPoint)>,
    run_counters: u32,
    /// Indices of the used entries of each jump cache, by [`Rights`].
    jumps_used: [Vec<u16>; 2],
    /// Whether a TLB may contain entries, by [`Rights`].
    tlb_used: [bool; 2],
}

/// Minimum length of a unit: entering a shorter one costs more than it saves.
const LEAST_INSTRUCTIONS: usize = 3;

impl Translator {
    /// Creates a translator with `capacity` bytes for code.
    ///
    /// # Errors
    /// The host cannot map the memory.
    pub fn new(capacity: usize, callback: Callback) -> io::Result<Self> {
        let mut arena = Arena::new(capacity)?;
        let data = arena.data_address(0);
        let callback = (callback as *const ()).expose_provenance() as u64;
        let (code, stubs) = stubs::emit(arena.next(), data, callback);
        if !arena.add(&code) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let addresses = Addresses {
            data,
            leave: stubs.leave,
            find: stubs.find,
            load_vectors: stubs.load_vectors,
            bmi2: std::arch::is_x86_feature_detected!("bmi2"),
        };
        let mut translator = Self {
            shared: arena.used(),
            arena,
            stubs,
            addresses,
            units: Vec::new(),
            edges: Vec::new(),
            exits: Vec::new(),
            run_counters: 0,
            jumps_used: Default::default(),
            tlb_used: [true; 2],
        };
        for rights in [Rights::Supervisor, Rights::User] {
            translator.flush_tlb(rights);
            for index in 0..JUMPS {
                translator.clear_jump(rights, index);
            }
        }
        Ok(translator)
    }

    fn data(&self) -> NonNull<Data> {
        self.arena.data().cast()
    }

    fn context(&mut self) -> &mut Context {
        // SAFETY: the data begin with the context, and no code runs.
        unsafe { &mut (*self.data().as_ptr()).context }
    }

    /// Allocates a counter of block runs, sets it to 0 and returns its number.
    ///
    /// Returns `None` if all counters are in use.
    pub fn run_counter(&mut self) -> Option<u32> {
        let slot = self.run_counters;
        if slot as usize >= RUN_COUNTERS {
            return None;
        }
        self.run_counters += 1;
        Some(slot)
    }

    /// Returns how often translated code has entered the block of a counter.
    pub fn runs(&self, slot: u32) -> u64 {
        assert!((slot as usize) < RUN_COUNTERS);
        // SAFETY: within the array; no code runs.
        unsafe { (&raw const (*self.data().as_ptr()).runs[slot as usize]).read() }
    }

    /// Like [`Translator::runs`], and resets the counter to 0.
    pub fn take_runs(&self, slot: u32) -> u64 {
        let runs = self.runs(slot);
        // SAFETY: within the array, as `runs` has checked; no code runs, and nothing refers to it.
        unsafe { (&raw mut (*self.data().as_ptr()).runs[slot as usize]).write(0) };
        runs
    }

    /// Bytes of translated code, without the stubs.
    pub fn bytes(&self) -> usize {
        self.arena.used() - self.shared
    }

    /// Returns a unit.
    pub fn unit(&self, id: UnitId) -> &Unit {
        &self.units[id.0 as usize]
    }

    /// Translates a unit.
    ///
    /// # Errors
    /// See [`NotTranslated`].
    pub fn translate(&mut self, source: &UnitSource) -> Result<UnitId, NotTranslated> {
        let mut end = usize::MAX;
        let mut saves: Vec<usize> = Vec::new();
        loop {
            let analysis = UnitAnalysis::new(source, end);
            if analysis.steps.len() < LEAST_INSTRUCTIONS && analysis.stop.is_some()
                || analysis.steps.is_empty()
            {
                let stop = analysis.stop.filter(|s| s.0 == 0).map(|s| s.1);
                return Err(NotTranslated::TooShort(stop));
            }
            let first = FirstNumbers {
                exit: u32::try_from(self.exits.len()).map_err(|_| NotTranslated::Full)?,
                edge: self.edges.len(),
            };
            let emitter = Emitter::new(
                source,
                &analysis,
                self.addresses,
                self.arena.next(),
                first,
                &saves,
            );
            match emitter.unit() {
                Ok(code) => return self.add(source, &analysis, &code),
                Err(Retry::Save(step)) => saves.push(step),
                Err(Retry::End(step)) => {
                    debug_assert!(step < end);
                    end = step.min(end.saturating_sub(1));
                    saves.retain(|&s| s < end);
                }
            }
        }
    }

    fn add(
        &mut self,
        source: &UnitSource,
        analysis: &UnitAnalysis,
        code: &UnitCode,
    ) -> Result<UnitId, NotTranslated> {
        let base = self.arena.next();
        if !self.arena.add(&code.code) {
            return Err(NotTranslated::Full);
        }
        let number = u32::try_from(self.units.len()).map_err(|_| NotTranslated::Full)?;
        let id = UnitId(number);
        let blocks: Vec<UnitBlock> = source.blocks[..analysis.blocks]
            .iter()
            .map(|b| UnitBlock {
                rip: b.rip,
                count: b.count(),
            })
            .collect();
        self.units.push(Unit {
            charge: blocks.iter().map(|b| b.count).sum(),
            blocks,
            start: source.start,
            stop: analysis.stop.filter(|s| s.0 == 0).map(|s| s.1),
            rights: source.rights,
            branch_format: source.branch_format,
            vectors: code.vectors,
            code: base,
            loaded: base + code.loaded as u64,
            entry: base + code.entry as u64,
            sees_flags: code.sees_flags,
            incoming: Vec::new(),
        });
        self.exits.extend(code.exits.iter().map(|&e| (id, e)));
        for edge in &code.edges {
            let (start, len) = edge.stores;
            let mut first_bytes = [0; 5];
            if len >= 5 {
                first_bytes.copy_from_slice(&code.code[start..start + 5]);
            }
            self.edges.push(LiveEdge {
                from: number,
                target_rip: edge.target_rip,
                stores: (base + start as u64, len),
                first_bytes,
                charge: base + edge.charge as u64,
                jump: base + edge.jump as u64,
                unlinked: base + edge.unlinked as u64,
                rest: edge.rest,
                target: None,
            });
        }
        Ok(id)
    }

    /// Links an edge to a unit, if the unit fits and the edge is not linked yet.
    ///
    /// The unit fits if it begins with the block at the edge's RIP, and records branches and
    /// accesses memory in the same way as the unit of the edge.
    pub fn link(&mut self, edge: EdgeId, unit: UnitId) {
        let target = &self.units[unit.0 as usize];
        let live = self.edges[edge.0 as usize];
        let from = &self.units[live.from as usize];
        let fits = target.start == 0
            && target
                .blocks
                .first()
                .is_some_and(|b| b.rip == live.target_rip)
            && target.rights == from.rights
            && target.branch_format == from.branch_format;
        if !fits || live.target.is_some() {
            return;
        }
        let charge = i64::from(target.charge) - i64::from(live.rest);
        // The target may be left at its first instruction, while it loads the vector registers; the
        // flags must then be stored.
        let loaded = from.vectors >= target.vectors;
        let skips = loaded && !target.sees_flags && live.stores.1 >= 5;
        let code = if loaded { target.loaded } else { target.code };
        self.patch_charge(&live, charge);
        self.patch_jump(live.jump, code);
        if skips {
            let over = i32::try_from(live.stores.1 - 5).unwrap_or(0).to_le_bytes();
            let jump = [0xe9, over[0], over[1], over[2], over[3]];
            self.arena.write(live.stores.0, &jump);
        }
        self.edges[edge.0 as usize].target = Some(unit.0);
        self.units[unit.0 as usize].incoming.push(edge.0);
    }

    fn patch_charge(&mut self, edge: &LiveEdge, charge: i64) {
        let charge = i32::try_from(charge).unwrap_or(0);
        self.arena.write(edge.charge - 4, &charge.to_le_bytes());
    }

    fn patch_jump(&mut self, at: u64, to: u64) {
        let distance = to.wrapping_sub(at).cast_signed();
        let distance = i32::try_from(distance).unwrap_or(0);
        self.arena.write(at - 4, &distance.to_le_bytes());
    }

    /// Unlinks a unit: no other unit enters it until it is linked again.
    pub fn unlink(&mut self, unit: UnitId) {
        let incoming = std::mem::take(&mut self.units[unit.0 as usize].incoming);
        for edge in incoming {
            let live = self.edges[edge as usize];
            if live.target != Some(unit.0) {
                continue;
            }
            self.patch_charge(&live, -i64::from(live.rest));
            self.patch_jump(live.jump, live.unlinked);
            if live.stores.1 >= 5 {
                self.arena.write(live.stores.0, &live.first_bytes);
            }
            self.edges[edge as usize].target = None;
        }
        let unit = &self.units[unit.0 as usize];
        let rip = unit.blocks.first().map_or(0, |b| b.rip);
        let (rights, code) = (unit.rights, unit.code);
        let index = jump_index(rip);
        if self.jump(rights, index).entry == code {
            self.clear_jump(rights, index);
        }
    }

    fn jump(&self, rights: Rights, index: usize) -> JumpEntry {
        // SAFETY: within the array, as `jump_index` and the loops over it guarantee; no code runs.
        unsafe { (&raw const (*self.data().as_ptr()).jumps[rights as usize][index]).read() }
    }

    fn set_jump_entry(&mut self, rights: Rights, index: usize, jump: JumpEntry) {
        // SAFETY: as in `jump`.
        unsafe { (&raw mut (*self.data().as_ptr()).jumps[rights as usize][index]).write(jump) };
    }

    fn clear_jump(&mut self, rights: Rights, index: usize) {
        let unused = JumpEntry {
            // No RIP with this tag maps to this index.
            tag: index as u64 ^ 1,
            entry: 0,
            charge: 0,
            unused: 0,
        };
        self.set_jump_entry(rights, index, unused);
    }

    /// Enters a unit into the jump cache, until [`Translator::flush_jumps`].
    ///
    /// Jumps from other pages then find it. Does nothing for a unit that does not begin with a
    /// block.
    pub fn set_jump(&mut self, unit: UnitId) {
        let unit = &self.units[unit.0 as usize];
        let (rights, Some(first)) = (unit.rights, unit.blocks.first()) else {
            return;
        };
        if unit.start != 0 {
            return;
        }
        let index = jump_index(first.rip);
        let jump = JumpEntry {
            tag: first.rip,
            entry: unit.code,
            charge: unit.charge.into(),
            unused: 0,
        };
        if self.jump(rights, index).entry != jump.entry {
            self.jumps_used[rights as usize].push(u16::try_from(index).unwrap_or(0));
            self.set_jump_entry(rights, index, jump);
        }
    }

    /// Empties the jump cache for code with these rights.
    pub fn flush_jumps(&mut self, rights: Rights) {
        for index in std::mem::take(&mut self.jumps_used[rights as usize]) {
            self.clear_jump(rights, index.into());
        }
    }

    /// Empties the TLB for accesses with these rights.
    pub fn flush_tlb(&mut self, rights: Rights) {
        if !std::mem::take(&mut self.tlb_used[rights as usize]) {
            return;
        }
        // SAFETY: the arrays are within the data, and no code runs.
        let tlb = unsafe { &mut (*self.data().as_ptr()).tlb[rights as usize] };
        tlb.read_tag = std::array::from_fn(unused_tag);
        tlb.write_tag = std::array::from_fn(unused_tag);
    }

    /// Returns the size in bytes of an exit's memory access, and whether it writes.
    ///
    /// `None` if the exit does not belong to an access.
    pub fn access(&self, exit: u32) -> Option<(u8, bool)> {
        match self.exits.get(exit as usize) {
            Some((_, ExitPoint::Instruction { access, .. })) => *access,
            _ => None,
        }
    }

    /// Enters a page into the TLB for accesses with these rights.
    ///
    /// `host` is the host address of the page's first byte. The callback may call this while code
    /// runs.
    pub fn enter_page(&mut self, rights: Rights, linear: u64, host: u64, write: bool) {
        debug_assert!(host & 0xfff == 0);
        let index = (linear >> 12 & (TLB_ENTRIES as u64 - 1)) as usize;
        self.tlb_used[rights as usize] = true;
        let tlb = self.data().as_ptr();
        // SAFETY: the arrays are within the data; code reads them one instruction after the other.
        unsafe {
            let tlb = &raw mut (*tlb).tlb[rights as usize];
            let (tag, to) = if write {
                (
                    &raw mut (*tlb).write_tag[index],
                    &raw mut (*tlb).write_host[index],
                )
            } else {
                (
                    &raw mut (*tlb).read_tag[index],
                    &raw mut (*tlb).read_host[index],
                )
            };
            tag.write(linear & !0xfff);
            to.write(host);
        }
    }

    /// Prepares the entry of a unit.
    ///
    /// Call [`Entry::run`] and [`Translator::left`] next.
    pub fn prepare(&mut self, unit: UnitId, state: &EntryState) -> Entry {
        let unit = &self.units[unit.0 as usize];
        debug_assert!(unit.vectors <= state.vectors_allowed);
        let (target, vectors) = (unit.entry, unit.vectors);
        let enter = match vectors {
            VectorLevel::None => self.stubs.enter,
            _ => self.stubs.enter_with_vectors,
        };
        let context = self.context();
        context.budget = state.budget;
        context.flag_record = 0;
        context.segment_base = state.segment_base;
        context.callback_data = state.callback_data as u64;
        context.target = target;
        context.branch_next = state.branch_next as u64;
        context.branch_due = state.branch_due as u64;
        context.end_stamp = state.end_stamp.into();
        context.vectors_loaded = vectors as u32;
        context.vectors_allowed = state.vectors_allowed as u32;
        context.mxcsr = state.mxcsr;
        context.host_mxcsr = HOST_MXCSR;
        context.vectors = state.vectors as u64;
        Entry { enter }
    }

    /// Returns where the code that ran last was left, and the guest's state then.
    pub fn left(&mut self) -> Left {
        let context = self.context();
        let (number, rip) = (context.exit, context.rip);
        let (mut budget, mxcsr) = (context.budget, context.mxcsr);
        let flags = FlagState::read(context);
        let branch_next = usize::try_from(context.branch_next).unwrap_or(0);
        let (unit, point) = self.exits[number as usize];
        let exit = match point {
            ExitPoint::Instruction {
                block,
                index,
                give_back,
                ..
            } => {
                budget += i64::from(give_back);
                UnitExit::Instruction { unit, block, index }
            }
            ExitPoint::Edge { edge } => UnitExit::Edge {
                rip: self.edges[edge].target_rip,
                edge: EdgeId(u32::try_from(edge).unwrap_or(u32::MAX)),
            },
            ExitPoint::EdgeBudget { edge } => {
                let edge = &self.edges[edge];
                let charge = edge.target.map_or(0, |t| self.units[t as usize].charge);
                budget += i64::from(charge);
                UnitExit::Budget {
                    rip: edge.target_rip,
                    charge: Some(charge),
                }
            }
            ExitPoint::Jump { rip } => UnitExit::Jump { rip },
            ExitPoint::JumpBudget => UnitExit::Budget { rip, charge: None },
            ExitPoint::Branches {
                rip: known,
                give_back,
            } => {
                budget += i64::from(give_back);
                UnitExit::Branches {
                    rip: known.unwrap_or(rip),
                }
            }
        };
        Left {
            exit,
            budget,
            flags,
            branch_next,
            mxcsr,
        }
    }

    /// Drops all units and run counters.
    pub fn reset(&mut self) {
        for rights in [Rights::Supervisor, Rights::User] {
            self.flush_jumps(rights);
        }
        self.units.clear();
        self.edges.clear();
        self.exits.clear();
        for slot in 0..self.run_counters as usize {
            // SAFETY: within the array; no code runs.
            unsafe { (&raw mut (*self.data().as_ptr()).runs[slot]).write(0) };
        }
        self.run_counters = 0;
        self.arena.truncate(self.shared);
    }
}

/// Returns the jump cache index of a RIP.
fn jump_index(rip: u64) -> usize {
    usize::try_from(rip & (JUMPS as u64 - 1)).unwrap_or(0)
}
