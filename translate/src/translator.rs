//! Units: making them, linking them, entering them.

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

/// What finds the host address for an access that the TLB does not have: called with
/// [`EntryState::callback_data`], the linear address, and the number to be passed to
/// [`Translator::access`]. 0 leaves the unit before the instruction.
pub type Callback = extern "sysv64" fn(data: usize, linear: u64, exit: u32) -> u64;

/// MXCSR as Rust code expects it.
const HOST_MXCSR: u32 = 0x1f80;

/// Identifies a unit until [`Translator::reset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId(u32);

impl UnitId {
    /// Units are numbered from 0.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Identifies an edge until [`Translator::reset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeId(u32);

/// Why a unit was not translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotTranslated {
    /// The unit would have too few instructions to be worth entering: it would end before an
    /// instruction that the caller must execute, if that is in the first block.
    TooShort(Option<usize>),
    /// The code memory is full: [`Translator::reset`].
    Full,
}

/// A block of a unit.
#[derive(Clone, Copy, Debug)]
pub struct UnitBlock {
    /// RIP of its first instruction.
    pub rip: u64,
    /// Its instructions.
    pub count: u32,
}

/// A piece of translated code.
#[derive(Debug)]
pub struct Unit {
    /// Its blocks. The code executes a part of the first one if [`Unit::start`] is not 0, and leaves
    /// the last one to the caller from an instruction on that it cannot execute.
    pub blocks: Vec<UnitBlock>,
    /// The instruction of the first block at which the code begins.
    pub start: usize,
    /// The instruction, if it is in the first block, before which the code ends because the caller
    /// must execute it.
    pub stop: Option<usize>,
    /// The rights of its accesses.
    pub rights: Rights,
    /// How it records taken branches.
    pub branch_format: Option<BranchFormat>,
    /// The vector registers that it uses.
    pub vectors: VectorLevel,
    /// Instructions that entering it from other code charges: those of all blocks.
    charge: u32,
    /// Where other code enters, also if it has loaded the vector registers already, and where the
    /// caller does.
    code: u64,
    loaded: u64,
    entry: u64,
    sees_flags: bool,
    incoming: Vec<u32>,
}

impl Unit {
    /// Instructions of the blocks after the first, which the caller charges before it enters.
    pub fn charge_beyond_first(&self) -> u32 {
        self.charge - self.blocks.first().map_or(0, |b| b.count)
    }

    /// Instructions of all blocks but for those before [`Unit::start`].
    pub fn charge_from_start(&self) -> u32 {
        self.charge - u32::try_from(self.start).unwrap_or(0)
    }

    /// Instructions of a block from one of them on.
    pub fn rest_of_block(&self, block: usize, index: usize) -> i64 {
        let count = self.blocks.get(block).map_or(0, |b| i64::from(b.count));
        count - i64::try_from(index).unwrap_or(count)
    }
}

/// An edge, in addresses.
#[derive(Clone, Copy, Debug)]
struct LiveEdge {
    from: u32,
    target_rip: u64,
    stores: (u64, usize),
    /// The first bytes of the stores, which a jump over them replaces.
    first_bytes: [u8; 5],
    charge: u64,
    jump: u64,
    unlinked: u64,
    rest: u32,
    target: Option<u32>,
}

/// State of the caller on entry.
#[derive(Clone, Copy, Debug)]
pub struct EntryState {
    /// Cycles that may be used up.
    pub budget: i64,
    /// Bases of FS and GS.
    pub segment_base: [u64; 2],
    /// The first argument of the callback.
    pub callback_data: usize,
    /// Address of the branch buffer's next entry.
    pub branch_next: usize,
    /// Address of the entry at which branches must be handled.
    pub branch_due: usize,
    /// Address of the guest's vector registers: 32 of 64 bytes, and behind them 8 opmask registers of
    /// 8 bytes.
    pub vectors: usize,
    /// The vector registers that the guest may use, with exceptions masked.
    pub vectors_allowed: VectorLevel,
    /// MXCSR.
    pub mxcsr: u32,
    /// Retired instructions at the end of the budget, modulo 2^32.
    pub end_stamp: u32,
}

/// Where and why translated code was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitExit {
    /// Before an instruction that the caller executes: index of its block in the unit, and its own.
    Instruction {
        /// The unit.
        unit: UnitId,
        /// Index of the block.
        block: usize,
        /// Index of the instruction.
        index: usize,
    },
    /// At a RIP in the page, where [`Translator::link`] can link the edge to a unit.
    Edge {
        /// RIP.
        rip: u64,
        /// The edge.
        edge: EdgeId,
    },
    /// At a RIP.
    Jump {
        /// RIP.
        rip: u64,
    },
    /// At a RIP whose unit charges more than is left of the budget.
    Budget {
        /// RIP.
        rip: u64,
        /// What the unit charges, if that is known.
        charge: Option<u32>,
    },
    /// At a RIP, after a branch was recorded that fills the buffer.
    Branches {
        /// RIP.
        rip: u64,
    },
}

/// State of the guest when translated code was left.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// Where and why.
    pub exit: UnitExit,
    /// What is left of the budget.
    pub budget: i64,
    /// What the flags follow from.
    pub flags: FlagState,
    /// Address of the branch buffer's next entry.
    pub branch_next: usize,
    /// MXCSR.
    pub mxcsr: u32,
}

/// Generated code that is ready to be entered.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Entry {
    enter: u64,
}

impl Entry {
    /// Runs the code.
    ///
    /// # Safety
    /// `registers` must be those of the guest, 16 in the order of their encoding, valid for reads and
    /// writes. The translator must not be borrowed, nor be reset before this returns. The pages that
    /// [`Translator::enter_page`] was given since the last flush must be valid guest memory, the
    /// branch buffer of [`EntryState`] must have room up to the entry at which branches are due, and
    /// its vector registers must be valid for reads and writes.
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
    /// Bytes of the shared code.
    shared: usize,
    addresses: Addresses,
    units: Vec<Unit>,
    edges: Vec<LiveEdge>,
    exits: Vec<(UnitId, ExitPoint)>,
    run_counters: u32,
    /// Entries of the jump caches that are in use.
    jumps_used: [Vec<u16>; 2],
    /// Whether anything was entered into the TLBs.
    tlb_used: [bool; 2],
}

/// Fewest instructions of a unit: entering a shorter one costs more than it saves.
const LEAST_INSTRUCTIONS: usize = 3;

impl Translator {
    /// A translator with `capacity` bytes for code. The error is the host's, which cannot map them.
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

    /// Allocates a counter for the runs of a block, and sets it to 0. Returns its number; none if
    /// all counters are in use.
    pub fn run_counter(&mut self) -> Option<u32> {
        let slot = self.run_counters;
        if slot as usize >= RUN_COUNTERS {
            return None;
        }
        self.run_counters += 1;
        Some(slot)
    }

    /// How often a block was entered from translated code.
    pub fn runs(&self, slot: u32) -> u64 {
        assert!((slot as usize) < RUN_COUNTERS);
        // SAFETY: within the array; no code runs.
        unsafe { (&raw const (*self.data().as_ptr()).runs[slot as usize]).read() }
    }

    /// Like [`Translator::runs`], and sets the counter to 0.
    pub fn take_runs(&self, slot: u32) -> u64 {
        let runs = self.runs(slot);
        // SAFETY: within the array, as `runs` has checked; no code runs, and nothing refers to it.
        unsafe { (&raw mut (*self.data().as_ptr()).runs[slot as usize]).write(0) };
        runs
    }

    /// Bytes of code.
    pub fn bytes(&self) -> usize {
        self.arena.used() - self.shared
    }

    /// A unit.
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

    /// Makes an edge lead to a unit, if it can: the unit begins at the edge's RIP, with a block, and
    /// records branches and accesses memory in the same way as the one that the edge belongs to.
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
        // Entering the unit for the first time may fail, at its first instruction.
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

    /// Makes sure that no other code enters a unit, until it is linked again.
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
            // This address has another index.
            tag: index as u64 ^ 1,
            entry: 0,
            charge: 0,
            unused: 0,
        };
        self.set_jump_entry(rights, index, unused);
    }

    /// Lets jumps from other pages find a unit that begins with a block, until
    /// [`Translator::flush_jumps`].
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

    /// Makes jumps from other pages find nothing.
    pub fn flush_jumps(&mut self, rights: Rights) {
        for index in std::mem::take(&mut self.jumps_used[rights as usize]) {
            self.clear_jump(rights, index.into());
        }
    }

    /// Forgets all pages that were entered for accesses with these rights.
    pub fn flush_tlb(&mut self, rights: Rights) {
        if !std::mem::take(&mut self.tlb_used[rights as usize]) {
            return;
        }
        // SAFETY: the arrays are within the data, and no code runs.
        let tlb = unsafe { &mut (*self.data().as_ptr()).tlb[rights as usize] };
        tlb.read_tag = std::array::from_fn(unused_tag);
        tlb.write_tag = std::array::from_fn(unused_tag);
    }

    /// The size in bytes of the access that an exit belongs to, and whether it writes.
    pub fn access(&self, exit: u32) -> Option<(u8, bool)> {
        match self.exits.get(exit as usize) {
            Some((_, ExitPoint::Instruction { access, .. })) => *access,
            _ => None,
        }
    }

    /// Lets accesses with these rights find the page of a linear address. `host` is the address of
    /// its first byte in the host's memory. May be called while code runs, by the callback.
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

    /// Prepares the entry of a unit; [`Entry::run`] and [`Translator::left`] follow.
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

    /// How the code that ran last was left, and the state then.
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

    /// Drops all units.
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

/// Index of a RIP in the jump caches.
fn jump_index(rip: u64) -> usize {
    usize::try_from(rip & (JUMPS as u64 - 1)).unwrap_or(0)
}
