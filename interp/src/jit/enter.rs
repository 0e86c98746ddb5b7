//! Enters units, and handles their exits.

#![expect(unsafe_code, reason = "translated code is run, and calls back")]

use super::flags::{flags_in_ax, flags_of};
use super::{EntryPoint, UnitMode, rights_of, set_of};
use crate::branch_buffer::{BranchRecords, BtsWindow};
use crate::code::{BlockEntry, BlockOp, DEAD, ReplacedHandler};
use crate::core::{Core, Next};
use crate::fault::ExitReason;
use crate::memory::{GuestBytes, GuestBytesMut};
use crate::mmu::AccessKind;
use crate::platform::BranchClass;
use crate::registers::{Reg, Registers};
use crate::seg::canonical;
use crate::thunk::host::has_zmm;
use crate::thunk::vectors::{AVX, HI16, OPMASK, SSE, Vectors, ZMM_HI};
use hindsight_regs::cr::{Cr0, Cr4};
use hindsight_translate::{
    EdgeId, Entry, EntryState, JumpKeys, RecordBuffer, RecordKind, UnitExit, UnitId, VectorLevel,
};

/// The bits of the x87 control word that mask all exceptions.
const X87_MASKS: u16 = 0x3f;
/// The bits of MXCSR that mask all floating-point exceptions.
const MXCSR_MASKS: u32 = 0x1f80;

/// The handler of operations at which a unit begins.
///
/// Like every handler, it must not hold a stack frame when it calls the next one.
pub(super) fn enter_unit(c: &mut Core, o: BlockOp<'_, Core>) -> Next {
    let handler = c.choose_entry(o);
    o.execute_replaced(c, handler)
}

/// Runs the unit that `choose_entry` chose.
fn run_chosen(c: &mut Core, _: BlockOp<'_, Core>) -> Next {
    match c.jit.chosen {
        Some(unit) => c.run_unit(unit),
        None => c.leave(ExitReason::Lookup),
    }
}

/// Leaves the dispatch loop, so that the next slice begins.
fn end_slice(c: &mut Core, _: BlockOp<'_, Core>) -> Next {
    c.leave(ExitReason::SliceEnd)
}

/// The [`hindsight_translate::Callback`]: finds the host address of an access.
pub(super) extern "sysv64" fn find_host(data: usize, linear: u64, exit: u32) -> u64 {
    let core = std::ptr::with_exposed_provenance_mut::<Core>(data);
    // SAFETY: `data` is the address of the processor that runs the code (`Core::run_unit`), which
    // is not borrowed while the code runs.
    let core = unsafe { &mut *core };
    core.find_host(linear, exit).unwrap_or(0)
}

impl Core {
    /// Returns the instructions to charge if a unit can be entered now.
    ///
    /// The instructions of the block that is entered have been charged already and do not count.
    fn can_enter(&mut self, unit: UnitId, mode: UnitMode) -> Option<u32> {
        if self.jit.compiled[unit.index()].suspended && !self.resume_unit(unit) {
            return None;
        }
        let translator = self.jit.translator.as_ref()?;
        let unit = translator.unit(unit);
        let set = set_of(unit.rights);
        let finds = match mode.accesses {
            // The units of this mode do not use the fast path, which finds no page.
            Some(_) => self.mmu.rights() == set,
            None => self.mmu.is_fast(set),
        };
        let fits = finds && unit.vectors <= self.usable_vectors();
        let charge = fits.then(|| unit.charge_beyond_first())?;
        self.jit.bts_window = match mode.records {
            BranchRecords::Bts => Some(self.bts_window()?),
            _ => None,
        };
        Some(charge)
    }

    /// Whether a unit that records branches does so for the current privilege level.
    fn records_this_level(&self, unit: UnitId) -> bool {
        let Some(translator) = &self.jit.translator else {
            return false;
        };
        let word = self.branches.last_word(BranchClass::Conditional);
        translator
            .unit(unit)
            .branch_format
            .is_none_or(|f| f.records == RecordKind::Bts || f.words[0] == word)
    }

    /// Returns the vector registers that translated code may use.
    ///
    /// There are none if a vector instruction could fault, or raise a floating-point exception.
    fn usable_vectors(&self) -> VectorLevel {
        let unmasked = !self.vec.mxcsr & MXCSR_MASKS != 0;
        if unmasked || self.cr0(Cr0::EM | Cr0::TS) || !self.cr4(Cr4::OSFXSR) {
            VectorLevel::None
        } else if !self.cr4(Cr4::OSXSAVE) || self.state.xcr0 & (SSE | AVX) != SSE | AVX {
            VectorLevel::Sse
        } else if self.state.xcr0 & (OPMASK | ZMM_HI | HI16) != OPMASK | ZMM_HI | HI16 {
            VectorLevel::Avx
        } else if has_zmm() {
            VectorLevel::Avx512
        } else if self.vec.has_upper_halves() {
            // The host's VEX instructions do not clear the bits above its YMM registers.
            VectorLevel::Sse
        } else {
            VectorLevel::Avx
        }
    }

    /// Whether translated code may execute x87 instructions.
    ///
    /// It may not if one could fault or report an error, or if results must not depend on the host.
    fn can_translate_x87(&self) -> bool {
        let masked = self.vec.fcw() & X87_MASKS == X87_MASKS;
        masked && !self.portable && !self.ferr && !self.cr0(Cr0::EM | Cr0::TS)
    }

    /// Chooses what executes an operation at which a unit begins: the unit or itself.
    #[inline(never)]
    fn choose_entry(&mut self, o: BlockOp<'_, Self>) -> ReplacedHandler<Self> {
        self.follow_killed();
        let Some(&point) = self.jit.entries.get(&o.id()) else {
            // An operation has this handler only while it is in the table of entry points.
            debug_assert!(false, "no unit begins here");
            self.jit.chosen = None;
            return ReplacedHandler::any(run_chosen);
        };
        if self.jit.left_at.take() == Some(o.id()) {
            return point.replaced;
        }
        let mode = self.unit_mode();
        let unit = point.unit_for(self.regs.get(Reg::BlockRip), mode);
        let Some(unit) = unit.filter(|u| self.records_this_level(*u)) else {
            self.miss_entry(o);
            return point.replaced;
        };
        let Some(extra) = self.can_enter(unit, mode) else {
            return point.replaced;
        };
        if self.progress.take(extra) {
            self.jit.chosen = Some(unit);
            return ReplacedHandler::any(run_chosen);
        }
        if self.waits_for_next_slice(o, &point, extra) {
            return ReplacedHandler::any(end_slice);
        }
        point.replaced
    }

    /// Counts a run of an entry point for which no unit fits.
    ///
    /// The code runs at another RIP, or branches are recorded in another way. After enough such
    /// runs, a unit is made.
    #[cold]
    fn miss_entry(&mut self, o: BlockOp<'_, Self>) {
        let Some(point) = self.jit.entries.get_mut(&o.id()) else {
            return;
        };
        point.misses += 1;
        // Double the threshold with each unit: code may run at many addresses, or be modified again
        // and again.
        let often = self.hot_after.saturating_mul(1 << point.made.min(16));
        if point.misses < often {
            return;
        }
        point.misses = 0;
        // SAFETY: only `tidy_code` frees blocks, and it clears the entry points.
        let first = unsafe { point.block.live() }.first_op();
        self.translate_hot(first);
    }

    /// Whether to end the slice because the rest of its budget does not cover a unit.
    ///
    /// If so, the block's instructions and its run are uncounted, and RIP is set to the block.
    /// Otherwise the interpreter executes the block now.
    #[cold]
    fn waits_for_next_slice(
        &mut self,
        o: BlockOp<'_, Self>,
        point: &EntryPoint,
        extra: u32,
    ) -> bool {
        let count = o.count();
        let Ok(charged) = u8::try_from(count) else {
            return false;
        };
        if point.op != 0 {
            return false;
        }
        self.progress.give_back(charged);
        if self.progress.next_slice_covers(count + extra) {
            o.add_runs(u64::MAX);
            self.regs.rip = self.regs.get(Reg::BlockRip);
            return true;
        }
        let taken = self.progress.take(count);
        debug_assert!(taken, "just given back");
        false
    }

    /// Returns the state for translated code; the caller sets its addresses.
    #[inline(always)]
    fn entry_state(&mut self, window: Option<&BtsWindow>) -> EntryState {
        let branches = match window {
            Some(window) => RecordBuffer::Caller {
                next: window.next,
                end: window.end,
            },
            None if self.branch_records().are_paths() => RecordBuffer::Translator,
            None => {
                let (next, end) = self.branches.entries();
                RecordBuffer::Caller { next, end }
            }
        };
        EntryState {
            budget: self.progress.budget(),
            segment_base: [self.regs.get(Reg::FsBase), self.regs.get(Reg::GsBase)],
            callback_data: 0,
            branches,
            end_stamp: self.progress.end_stamp(),
            vectors: 0,
            vectors_allowed: self.usable_vectors(),
            mxcsr: self.vec.mxcsr,
            x87: 0,
            x87_allowed: self.can_translate_x87(),
            fetch_line: self.counters.last_line(),
            flags: flags_in_ax(self.regs.flags),
        }
    }

    /// Runs a unit whose instructions have been charged, and handles its exit.
    #[inline(never)]
    fn run_unit(&mut self, unit: UnitId) -> Next {
        let window = self.jit.bts_window.take();
        self.prepare_tables(unit, window.as_ref());
        let mut state = self.entry_state(window.as_ref());
        let core: *mut Self = self;
        state.callback_data = core.expose_provenance();
        // SAFETY: `core` is this processor; nothing else refers to it until it is borrowed again
        // below. The translator's TLB holds only pages that `find_host` has entered, and
        // `prepare_tables` keeps them only while they are in the processor's TLBs. The buffer has
        // room up to the entry at which it must be processed; so has the guest's BTS buffer, whose
        // memory stays while the code runs.
        let left = unsafe {
            state.vectors = Vectors::address(&raw mut *(*core).vec);
            state.x87 = Vectors::x87_address(&raw mut *(*core).vec);
            let Some(entry) = (*core).prepare_entry(unit, &state) else {
                return (*core).leave(ExitReason::Lookup);
            };
            let registers = Registers::general_address(&raw mut (*core).regs);
            (*core).jit.in_unit = true;
            entry.run(registers);
            (*core).jit.in_unit = false;
            (*core).left_unit(unit, &state, window)
        };
        self.count_exit(left);
        if self.counters.counts_accesses() {
            return self.left_counting_unit(left);
        }
        match left {
            UnitExit::Instruction { unit, block, index } => {
                self.leave_to_instruction(unit, block, index)
            }
            UnitExit::Edge { rip, edge } => {
                self.link_edge(rip, edge);
                self.go_to(rip)
            }
            UnitExit::Jump { rip } => self.go_to(rip),
            UnitExit::Budget { rip, charge } => {
                self.regs.rip = rip;
                let ends = charge.is_some_and(|n| self.progress.next_slice_covers(n));
                self.leave(if ends {
                    ExitReason::SliceEnd
                } else {
                    ExitReason::Budget
                })
            }
            UnitExit::Branches { rip } => {
                self.progress.end_operation();
                if self.handle_due_branches() {
                    self.regs.rip = rip;
                    return self.leave(ExitReason::Poll);
                }
                self.go_to(rip)
            }
        }
    }

    /// Handles the exit of a unit that reports accesses: the run loop continues.
    fn left_counting_unit(&mut self, left: UnitExit) -> Next {
        match left {
            UnitExit::Instruction { unit, block, index } => {
                let compiled = &self.jit.compiled[unit.index()];
                let translator = self.jit.translator.as_ref();
                let Some(unit) = translator.map(|t| t.unit(unit)) else {
                    return self.leave(ExitReason::Lookup);
                };
                let (rip, rest) = (unit.blocks[block].rip, unit.rest_of_block(block, index));
                let source = &compiled.blocks[block];
                let offset = source.offsets[index];
                // SAFETY: as in `leave_to_instruction`.
                let op = unsafe { source.entry.live().first_op().at(source.ops[index]) };
                let joined = op.offset != offset;
                self.code.mix.ended_early(op.id(), joined);
                self.jit.steps_next = true;
                self.progress
                    .give_back(u8::try_from(rest).unwrap_or(u8::MAX));
                self.leave_counting_unit(rip.wrapping_add(offset.into()))
            }
            UnitExit::Edge { rip, edge } => {
                self.link_edge(rip, edge);
                self.leave_counting_unit(rip)
            }
            UnitExit::Jump { rip } | UnitExit::Budget { rip, .. } => self.leave_counting_unit(rip),
            UnitExit::Branches { rip } => {
                let due = self.handle_due_branches();
                self.regs.rip = rip;
                self.leave(if due {
                    ExitReason::Poll
                } else {
                    ExitReason::Lookup
                })
            }
        }
    }

    fn count_exit(&mut self, exit: UnitExit) {
        let exits = &mut self.jit.stats.exits;
        let count = match exit {
            UnitExit::Instruction { .. } => &mut exits.instructions,
            UnitExit::Edge { .. } => &mut exits.edges,
            UnitExit::Jump { .. } => &mut exits.jumps,
            UnitExit::Budget { .. } => &mut exits.slices,
            UnitExit::Branches { .. } => &mut exits.branches,
        };
        *count += 1;
    }

    /// Continues with the block at a RIP, as a branch to that RIP does.
    fn go_to(&mut self, rip: u64) -> Next {
        let Some(entry) = self.code.jump(rip) else {
            self.regs.rip = rip;
            return self.leave(ExitReason::Lookup);
        };
        // SAFETY: the entry was just read from the cache, and no handler frees blocks.
        let block = unsafe { entry.live() };
        if !self.progress.take(block.count()) {
            self.regs.rip = rip;
            return self.leave(ExitReason::Budget);
        }
        self.regs.set(Reg::BlockRip, rip);
        if block.count_run() == self.hot_after {
            self.translate_hot(block.first_op());
        }
        block.first_op().next()
    }

    /// Enters the unit of a block that the caller has just found, while a model observes all accesses.
    ///
    /// Returns whether a unit ran, or the slice must end so that one can.
    pub(super) fn enter_counting_unit(&mut self, entry: BlockEntry<Self>) -> bool {
        // SAFETY: the caller has just found the block, and nothing before its last use frees blocks.
        let block = unsafe { entry.live() };
        let (count, first) = (block.count(), block.first_op());
        let rip = self.regs.rip;
        self.regs.set(Reg::BlockRip, rip);
        self.follow_killed();
        let mode = self.unit_mode();
        let Some(&point) = self.jit.entries.get(&first.id()) else {
            if self.jit.is_hot(first.id(), self.hot_after) {
                self.translate_hot(first);
            }
            return false;
        };
        let unit = point.unit_for(rip, mode);
        let Some(unit) = unit.filter(|u| self.records_this_level(*u)) else {
            self.miss_entry(first);
            return false;
        };
        let Some(extra) = self.can_enter(unit, mode) else {
            return false;
        };
        let budget = self.progress.budget().max(0).cast_unsigned();
        if !self.counters.covers_accesses(budget) {
            return false;
        }
        if !self.progress.take(count + extra) {
            self.exit.reason = ExitReason::SliceEnd;
            return self.progress.next_slice_covers(count + extra);
        }
        self.exit.requested = false;
        block.count_run();
        let _ = self.run_unit(unit);
        true
    }

    fn prepare_entry(&mut self, unit: UnitId, state: &EntryState) -> Option<Entry> {
        let translator = self.jit.translator.as_mut()?;
        Some(translator.prepare(unit, state))
    }

    /// Updates the processor's state after translated code was left.
    ///
    /// # Safety
    /// As for [`BranchBuffer::stored_up_to`](crate::branch_buffer::BranchBuffer::stored_up_to), if
    /// the unit stored BTS records in a window.
    unsafe fn left_unit(
        &mut self,
        unit: UnitId,
        entered: &EntryState,
        window: Option<BtsWindow>,
    ) -> UnitExit {
        let Some(translator) = &mut self.jit.translator else {
            return UnitExit::Jump { rip: self.regs.rip };
        };
        let left = translator.left();
        let counts = translator.unit(unit).access_format.is_some();
        let first = translator.unit(unit);
        // Instructions of the last block that are taken from the budget, but did not execute.
        let rest = match left.exit {
            UnitExit::Instruction { unit, block, index } => {
                translator.unit(unit).rest_of_block(block, index)
            }
            _ => 0,
        };
        let retired = entered.budget - left.budget + i64::from(first.charge_from_start()) - rest;
        debug_assert!(retired >= 0);
        self.jit.stats.retired = self.jit.stats.retired.wrapping_add_signed(retired);
        self.progress.set_budget(left.budget);
        self.progress
            .begin_operation(u8::try_from(rest).unwrap_or(u8::MAX));
        self.regs.flags = flags_of(&left.flags, self.regs.flags);
        match (window, entered.branches) {
            // SAFETY: the contract of this function.
            (Some(window), _) => unsafe { self.branches.stored_up_to(&window, left.branch_next) },
            (None, RecordBuffer::Caller { .. }) => self.branches.added_up_to(left.branch_next),
            (None, RecordBuffer::Translator) => self.add_paths(left.paths),
        }
        self.vec.mxcsr = left.mxcsr;
        if counts {
            self.counters.set_last_line(left.fetch_line);
            self.count_accesses(left.accesses, retired.cast_unsigned());
        }
        self.progress.end_operation();
        left.exit
    }

    /// Makes the unit's TLB and jump cache valid for the processor's address space.
    ///
    /// Then enters the unit into the jump cache.
    fn prepare_tables(&mut self, unit: UnitId, window: Option<&BtsWindow>) {
        let mode = self.unit_mode();
        let jit = &mut self.jit;
        let Some(translator) = &mut jit.translator else {
            return;
        };
        let area = window.map_or(0, |w| w.area & !0xfff);
        translator.exclude_page(area);
        let rights = translator.unit(unit).rights;
        let (reads, writes) = (&self.mmu.reads, &self.mmu.writes);
        let stamps = (reads.stamp(), writes.stamp());
        let known = &mut jit.tlb_stamps[rights as usize];
        if *known != stamps {
            let saves = reads.has_stamp(known.0) && writes.has_stamp(known.1);
            *known = stamps;
            translator.select_tlb(rights, stamps, saves);
            translator.remove_lines();
        }
        // Units that are entered without a check must record branches in the same way.
        let cpl = u64::from(self.mode.cpl());
        let context = self.code.context();
        let keys = JumpKeys {
            global: self.code.globals() << 15 | (context & 0xff) << 7 | cpl << 5 | mode.key(),
            local: context,
        };
        let known = &mut jit.contexts[rights as usize];
        if *known != keys {
            let saves = self.code.has_context(known.local);
            *known = keys;
            translator.select_jumps(rights, keys, saves);
        }
        let rip = self.regs.get(Reg::BlockRip);
        if !self.debug.stops.has_breakpoint(rip) {
            let (fetches, set) = (&self.mmu.fetches, self.mmu.rights());
            translator.set_jump(unit, || {
                fetches.translation(rip, set).is_some_and(|t| t.global)
            });
        }
    }

    /// Continues in the interpreter at an instruction of a unit.
    fn leave_to_instruction(&mut self, unit: UnitId, block: usize, index: usize) -> Next {
        let compiled = &self.jit.compiled[unit.index()];
        let source = &compiled.blocks[block];
        let rip = self
            .jit
            .translator
            .as_ref()
            .map_or(0, |t| t.unit(unit).blocks[block].rip);
        // SAFETY: the block is in the cache, no handler frees blocks, and it has this operation
        // (`Core::guest_block`).
        let op = unsafe { source.entry.live().first_op().at(source.ops[index]) };
        self.regs.set(Reg::BlockRip, rip);
        // If a unit begins at this operation, it must not be entered again now.
        self.jit.left_at = Some(op.id());
        op.next()
    }

    /// Links an edge to the unit that begins at a RIP, if there is one.
    fn link_edge(&mut self, rip: u64, edge: EdgeId) {
        let Some(entry) = self.code.jump(rip) else {
            return;
        };
        // SAFETY: the entry was just read from the cache, and this function frees no blocks.
        let first = unsafe { entry.live() }.first_op();
        let Some(point) = self.jit.entries.get(&first.id()) else {
            return;
        };
        let Some(unit) = point.unit_for(rip, self.unit_mode()) else {
            return;
        };
        if first.count() == DEAD || self.jit.compiled[unit.index()].suspended {
            return;
        }
        if let Some(translator) = &mut self.jit.translator {
            translator.link(edge, unit);
        }
    }

    /// Finds an access's host address and enters the page into the translator's TLB.
    fn find_host(&mut self, linear: u64, exit: u32) -> Option<u64> {
        let translator = self.jit.translator.as_ref()?;
        let access = translator.access(exit)?;
        if self.counters.counts_accesses() {
            return self.find_line(linear, access);
        }
        let (size, write) = (access.size, access.write);
        let set = self.mmu.rights();
        let rights = rights_of(set)?;
        if !canonical(linear) {
            return None;
        }
        let len = usize::from(size);
        let find = |core: &Self| {
            let fast = core.mmu.fast();
            if write {
                let found = core.mmu.writes.find_bytes(linear, len, fast);
                found.map(GuestBytesMut::host)
            } else {
                let found = core.mmu.reads.find_bytes(linear, len, fast);
                found.map(GuestBytes::host)
            }
        };
        let access = if write {
            AccessKind::Write
        } else {
            AccessKind::Read
        };
        let host = match find(self) {
            Some(host) => host,
            None => {
                if !self.mmu.promote_fast(linear, access, set) {
                    self.pieces(linear, len, access, set).ok()?;
                }
                find(self)?
            }
        };
        let page = host - (linear & 0xfff);
        let translator = self.jit.translator.as_mut()?;
        if translator.is_excluded(page) {
            return None;
        }
        translator.enter_page(rights, linear, page, write);
        Some(host)
    }
}
