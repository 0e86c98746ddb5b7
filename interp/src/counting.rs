//! Counts for the performance-monitoring unit.
//!
//! Determines how far the counters let the processor run, stores PEBS records, and collects the
//! accesses of each instruction if a model observes them.

use crate::core::Core;
use crate::fault::{ExitReason, Fault};
use crate::platform::AbortCause;
use crate::progress::SliceUse;
use hindsight_cpu::pmu::Ring;
use hindsight_cpu::pmu::pebs::{self, PebsSample};
use hindsight_cpu::uarch::CacheAccess;

impl Core {
    /// Begins a slice of at most `most` of the `rest` cycles of the run.
    ///
    /// The counters may shorten it.
    pub(crate) fn begin_slice(&mut self, rest: i64, most: i64) {
        let ring = Ring::of(self.mode.cpl());
        let allowed = self.counters.begin_slice(ring, self.regs.rip);
        let rest = rest.min(i64::try_from(allowed).unwrap_or(i64::MAX)).max(1);
        self.progress.begin_slice(rest, most);
    }

    /// Ends a slice: counts what it retired. Returns how many cycles it took.
    pub(crate) fn end_slice(&mut self) -> i64 {
        let SliceUse { cycles, retired } = self.progress.end_slice();
        self.counters.end_slice(retired);
        cycles
    }

    /// Queries the platform for how far the counters let the processor run.
    pub(crate) fn update_counting(&mut self) {
        let counting = self.platform().counting();
        let before = self.counters.counting();
        if (counting.cache_models, counting.fetches) != (before.cache_models, before.fetches) {
            self.jit.forget_lines();
        }
        if self.counters.set_counting(counting) {
            self.exit.requested = true;
            self.update_rights();
        }
    }

    /// Makes the platform handle counters that are due, and stores a PEBS record.
    ///
    /// Called at instruction boundaries.
    pub(crate) fn poll_counters(&mut self) {
        // Read the last branch first: reporting the branches empties their buffer.
        let last = self
            .counters
            .last_instruction()
            .or_else(|| self.last_branch());
        self.report_due_branches();
        if self.counters.counting().is_due() {
            self.report_branches();
            self.update_observe();
        }
        let lbr = self.counters.counting().record;
        if lbr.is_some_and(|due| due.records.has_lbr()) {
            // Another counter may be due after that.
            self.report_branches();
        }
        let Some(due) = self.counters.counting().record else {
            return;
        };
        // Storing a record aborts a transaction; the record then describes the abort.
        self.abort_if_open(AbortCause::Event);
        match (self.counters.take_abort(), last) {
            (Some(abort), _) => self.store_sample(&due, abort.xbegin, abort.information),
            (None, Some(eventing_rip)) => self.store_sample(&due, eventing_rip, 0),
            (None, None) => {}
        }
    }

    /// Returns RIP of the last recorded branch, if nothing retired after it.
    fn last_branch(&self) -> Option<u64> {
        let branch = self.branches.last()?;
        let retired = self.progress.retired_before_slice();
        let just_now = u64::from(branch.at) == retired & u64::from(u32::MAX);
        (just_now && branch.class.is_instruction()).then_some(branch.from)
    }

    fn store_sample(&mut self, due: &pebs::PebsDue, eventing_rip: u64, transaction: u64) {
        let lbr = if due.records.has_lbr() {
            self.report_branches();
            self.platform().pebs_lbr()
        } else {
            PebsSample::default().lbr
        };
        let sample = PebsSample {
            rflags: self.regs.rflags().bits(),
            rip: self.regs.rip,
            gpr: *self.regs.general(),
            long: self.mode.is_64bit(),
            eventing_rip,
            tsc: self.platform().tsc(),
            transaction,
            xmm: self.pebs_xmm(due),
            lbr,
        };
        let stored = pebs::store(self, due, &sample);
        self.platform().pebs_stored(&stored);
        self.update_observe();
    }

    /// Returns the XMM registers for a PEBS record, if it has them.
    fn pebs_xmm(&self, due: &pebs::PebsDue) -> [[u64; 2]; 16] {
        let mut xmm = [[0; 2]; 16];
        if due.records.has_xmm() {
            let count = if self.mode.is_64bit() { 16 } else { 8 };
            for (found, zmm) in xmm.iter_mut().zip(&self.vec.zmm).take(count) {
                let (words, _) = zmm.as_chunks::<8>();
                *found = [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])];
            }
        }
        xmm
    }

    /// Begins to collect the memory accesses of an instruction, if a model uses them.
    ///
    /// The instruction at the linear address was decoded without a fault.
    pub(crate) fn begin_accesses(&mut self, lin: u64) {
        if !self.counters.counts_accesses() {
            return;
        }
        self.counters.begin_accesses();
        if self.counters.counting().fetches
            && let Ok(gpa) = self.translate_code(lin)
            && self.counters.fetch_line(gpa)
        {
            self.record_touch(lin, gpa, 1, CacheAccess::Code);
        }
    }

    /// Ends collecting, and reports the accesses of the instruction.
    pub(crate) fn end_accesses(&mut self) {
        let retired = self.exit.reason != ExitReason::Fault;
        let between_iterations = self.exit.fault == Fault::BetweenIterations;
        let touches = self.counters.end_accesses(retired, between_iterations);
        if touches.is_empty() {
            return;
        }
        let ring = self.counters.ring();
        let accesses = self.counters.accesses(&touches, retired);
        let used = self.platform().accesses(ring, &accesses);
        self.jit.accessed(&touches);
        self.counters.spend_accesses(used, touches);
    }

    /// Records an access within a page, if accesses are collected.
    pub(crate) fn record_touch(&mut self, linear: u64, gpa: u64, len: usize, kind: CacheAccess) {
        if self.counters.collects() && len != 0 {
            let ram = self.memory.page(gpa).is_some();
            self.counters.push_touch(linear, gpa, len, kind, ram);
        }
    }

    /// Records a locked read-modify-write that was executed on host memory.
    pub(crate) fn record_locked(&mut self, lin: u64, len: usize) {
        if !self.counters.collects() {
            return;
        }
        self.counters.record_lock();
        if let Some(found) = self.mmu.writes.translation(lin, self.mmu.rights()) {
            self.record_touch(lin, found.gpa, len, CacheAccess::Load);
            self.record_touch(lin, found.gpa, len, CacheAccess::Store);
        }
    }
}
