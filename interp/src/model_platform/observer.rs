//! Passes what the interpreter reports of a guest to the models.

use hindsight_cpu::pmu::PmuNeeds;
use hindsight_cpu::pmu::pebs::{PebsLbr, PebsOutcome};
use hindsight_cpu::uarch::{AccessEvents, MemoryAccess};

use super::{InterruptController, ModelPlatform};
use crate::platform::{
    Accesses, Branch, BranchClass, Bus, Counting, Observe, Observer, Ring, SystemEvent,
    TransactionEvent,
};

impl<B: Bus, I: InterruptController> Observer for ModelPlatform<B, I> {
    fn observe(&mut self) -> Observe {
        self.msrs.observe()
    }

    fn branches(&mut self, _: u64, branches: &mut [Branch]) {
        if self.msrs.needs_predictor() {
            self.uarch.resolve(branches);
        }
        self.msrs.record_branches(branches);
        if self.msrs.pmu().needs().contains(PmuNeeds::BRANCHES) {
            self.totals.add_branches(branches);
            self.sync_counters();
        }
    }

    fn skip_branches(&mut self, count: u64) {
        self.msrs.skip_branches(count);
    }

    fn count_branches(&mut self, ring: Ring, class: BranchClass, count: u64) {
        self.totals.add_class(class, ring, count);
    }

    fn counted_branches(&mut self) {
        self.sync_counters();
    }

    fn debug_exception(&mut self) {
        self.msrs.debug_exception();
    }

    fn counting(&mut self) -> Counting {
        // The limits count from the counters' last update.
        if !self.msrs.pmu().needs().is_empty() {
            self.sync_counters();
        }
        let mut counting = self.msrs.engine_counting();
        let due_access = self.msrs.pmu().due_access();
        if let Some(due) = &mut counting.record {
            due.data = due_access.map(|access| self.uarch.data(access));
        }
        // An instruction is at least one cycle.
        let limits = self.msrs.pmu().limits();
        let cycles = limits.cycles.min(&limits.ticks);
        counting.instructions = counting.instructions.min(&cycles);
        counting
    }

    fn accesses(&mut self, ring: Ring, accesses: &Accesses<'_>) -> u64 {
        let requester = self.msrs.requester();
        let l3 = self.msrs.needs_cache_model().then_some(&mut self.l3);
        let events = AccessEvents {
            totals: &mut self.totals,
            ring,
            late_threshold: self.msrs.pmu().latency_threshold(),
        };
        let used = self.uarch.access(accesses, l3, &requester, events);
        let package = self.msrs.rdt().package();
        self.uarch
            .take_memory_traffic(|rmid| package.add_traffic(rmid.into(), 1));
        let delayed = self.uarch.take_delay_cycles();
        if delayed != 0 {
            self.ticks = self.ticks.wrapping_add(delayed);
            self.add_cycles(ring, delayed);
            self.report_time();
        }
        used
    }

    fn line_access(&mut self, ring: Ring, access: &MemoryAccess) {
        let requester = self.msrs.requester();
        let l3 = self.msrs.needs_cache_model().then_some(&mut self.l3);
        let events = AccessEvents {
            totals: &mut self.totals,
            ring,
            late_threshold: self.msrs.pmu().latency_threshold(),
        };
        self.uarch.access_line(access, l3, &requester, events);
        let package = self.msrs.rdt().package();
        self.uarch
            .take_memory_traffic(|rmid| package.add_traffic(rmid.into(), 1));
    }

    fn accesses_of_block(&mut self, ring: Ring, loads: u64, stores: u64) {
        let events = AccessEvents {
            totals: &mut self.totals,
            ring,
            late_threshold: self.msrs.pmu().latency_threshold(),
        };
        let cached = self.msrs.needs_cache_model();
        self.uarch.count_block(loads, stores, cached, events);
    }

    fn caches_flushed(&mut self, gpa: Option<u64>) {
        if self.uarch.caches_are_cold() {
            return;
        }
        match gpa {
            Some(gpa) => self.uarch.flush(&mut self.l3, gpa),
            None => {
                self.uarch.flush_all();
                self.l3.clear(|_| ());
            }
        }
    }

    fn pebs_lbr(&mut self) -> PebsLbr {
        self.msrs.pebs_lbr()
    }

    fn pebs_stored(&mut self, stored: &PebsOutcome) {
        if self.msrs.pebs_record_done(stored) {
            self.interrupts.request_pmi();
        }
    }

    fn request_pmi(&mut self) {
        self.sync_counters();
        self.msrs.bts_requests_pmi();
        self.interrupts.request_pmi();
    }

    fn allows_transactions(&self) -> bool {
        true
    }

    fn transaction(&mut self, event: TransactionEvent, ring: Ring) {
        let counting = !self.msrs.pmu().needs().is_empty();
        if counting {
            self.sync_counters();
        }
        self.msrs.transaction(event);
        self.totals.add_transaction_event(event, ring);
        if counting {
            self.sync_counters();
        }
    }

    fn system_event(&mut self, _: SystemEvent) {}
}
