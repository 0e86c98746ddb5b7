//! Enters units, and does what they are left for.

#![expect(unsafe_code, reason = "translated code is run, and calls back")]

use super::flags::flags_of;
use super::{EntryPoint, rights_of, set_of};
use crate::code::{BlockOp, DEAD, ReplacedHandler};
use crate::core::{Core, Next};
use crate::fault::ExitReason;
use crate::memory::{GuestBytes, GuestBytesMut};
use crate::mmu::AccessKind;
use crate::platform::BranchClass;
use crate::registers::{Reg, Registers};
use crate::seg::canonical;
use crate::thunk::vectors::{AVX, HI16, OPMASK, SSE, Vectors, ZMM_HI};
use hindsight_regs::cr::{Cr0, Cr4};
use hindsight_translate::{EdgeId, Entry, EntryState, UnitExit, UnitId, VectorLevel};

/// MXCSR: the masks of all exceptions.
const MXCSR_MASKS: u32 = 0x1f80;

/// The handler of operations at which a unit begins.
///
/// Like all handlers it must not have a frame when it calls the next one.
pub(super) fn enter_unit(c: &mut Core, o: BlockOp<'_, Core>) -> Next {
    let handler = c.choose_entry(o);
    o.execute_replaced(c, handler)
}

/// Runs the unit that was chosen.
fn run_chosen(c: &mut Core, _: BlockOp<'_, Core>) -> Next {
    match c.jit.chosen {
        Some(unit) => c.run_unit(unit),
        None => c.leave(ExitReason::Lookup),
    }
}

/// Leaves the dispatch loop for the next slice.
fn end_slice(c: &mut Core, _: BlockOp<'_, Core>) -> Next {
    c.leave(ExitReason::SliceEnd)
}

/// Finds the host address for an access of translated code: [`hindsight_translate::Callback`].
pub(super) extern "sysv64" fn find_host(data: usize, linear: u64, exit: u32) -> u64 {
    let core = std::ptr::with_exposed_provenance_mut::<Core>(data);
    // SAFETY: it is the processor that runs the code (`Core::run_unit`), which is not borrowed
    // meanwhile.
    let core = unsafe { &mut *core };
    core.find_host(linear, exit).unwrap_or(0)
}

impl Core {
    /// Whether a unit can be entered now: then the instructions that entering it charges, beyond
    /// those of the block that is entered.
    fn can_enter(&mut self, unit: UnitId) -> Option<u32> {
        if self.jit.compiled[unit.index()].suspended && !self.resume_unit(unit) {
            return None;
        }
        let unit = self.jit.translator.as_ref()?.unit(unit);
        let word = self.branches.last_word(BranchClass::Conditional);
        let fits = set_of(unit.rights).offset() == self.mmu.fast()
            && unit.branch_format.is_none_or(|r| r.words[0] == word)
            && self.branches.only_records_taken()
            && unit.vectors <= self.usable_vectors();
        fits.then(|| unit.charge_beyond_first())
    }

    /// The vector registers that translated code may use: none if an instruction could fault.
    fn usable_vectors(&self) -> VectorLevel {
        let unmasked = !self.vec.mxcsr & MXCSR_MASKS != 0;
        if unmasked || self.cr0(Cr0::EM | Cr0::TS) || !self.cr4(Cr4::OSFXSR) {
            VectorLevel::None
        } else if !self.cr4(Cr4::OSXSAVE) || self.state.xcr0 & (SSE | AVX) != SSE | AVX {
            VectorLevel::Sse
        } else if self.state.xcr0 & (OPMASK | ZMM_HI | HI16) != OPMASK | ZMM_HI | HI16 {
            VectorLevel::Avx
        } else {
            VectorLevel::Avx512
        }
    }

    /// What executes an operation at which a unit begins.
    #[inline(never)]
    fn choose_entry(&mut self, o: BlockOp<'_, Self>) -> ReplacedHandler<Self> {
        self.follow_killed();
        let Some(&point) = self.jit.entries.get(&o.id()) else {
            // Operations have this handler only while they are in the table.
            debug_assert!(false, "no unit begins here");
            self.jit.chosen = None;
            return ReplacedHandler::any(run_chosen);
        };
        if self.jit.left_at.take() == Some(o.id()) {
            return point.replaced;
        }
        let Some(unit) = point.unit_for(self.regs.get(Reg::BlockRip)) else {
            self.miss_entry(o);
            return point.replaced;
        };
        let Some(extra) = self.can_enter(unit) else {
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

    /// Counts that the code at an entry point runs at a RIP for which there is no unit, and makes one
    /// when that was often.
    #[cold]
    fn miss_entry(&mut self, o: BlockOp<'_, Self>) {
        let Some(point) = self.jit.entries.get_mut(&o.id()) else {
            return;
        };
        point.misses += 1;
        // Code that runs at many addresses, or that is modified again and again, is translated more
        // and more rarely.
        let often = self.hot_after.saturating_mul(1 << point.made.min(16));
        if point.misses < often {
            return;
        }
        point.misses = 0;
        // SAFETY: blocks are freed by `tidy_code` only, which clears the entry points.
        let first = unsafe { point.block.live() }.first_op();
        self.translate_hot(first);
    }

    /// Whether the next slice begins with the block of a unit for which the budget is too small.
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

    /// Runs a unit whose instructions were charged, and what it leads to.
    #[inline(never)]
    fn run_unit(&mut self, unit: UnitId) -> Next {
        self.prepare_tables(unit);
        let (branch_next, branch_due) = self.branches.entries();
        let mut state = EntryState {
            budget: self.progress.budget(),
            segment_base: [self.regs.get(Reg::FsBase), self.regs.get(Reg::GsBase)],
            callback_data: 0,
            branch_next,
            branch_due,
            end_stamp: self.progress.end_stamp(),
            vectors: 0,
            vectors_allowed: self.usable_vectors(),
            mxcsr: self.vec.mxcsr,
        };
        let core: *mut Self = self;
        state.callback_data = core.expose_provenance();
        // SAFETY: `core` is this processor; nothing else refers to it until it is borrowed again
        // below. The pages of the translator's TLB are those of `find_host`, which `prepare_tables`
        // keeps as long as the TLBs of the processor have them; the buffer has room up to the entry
        // at which branches are due.
        let left = unsafe {
            state.vectors = Vectors::address(&raw mut *(*core).vec);
            let Some(entry) = (*core).prepare_entry(unit, &state) else {
                return (*core).leave(ExitReason::Lookup);
            };
            let registers = Registers::general_address(&raw mut (*core).regs);
            entry.run(registers);
            (*core).left_unit(unit, &state)
        };
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

    /// Goes on with the block at a RIP, as a branch there does.
    fn go_to(&mut self, rip: u64) -> Next {
        let Some(entry) = self.code.jump(rip) else {
            self.regs.rip = rip;
            return self.leave(ExitReason::Lookup);
        };
        // SAFETY: it was read just now, and no handler frees blocks.
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

    fn prepare_entry(&mut self, unit: UnitId, state: &EntryState) -> Option<Entry> {
        let translator = self.jit.translator.as_mut()?;
        Some(translator.prepare(unit, state))
    }

    /// Follows the state in which translated code was left.
    fn left_unit(&mut self, unit: UnitId, entered: &EntryState) -> UnitExit {
        let Some(translator) = &mut self.jit.translator else {
            return UnitExit::Jump { rip: self.regs.rip };
        };
        let left = translator.left();
        let first = translator.unit(unit);
        let mut retired = entered.budget - left.budget + i64::from(first.charge_from_start());
        if let UnitExit::Instruction { unit, block, index } = left.exit {
            retired -= translator.unit(unit).rest_of_block(block, index);
        }
        debug_assert!(retired >= 0);
        self.jit.stats.retired = self.jit.stats.retired.wrapping_add_signed(retired);
        self.progress.set_budget(left.budget);
        self.regs.flags = flags_of(&left.flags, self.regs.flags);
        self.branches.added_up_to(left.branch_next);
        self.vec.mxcsr = left.mxcsr;
        left.exit
    }

    /// Makes sure that the TLB and the jump cache of translated code have nothing that those of the
    /// processor have forgotten.
    fn prepare_tables(&mut self, unit: UnitId) {
        let jit = &mut self.jit;
        let Some(translator) = &mut jit.translator else {
            return;
        };
        let rights = translator.unit(unit).rights;
        let epochs = (self.mmu.reads.epoch(), self.mmu.writes.epoch());
        if jit.tlb_epochs[rights as usize] != epochs {
            jit.tlb_epochs[rights as usize] = epochs;
            translator.flush_tlb(rights);
        }
        let context = self.code.context();
        if jit.contexts[rights as usize] != context {
            jit.contexts[rights as usize] = context;
            translator.flush_jumps(rights);
        }
        let rip = self.regs.get(Reg::BlockRip);
        if !self.debug.stops.has_breakpoint(rip) {
            translator.set_jump(unit);
        }
    }

    /// Has the interpreter go on at an instruction of a unit.
    fn leave_to_instruction(&mut self, unit: UnitId, block: usize, index: usize) -> Next {
        let compiled = &self.jit.compiled[unit.index()];
        let source = &compiled.blocks[block];
        let rip = self
            .jit
            .translator
            .as_ref()
            .map_or(0, |t| t.unit(unit).blocks[block].rip);
        // SAFETY: the block is in the cache, which no handler frees, and has this operation
        // (`Core::guest_block`).
        let op = unsafe { source.entry.live().first_op().at(source.ops[index]) };
        self.regs.set(Reg::BlockRip, rip);
        // If a unit begins there, the operation itself is executed.
        self.jit.left_at = Some(op.id());
        op.next()
    }

    /// Links an edge that leads to a RIP, if there is a unit.
    fn link_edge(&mut self, rip: u64, edge: EdgeId) {
        let Some(entry) = self.code.jump(rip) else {
            return;
        };
        // SAFETY: it was read just now, and blocks are not freed here.
        let first = unsafe { entry.live() }.first_op();
        let Some(point) = self.jit.entries.get(&first.id()) else {
            return;
        };
        let Some(unit) = point.unit_for(rip) else {
            return;
        };
        if first.count() == DEAD || self.jit.compiled[unit.index()].suspended {
            return;
        }
        if let Some(translator) = &mut self.jit.translator {
            translator.link(edge, unit);
        }
    }

    /// The host address for an access of translated code, whose page is entered into its TLB.
    fn find_host(&mut self, linear: u64, exit: u32) -> Option<u64> {
        let translator = self.jit.translator.as_ref()?;
        let (size, write) = translator.access(exit)?;
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
        translator.enter_page(rights, linear, page, write);
        Some(host)
    }
}
