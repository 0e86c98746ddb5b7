//! Translates, links, enters and unlinks units.

#![expect(
    unsafe_code,
    reason = "generated code is entered, and its data are in its arena"
)]

use crate::analysis::{AccessCounts, UnitAnalysis, UnitSource};
use crate::arena::Arena;
use crate::emit::{Addresses, Emitter, ExitPoint, FirstNumbers, Retry, UnitCode};
use crate::entry::{Entry, EntryState, Left, RecordBuffer, UnitExit};
use crate::flags::FlagState;
use crate::layout::{Context, Data, JumpEntry, PATH_RECORDS, PathRecord, Rights};
use crate::paths::{BranchWords, Paths};
use crate::stubs::{self, Stubs};
use crate::tables::{JumpKeys, Tables, TlbKey};
use crate::unit::{EdgeId, NotTranslated, Unit, UnitAccess, UnitBlock, UnitId};
use crate::vector::VectorLevel;
use crate::x87;
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::ptr::NonNull;

/// Returns the host address of an access that misses the TLB, or 0.
///
/// Translated code calls it with [`EntryState::callback_data`], the linear address, and the exit
/// number to pass to [`Translator::access`]. If it returns 0, the unit is left before the
/// instruction.
pub type Callback = extern "sysv64" fn(data: usize, linear: u64, exit: u32) -> u64;

/// The default MXCSR, which Rust code requires.
const HOST_MXCSR: u32 = 0x1f80;

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
    paths: Paths,
    tables: Tables,
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
            load_x87: stubs.load_x87,
            load_flags: stubs.flags.load,
            bmi2: std::arch::is_x86_feature_detected!("bmi2"),
        };
        // SAFETY: the arena belongs to the translator, which refers to the tables only through
        // this.
        let tables = unsafe { Tables::new(arena.data().cast(), &stubs.flags) };
        Ok(Self {
            shared: arena.used(),
            arena,
            stubs,
            addresses,
            units: Vec::new(),
            edges: Vec::new(),
            exits: Vec::new(),
            paths: Paths::default(),
            tables,
        })
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
        self.tables.run_counter()
    }

    /// Returns how often translated code has entered the block of a counter.
    pub fn runs(&self, counter: u32) -> u64 {
        self.tables.runs(counter)
    }

    /// Like [`Translator::runs`], and resets the counter to 0.
    pub fn take_runs(&self, counter: u32) -> u64 {
        self.tables.take_runs(counter)
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
                path: self.paths.next().ok_or(NotTranslated::Full)?,
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
            access_format: source.access_format,
            vectors: code.vectors,
            code: base,
            loaded: base + code.loaded as u64,
            entry: base + code.entry as u64,
            sees_flags: code.sees_flags,
            incoming: Vec::new(),
        });
        self.exits.extend(code.exits.iter().map(|&e| (id, e)));
        let words = source.branch_format.map_or([0; 8], |format| format.words);
        self.paths.add(&code.branches, &code.paths, &words);
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
            && target.branch_format == from.branch_format
            && target.access_format == from.access_format;
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
        self.tables.remove_jump(unit.rights, rip, unit.code);
    }

    /// Enters a unit into the jump cache, so that jumps from other pages find it.
    ///
    /// Does nothing for a unit that does not begin with a block. `is_global` says whether the
    /// unit's page is global.
    pub fn set_jump(&mut self, unit: UnitId, is_global: impl FnOnce() -> bool) {
        let unit = &self.units[unit.0 as usize];
        let Some(first) = unit.blocks.first().filter(|_| unit.start == 0) else {
            return;
        };
        if self.tables.has_jump(unit.rights, first.rip, unit.code) {
            return;
        }
        let jump = JumpEntry {
            tag: first.rip,
            entry: unit.code,
            charge: unit.charge.into(),
            global: is_global().into(),
        };
        self.tables.add_jump(unit.rights, jump);
    }

    /// Makes the jump cache for code with these rights valid for new keys.
    ///
    /// Its entries are those that it had when the keys were current before. If `saves`, the entries
    /// of the current local key are saved, because that can become current again.
    pub fn select_jumps(&mut self, rights: Rights, keys: JumpKeys, saves: bool) {
        self.tables.select_jumps(rights, keys, saves);
    }

    /// Makes the TLB for accesses with these rights valid for a key, like
    /// [`Translator::select_jumps`].
    pub fn select_tlb(&mut self, rights: Rights, key: TlbKey, saves: bool) {
        self.tables.select_tlb(rights, key, saves);
    }

    /// Removes the page that contains a linear address from TLBs and jump caches, for all keys.
    ///
    /// If the page may be larger than 4 KiB (`large`), all of them are emptied.
    pub fn evict(&mut self, linear: u64, large: bool) {
        self.tables.evict(linear, large);
    }

    /// Excludes a page of memory, given by its host address, from the TLBs; 0 allows all pages.
    ///
    /// Code leaves its unit before each access to an excluded page.
    pub fn exclude_page(&mut self, host: u64) {
        self.tables.exclude_page(host);
    }

    /// Whether a page of memory is excluded from the TLBs.
    pub fn is_excluded(&self, host: u64) -> bool {
        self.tables.is_excluded(host)
    }

    /// Enters a line of memory, whose accesses from now on only need to be counted.
    ///
    /// `host` is the host address of the line that contains the linear address. Another line of
    /// the same set is removed first, in the tables for all rights.
    pub fn enter_line(&mut self, rights: Rights, linear: u64, host: u64, write: bool) {
        self.tables.enter_line(rights, linear, host, write);
    }

    /// Removes the lines of the set to which a linear or physical address belongs.
    pub fn remove_line(&mut self, address: u64) {
        self.tables.remove_line(address);
    }

    /// Removes all lines of memory.
    pub fn remove_lines(&mut self) {
        self.tables.remove_lines();
    }

    /// Enters a line of code, given by its physical address divided by 64; removes another line
    /// of the same set.
    pub fn set_code_line(&mut self, line: u64) {
        self.tables.set_code_line(line);
    }

    /// Removes all lines of code.
    pub fn remove_code_lines(&mut self) {
        self.tables.remove_code_lines();
    }

    /// Returns an exit's memory access; `None` if the exit does not belong to an access.
    pub fn access(&self, exit: u32) -> Option<UnitAccess> {
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
        self.tables.enter_page(rights, linear, host, write);
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
        let (record_next, record_due) = match state.branches {
            RecordBuffer::Caller { next, end } => (next as u64, end as u64),
            RecordBuffer::Translator => (self.path_records(0), self.path_records(PATH_RECORDS)),
        };
        let context = self.context();
        context.budget = state.budget;
        context.flag_record = 0;
        context.caller_flags = state.flags.into();
        context.segment_base = state.segment_base;
        context.callback_data = state.callback_data as u64;
        context.target = target;
        (context.record_next, context.record_due) = (record_next, record_due);
        context.end_stamp = state.end_stamp.into();
        context.vectors_loaded = vectors as u32;
        context.vectors_allowed = state.vectors_allowed as u32;
        context.mxcsr = state.mxcsr;
        context.fetch_line = state.fetch_line;
        (context.loads, context.stores) = (0, 0);
        context.host_mxcsr = HOST_MXCSR;
        context.vectors = state.vectors as u64;
        context.x87_area = state.x87 as u64;
        context.x87 = if state.x87_allowed {
            x87::NOT_LOADED
        } else {
            x87::REFUSED
        };
        Entry { enter }
    }

    /// Returns where the code that ran last was left, and the guest's state then.
    pub fn left(&mut self) -> Left {
        let context = self.context();
        let (number, rip) = (context.exit, context.rip);
        let (mut budget, mxcsr) = (context.budget, context.mxcsr);
        let fetch_line = context.fetch_line;
        let mut accesses = AccessCounts {
            loads: context.loads,
            stores: context.stores,
        };
        let flags = FlagState::read(context);
        let branch_next = usize::try_from(context.record_next).unwrap_or(0);
        let (unit, point) = self.exits[number as usize];
        let paths = self.complete_paths(branch_next, &point);
        let exit = match point {
            ExitPoint::Instruction {
                block,
                index,
                give_back,
                uncounted,
                ..
            } => {
                budget += i64::from(give_back);
                accesses.loads = accesses.loads.wrapping_sub(uncounted.loads);
                accesses.stores = accesses.stores.wrapping_sub(uncounted.stores);
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
            paths,
            mxcsr,
            fetch_line,
            accesses,
        }
    }

    /// Returns the address of a record of paths.
    fn path_records(&self, index: usize) -> u64 {
        self.addresses.data
            + (offset_of!(Data, path_records) + index * size_of::<PathRecord>()) as u64
    }

    /// Adds the record of the path to an exit within a unit, and returns the number of records.
    ///
    /// The code has added those up to the address `next`. If that is outside of the records, the
    /// code has recorded no paths.
    fn complete_paths(&mut self, next: usize, point: &ExitPoint) -> usize {
        let first = usize::try_from(self.path_records(0)).unwrap_or(0);
        let bytes = next.wrapping_sub(first);
        let count = bytes / size_of::<PathRecord>();
        if count > PATH_RECORDS {
            return 0;
        }
        let ExitPoint::Instruction {
            path: Some(path), ..
        } = point
        else {
            return count;
        };
        let budget = self.context().budget;
        let record = PathRecord {
            budget: u32::try_from(budget.cast_unsigned() & 0xffff_ffff).unwrap_or(0),
            path: *path,
            target: 0,
        };
        // SAFETY: the data contain the records, and no code runs.
        let records = unsafe { &mut (*self.data().as_ptr()).path_records };
        records[count] = record;
        count + 1
    }

    /// Returns the records of paths that the code has added since it was entered.
    fn records(&self, range: Range<usize>) -> &[PathRecord] {
        // SAFETY: the data contain the records, and no code runs.
        let records = unsafe { &(*self.data().as_ptr()).path_records };
        records.get(range).unwrap_or_default()
    }

    /// Returns how many of the first records of paths have no branch among the newest.
    ///
    /// `count` is the number of records ([`Left::paths`]), and `newest` that of branches. Also
    /// returns the number of branches of those records.
    pub fn superseded(&self, count: usize, newest: usize) -> (usize, u64) {
        self.paths.superseded(self.records(0..count), newest)
    }

    /// Returns how many branches of each [`BranchKind`](crate::BranchKind) the first records have.
    ///
    /// `count` is the number of records ([`Left::paths`]).
    pub fn count_branches(&self, count: usize) -> [u64; 8] {
        self.paths.count(self.records(0..count))
    }

    /// Stores the branches of a range of the records of paths in `to`.
    ///
    /// Ends before a record for whose branches there is no room. `end_stamp` is the time stamp at
    /// which the budget is used up. Returns the numbers of records and of branches.
    pub fn expand(
        &self,
        range: Range<usize>,
        end_stamp: u32,
        to: &mut [BranchWords],
    ) -> (usize, usize) {
        self.paths.expand(self.records(range), end_stamp, to)
    }

    /// Drops all units and run counters.
    pub fn reset(&mut self) {
        self.tables.reset();
        self.units.clear();
        self.edges.clear();
        self.exits.clear();
        self.paths.clear();
        self.arena.truncate(self.shared);
    }
}
