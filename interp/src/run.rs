//! The run loop: slices, dispatch, exact stepping.

#![expect(
    unsafe_code,
    reason = "cached entries are turned into live blocks, and blocks are freed"
)]

use crate::boundary::RunResult;
use crate::code::{BlockEntry, DEAD, LiveBlock};
use crate::core::Core;
use crate::events::{GuestEvent, Shutdown};
use crate::fault::{ExitReason, Fault, SoftwareInterruptKind};
use crate::interpreter::{Exit, Kicker};
use crate::registers::Reg;
use hindsight_regs::dr::Dr6;
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

/// Maximum cycles of a slice: pending interrupts are polled between slices.
const SLICE: i64 = 16_384;

/// Number of slices without a retired instruction after which a run ends.
const STUCK: u32 = 1000;

impl Core {
    /// Executes one instruction, or delivers one event.
    pub(crate) fn step(&mut self) -> Exit {
        self.step_inner()
            .unwrap_or_else(|Shutdown| self.shut_down())
    }

    fn step_inner(&mut self) -> Result<Exit, Shutdown> {
        self.follow_code_changes();
        self.update_observe();
        self.debug.stops.take_hit();
        let before = self.debug.stops.deliveries();
        if let Some(e) = self.state.events.exception.take() {
            self.deliver_saved(e)?;
            return Ok(self.take_stop().unwrap_or(Exit::Stepped));
        }
        if let Some(exit) = self.boundary()? {
            return Ok(exit);
        }
        if self.debug.stops.deliveries() != before {
            return Ok(self.take_stop().unwrap_or(Exit::Stepped));
        }
        self.follow_transactions();
        self.begin_slice(1, 1);
        let outcome = self.step_instruction();
        self.end_slice();
        let exit = outcome?;
        if self.debug.pending_trap().is_some() && self.debug.stops.hit().is_none() {
            self.deliver_trap()?;
        }
        Ok(match exit {
            Some(exit) => exit,
            None => self.take_stop().unwrap_or(Exit::Stepped),
        })
    }

    /// Runs until an exit is due, for at most `budget` cycles.
    pub(crate) fn run(&mut self, kicker: &Kicker, budget: u64) -> Exit {
        self.run_inner(kicker, budget)
            .unwrap_or_else(|Shutdown| self.shut_down())
    }

    fn run_inner(&mut self, kicker: &Kicker, budget: u64) -> Result<Exit, Shutdown> {
        self.follow_code_changes();
        self.update_observe();
        self.debug.stops.take_hit();
        if let Some(e) = self.state.events.exception.take() {
            self.deliver_saved(e)?;
        }
        let mut stuck = 0;
        let mut rest = i64::try_from(budget).unwrap_or(i64::MAX);
        loop {
            if kicker.take() {
                return Ok(Exit::Kicked);
            }
            self.follow_code_changes();
            if let Some(exit) = self.boundary()? {
                return Ok(exit);
            }
            if let Some(exit) = self.take_stop() {
                return Ok(exit);
            }
            if rest <= 0 {
                return Ok(Exit::Budget);
            }
            self.follow_transactions();
            self.begin_slice(rest, SLICE);
            let delivered = self.debug.stops.deliveries();
            let outcome = self.slice();
            let used = self.end_slice();
            debug_assert!(used >= 0);
            rest -= used;
            stuck = if used == 0 { stuck + 1 } else { 0 };
            if stuck > STUCK {
                return Ok(Exit::Leave);
            }
            if let Some(exit) = outcome? {
                return Ok(exit);
            }
            if let Some(exit) = self.take_stop() {
                return Ok(exit);
            }
            let delivered = self.debug.stops.deliveries() != delivered;
            if self.debug.stops.at_exceptions && used == 0 && delivered {
                return Ok(Exit::Stepped);
            }
        }
    }

    /// Runs until the budget of the slice is used up or a boundary must be handled.
    fn slice(&mut self) -> RunResult {
        // An event since the last block has changed RIP, so the pending branch does not lead here.
        self.code.clear_pending_link();
        while self.progress.has_budget() {
            if self.debug.stops.has_breakpoints() {
                let lin = self.code_lin(self.regs.rip);
                if self.debug.stops.has_breakpoint(lin) {
                    self.debug.stops.record_breakpoint(lin);
                    return Ok(None);
                }
            }
            if self.needs_exact() {
                if !self.run_counting_unit() {
                    return self.step_instruction();
                }
                match self.exit.reason {
                    ExitReason::Lookup | ExitReason::Budget => continue,
                    ExitReason::Poll => self.finish_instruction(false),
                    _ => {}
                }
                return Ok(None);
            }
            let entry = match self.find_jump() {
                Some(entry) => entry,
                None => match self.find_block(false) {
                    Ok(entry) => entry,
                    Err(fault) => return self.handle_fault(fault),
                },
            };
            // SAFETY: it was found just now, and `block` is not used after the next `find_block`.
            let block = unsafe { entry.live() };
            let count = block.count();
            if !self.progress.covers(count) {
                if self.progress.next_slice_covers(count) {
                    return Ok(None);
                }
                // The budget ends within the block.
                let outcome = self.step_instruction()?;
                if outcome.is_some()
                    || !matches!(self.exit.reason, ExitReason::Lookup | ExitReason::Budget)
                {
                    return Ok(outcome);
                }
                continue;
            }
            self.dispatch(block);
            match self.exit.reason {
                ExitReason::Lookup | ExitReason::Budget => {}
                ExitReason::SliceEnd => return Ok(None),
                ExitReason::Poll => {
                    self.finish_instruction(false);
                    return Ok(None);
                }
                ExitReason::Fault => return self.handle_fault(self.exit.fault),
                ExitReason::SoftwareInterrupt(vector, kind) => {
                    self.deliver(Self::software_event(vector, kind))?;
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    /// Executes exactly one instruction, with the events before and after it.
    fn step_instruction(&mut self) -> RunResult {
        self.exit.reason = ExitReason::Lookup;
        let lin = self.code_lin(self.regs.rip);
        if !self.regs.flag(Rflags::RF) && !self.state.events.mov_ss_shadow {
            let bits = self.exec_breakpoints_at(lin);
            if bits != 0 {
                self.exit.reason = ExitReason::Poll;
                return self.deliver_exec_breakpoint(bits).map(|()| None);
            }
        }
        if self.has_virtual_interrupt() {
            return self.handle_fault(Fault::GP);
        }
        let entry = match self.find_block(true) {
            Ok(entry) => entry,
            Err(fault) => return self.handle_fault(fault),
        };
        // SAFETY: it was found just now, and `block` is not used after the next `find_block`.
        let block = unsafe { entry.live() };
        let had_ss_shadow = self.state.events.mov_ss_shadow;
        // The values of TF and BTF at the start of the instruction apply (rule BTF-12).
        let tf = self.regs.flag(Rflags::TF);
        let on_branch = self.branches.observe().step_on_branch;
        let taken = self.branches.taken();
        self.state.events.mov_ss_shadow = false;
        self.state.events.sti_shadow = false;
        self.debug.suppress_step = false;
        self.regs.set_flag(Rflags::RF, false);
        self.begin_accesses(lin);
        self.dispatch_isolated(block);
        self.end_accesses();
        if had_ss_shadow {
            // The second of two consecutive loads of SS causes no shadow.
            self.state.events.mov_ss_shadow = false;
        }
        match self.exit.reason {
            ExitReason::Fault => self.handle_fault(self.exit.fault),
            ExitReason::SoftwareInterrupt(vector, kind) => {
                self.deliver_stepped_interrupt(vector, kind).map(|()| None)
            }
            ExitReason::Lookup | ExitReason::Budget | ExitReason::SliceEnd | ExitReason::Poll => {
                let branched = self.branches.taken() != taken;
                let step = tf && !self.debug.suppress_step && (!on_branch || branched);
                self.finish_instruction(step);
                if step || self.debug.pending_trap().is_some() {
                    self.exit.reason = ExitReason::Poll;
                }
                Ok(None)
            }
        }
    }

    /// Delivers the #DB of instruction breakpoints, as bits of DR6, before their instruction.
    fn deliver_exec_breakpoint(&mut self, bits: u64) -> Result<(), Shutdown> {
        if self.in_transaction() {
            return self.debug_in_transaction(bits);
        }
        self.report_debug_conditions(bits);
        self.deliver(GuestEvent::exception(Vector::DB))
    }

    /// Delivers a software interrupt that was executed alone.
    fn deliver_stepped_interrupt(
        &mut self,
        vector: Vector,
        kind: SoftwareInterruptKind,
    ) -> Result<(), Shutdown> {
        let mut deferred = std::mem::take(&mut self.state.events.deferred_db);
        if kind == SoftwareInterruptKind::Int1 && deferred != 0 {
            // This #DB also reports the conditions that a load of SS has deferred.
            self.report_debug_conditions(std::mem::take(&mut deferred));
        }
        self.deliver(Self::software_event(vector, kind))?;
        if deferred != 0 {
            self.debug.raise_trap(deferred);
        }
        Ok(())
    }

    /// Executes a block and its successors while the budget lasts.
    fn dispatch(&mut self, block: LiveBlock<'_, Self>) {
        let taken = self.progress.take(block.count());
        debug_assert!(taken, "the budget covers the block");
        self.exit.requested = false;
        debug_assert_eq!(self.regs.rip & !self.mode.ip_mask(), 0, "RIP is masked");
        self.regs.set(Reg::BlockRip, self.regs.rip);
        let runs = block.count_run();
        if runs == self.hot_after {
            self.translate_hot(block.first_op());
        }
        block.dispatch(self);
    }

    /// Executes a block of one instruction, and no block after it.
    fn dispatch_isolated(&mut self, block: LiveBlock<'_, Self>) {
        let isolated = self.progress.isolate_instruction();
        self.dispatch(block);
        self.progress.rejoin(isolated);
        if matches!(self.exit.reason, ExitReason::Lookup | ExitReason::Budget) {
            self.code.clear_pending_link();
        }
    }

    /// Delivers a fault, or turns it into an exit.
    fn handle_fault(&mut self, fault: Fault) -> RunResult {
        self.exit.requested = false;
        self.exit.reason = ExitReason::Poll;
        if self.in_transaction() && fault != Fault::BetweenIterations {
            return self.fault_in_transaction(fault).map(|()| None);
        }
        match fault {
            Fault::Unimplemented => return Ok(Some(self.unimplemented())),
            Fault::Shutdown => return Err(Shutdown),
            Fault::BetweenIterations => {
                // The instruction did not retire: it continues after the pending events were
                // handled.
                self.regs.set_flag(Rflags::RF, true);
                // An iteration is not a branch (rule BTF-11).
                let on_branch = self.branches.observe().step_on_branch;
                let step = self.regs.flag(Rflags::TF) && !on_branch;
                self.finish_instruction(step);
                return Ok(None);
            }
            _ => {}
        }
        self.debug.take_hits();
        self.debug.stops.take_hit();
        self.state.events.deferred_db = 0;
        if fault == Fault::Frozen {
            self.freeze();
            return Ok(None);
        }
        self.deliver_fault(fault)?;
        Ok(None)
    }

    /// Finishes a complete instruction or iteration.
    ///
    /// `step` says that a single-step trap follows it.
    fn finish_instruction(&mut self, step: bool) {
        let step = if step { Dr6::BS.bits() } else { 0 };
        let events = &mut self.state.events;
        if events.mov_ss_shadow {
            events.deferred_db |= self.debug.take_deferred(step);
        } else {
            let deferred = std::mem::take(&mut events.deferred_db);
            self.debug.finish_instruction(step, deferred);
        }
    }

    fn unimplemented(&mut self) -> Exit {
        let mut bytes = [0; 15];
        let lin = self.code_lin(self.regs.rip);
        if let Ok(gpa) = self.translate_code(lin) {
            let len = Self::page_rest(lin).min(15);
            self.get_phys(gpa, &mut bytes[..len]);
            self.exit.requested = false;
        }
        Exit::Missing {
            bytes,
            rip: self.regs.rip,
        }
    }

    /// Returns the block at RIP, if the jump cache has it.
    pub(crate) fn find_jump(&mut self) -> Option<BlockEntry<Self>> {
        let entry = self.code.jump(self.regs.rip)?;
        // SAFETY: the entry was just read from the cache; only the count of the block is read.
        if unsafe { entry.live() }.count() == DEAD {
            return None;
        }
        self.code.link_pending(entry);
        Some(entry)
    }

    /// Returns the block at RIP, from the cache or newly decoded.
    ///
    /// With `exact` it is a block of one instruction.
    pub(crate) fn find_block(&mut self, exact: bool) -> Result<BlockEntry<Self>, Fault> {
        let rip = self.regs.rip;
        self.code.count_lookup();
        // SAFETY: the run loop uses no block that it found earlier, and no handler runs.
        unsafe { self.tidy_code() };
        let lin = self.code_lin(rip);
        if !self.mode.is_64bit() && rip > self.cs().limit.into() {
            self.code.clear_pending_link();
            return Err(Fault::GP);
        }
        let found = self.find_or_decode(rip, lin, exact);
        if exact || found.is_err() {
            self.code.clear_pending_link();
        }
        let entry = found?;
        if !exact {
            let split = self.debug.stops.has_breakpoint(lin);
            if !self.is_code_limited() && !split {
                self.code.set_jump(rip, entry);
            }
            if split {
                self.code.clear_pending_link();
            } else {
                self.code.link_pending(entry);
            }
        }
        Ok(entry)
    }

    fn find_or_decode(
        &mut self,
        rip: u64,
        lin: u64,
        exact: bool,
    ) -> Result<BlockEntry<Self>, Fault> {
        let gpa = self.translate_code(lin)?;
        let (key, linear_page) = self.block_key_at(lin, exact);
        let memory = &self.memory;
        let known = self
            .code
            .find(gpa, key, |gpa, bytes| memory.read(gpa, bytes))
            .filter(|block| block.linear_page == linear_page)
            .map(|block| (block.entry(), block.second_page, block.len));
        if let Some((entry, second_page, len)) = known {
            let end = rip.wrapping_add(u64::from(len) - 1);
            let within = self.mode.is_64bit() || end <= self.cs().limit.into();
            let same = match second_page {
                None => true,
                Some(page) => {
                    let next = lin.wrapping_add(Self::page_rest(lin) as u64);
                    self.translate_code(next & self.mode.ip_mask())? == page
                }
            };
            if within && same {
                return Ok(entry);
            }
        }
        self.decode(rip, gpa, exact)
    }
}
