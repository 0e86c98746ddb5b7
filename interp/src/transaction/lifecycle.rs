//! The beginning and the end of transactions, and their memory accesses.

use super::shared::AccessAbort;
use super::state::NOT_ALLOWED;
use crate::core::Core;
use crate::counters::AbortRecord;
use crate::events::{GuestEvent, Shutdown};
use crate::fault::Fault;
use crate::platform::BranchClass;
use crate::platform::{AbortCause, TransactionEvent};
use crate::registers::Reg;
use hindsight_cpu::pmu::Ring;
use hindsight_regs::dr::Dr7;
use hindsight_regs::vector::Vector;
use std::sync::Arc;

impl From<AccessAbort> for Fault {
    fn from(loss: AccessAbort) -> Self {
        Self::Abort(match loss {
            AccessAbort::Conflict => AbortCause::Conflict,
            AccessAbort::Writes => AbortCause::Writes,
            AccessAbort::Reads => AbortCause::Reads,
        })
    }
}

impl Core {
    /// Whether a transaction is open.
    pub(crate) fn in_transaction(&self) -> bool {
        self.transaction.is_open()
    }

    /// Updates whether memory accesses must be checked for conflicts.
    ///
    /// Called before guest code runs.
    pub(crate) fn follow_transactions(&mut self) {
        let checks_conflicts = self.transaction.access_state.run(&self.memory.shared);
        if checks_conflicts != self.checks_conflicts {
            self.checks_conflicts = checks_conflicts;
            self.update_rights();
        }
    }

    /// Ends a run of the guest, and aborts its transaction: none stays open between runs.
    pub(crate) fn end_run(&mut self) {
        self.abort_if_open(AbortCause::Event);
        self.transaction.access_state.leave();
    }

    /// XBEGIN at `rip`, where `next` is the RIP after it.
    pub(crate) fn begin_transaction(
        &mut self,
        rip: u64,
        next: u64,
        fallback: u64,
    ) -> Result<(), Fault> {
        let outermost = self.transaction.nest()?;
        self.regs.rip = next;
        if !outermost {
            return Ok(());
        }
        let saved = &mut *self.transaction.saved;
        saved.gpr.copy_from_slice(self.regs.general());
        saved.vec.clone_from(&*self.vec);
        (saved.rip, saved.fallback) = (rip, fallback);
        (saved.rflags, saved.cycles) = (self.regs.rflags(), self.progress.cycles());
        self.report_branches();
        let ring = Ring::of(self.mode.cpl());
        self.platform().transaction(TransactionEvent::Begun, ring);
        // BTS records are stored in memory at once, and an abort cannot undo them.
        let possible =
            self.platform().allows_transactions() && self.branches.observe().bts.is_none();
        if possible && self.memory.shared.begin(&self.transaction.access_state) {
            self.update_in_transaction();
            return Ok(());
        }
        self.regs.rip = rip;
        self.abort(if possible {
            AbortCause::Event
        } else {
            AbortCause::Instruction
        });
        Ok(())
    }

    /// XEND.
    pub(crate) fn end_transaction(&mut self) -> Result<(), Fault> {
        if self.transaction.unnest() {
            return Ok(());
        }
        let memory = Arc::clone(self.memory.shared_memory());
        let access_state = Arc::clone(&self.transaction.access_state);
        memory
            .shared
            .commit(&access_state, |gpa, data| self.put_phys(gpa, data))?;
        self.transaction.close();
        self.finish_transaction(TransactionEvent::Committed);
        Ok(())
    }

    /// Aborts the transaction, if one is open.
    pub(crate) fn abort_if_open(&mut self, cause: AbortCause) {
        if self.in_transaction() {
            self.abort(cause);
        }
    }

    /// Aborts the transaction if it has lost a conflict. Called at instruction boundaries.
    pub(crate) fn poll_transaction(&mut self) {
        if self.in_transaction() && self.memory.shared.is_lost(&self.transaction.access_state) {
            self.abort(AbortCause::Conflict);
        }
    }

    /// Handles a fault of an instruction in the transaction.
    pub(crate) fn fault_in_transaction(&mut self, fault: Fault) -> Result<(), Shutdown> {
        self.debug.stops.take_hit();
        match fault {
            Fault::Debug(bits) => return self.debug_in_transaction(bits),
            Fault::Abort(AbortCause::Debug) => return self.debug_in_transaction(0),
            Fault::Abort(cause) => self.abort(cause),
            _ => self.abort(AbortCause::Instruction),
        }
        Ok(())
    }

    /// Handles a debug condition in the transaction: the DR6 bits of a #DB, or 0 for a #BP.
    pub(crate) fn debug_in_transaction(&mut self, bits: u64) -> Result<(), Shutdown> {
        let advanced =
            self.state.dr7 & Dr7::RTM != 0 && self.branches.observe().debugs_transactions;
        if !advanced {
            self.abort(AbortCause::Debug);
            return Ok(());
        }
        self.report_branches();
        self.roll_back();
        self.finish_transaction(TransactionEvent::Aborted(AbortCause::Debug));
        self.report_debug_conditions(bits);
        self.transaction.set_debugged();
        self.deliver(GuestEvent::exception(Vector::DB))
    }

    /// Whether the #DB to deliver interrupted a transaction. Resets that.
    pub(crate) fn take_transaction_debugged(&mut self) -> bool {
        self.transaction.take_debugged()
    }

    /// Rolls the transaction back, and continues at its fallback address.
    fn abort(&mut self, cause: AbortCause) {
        debug_assert!(self.in_transaction());
        let saved = &self.transaction.saved;
        let cycles = self.progress.cycles().wrapping_sub(saved.cycles);
        self.counters.record_abort(AbortRecord {
            xbegin: saved.rip,
            information: cause.pebs_information(cycles),
        });
        let nested = self.transaction.is_nested();
        let from = self.branch_source(self.regs.rip);
        self.roll_back();
        self.regs.write(Reg::Rax, cause.status(nested));
        self.regs.rip = self.transaction.saved.fallback;
        self.record_far(from, self.regs.rip, BranchClass::Abort);
        self.report_branches();
        self.finish_transaction(TransactionEvent::Aborted(cause));
    }

    /// Restores the state before the outermost XBEGIN.
    fn roll_back(&mut self) {
        self.memory.shared.end(&self.transaction.access_state);
        self.transaction.close();
        let saved = &*self.transaction.saved;
        self.regs.general_mut().copy_from_slice(&saved.gpr);
        self.regs.rip = saved.rip;
        self.regs.set_rflags(saved.rflags);
        (*self.vec).clone_from(&saved.vec);
        self.debug.clear();
        self.state.events.deferred_db = 0;
    }

    /// Reports that the transaction has ended.
    fn finish_transaction(&mut self, event: TransactionEvent) {
        debug_assert!(!self.in_transaction());
        self.report_branches();
        let ring = Ring::of(self.mode.cpl());
        self.platform().transaction(event, ring);
        self.update_in_transaction();
    }

    /// Updates the state that depends on [`Core::in_transaction`].
    fn update_in_transaction(&mut self) {
        self.update_observe();
        self.follow_transactions();
        self.update_rights();
        self.update_context();
    }

    /// Discards the transaction, because the state of the processor is replaced.
    pub(crate) fn drop_transaction(&mut self) {
        self.memory.shared.end(&self.transaction.access_state);
        self.transaction.close();
        self.transaction.take_debugged();
    }
}

/// Accesses to memory.
impl Core {
    /// Loads bytes within a page in a transaction.
    pub(crate) fn load_in_transaction(&mut self, gpa: u64, data: &mut [u8]) -> Result<(), Fault> {
        if data.is_empty() {
            return Ok(());
        }
        let memory = &self.memory;
        if memory.page(gpa).is_none() {
            return Err(NOT_ALLOWED);
        }
        memory
            .shared
            .read(&self.transaction.access_state, gpa, data, |data| {
                memory.read(gpa, data);
            })?;
        Ok(())
    }

    /// Stores bytes within a page in a transaction.
    pub(crate) fn store_in_transaction(&mut self, gpa: u64, data: &[u8]) -> Result<(), Fault> {
        if data.is_empty() {
            return Ok(());
        }
        let page = self.memory.page(gpa).filter(|page| page.writable);
        let page = page.ok_or(NOT_ALLOWED)?;
        // The bytes are code that was decoded, perhaps in this transaction.
        if page.code_marks() != 0 && self.code.covers(gpa, data.len()) == Some(true) {
            return Err(NOT_ALLOWED);
        }
        self.memory
            .shared
            .write(&self.transaction.access_state, gpa, data)?;
        Ok(())
    }

    /// Checks a fetch of code: it aborts if the transaction has written the code.
    pub(crate) fn fetch_in_transaction(&self, gpa: u64, len: usize) -> Result<(), Fault> {
        let access_state = &self.transaction.access_state;
        if self.in_transaction() && self.memory.shared.wrote(access_state, gpa, len) {
            return Err(NOT_ALLOWED);
        }
        Ok(())
    }
}
