//! The performance-monitoring unit and resource control among the other models: what they take from
//! IA32_DEBUGCTL, what they do to branch recording, and what they need from an engine.

use hindsight_regs::rdt;
use hindsight_regs::vector::GpFault;

use super::Msrs;
use crate::branch::Observe;
use crate::facility::Facilities;
use crate::pmu::pebs::{PebsDue, PebsLbr, PebsOutcome};
use crate::pmu::{EngineCounting, EventTotals, PmiFreeze, Pmu, PmuNeeds};
use crate::transaction::TransactionEvent;
use crate::uarch::{CacheGeometry, Requester};

impl Msrs {
    /// The performance-monitoring unit, as of the last [`Msrs::sync_counters`].
    pub const fn pmu(&self) -> &Pmu {
        &self.pmu
    }

    /// Advances the counters to `totals`. Returns whether they request a PMI.
    ///
    /// Needed before an access to a row with [`super::UpdateBefore::Counters`], and where
    /// [`Msrs::engine_counting`] says.
    #[must_use]
    pub fn sync_counters(&mut self, totals: &EventTotals) -> bool {
        let freeze = self.freeze();
        let pmi = self.pmu.sync(totals, freeze);
        self.freeze_lbrs(pmi, freeze);
        pmi
    }

    /// Whether a model depends on which branches are mispredicted.
    pub fn needs_predictor(&self) -> bool {
        self.config.uarch
            && (self.branch.records() || self.pmu.needs().contains(PmuNeeds::PREDICTOR))
    }

    /// Whether a model depends on hits and misses of the caches.
    pub fn needs_cache_model(&self) -> bool {
        self.pmu.needs().contains(PmuNeeds::CACHES) || self.charges_rmids()
    }

    /// Whether cache lines are charged to RMIDs, and fills restricted by capacity masks.
    pub fn charges_rmids(&self) -> bool {
        self.config.uarch && self.rdt.is_armed()
    }

    /// The RMID, capacity masks and delay of this processor's memory accesses.
    ///
    /// One bit of an L2 capacity mask stands for two ways of the L2.
    pub fn requester(&self) -> Requester {
        if !self.charges_rmids() {
            return Requester::default();
        }
        let class = self.rdt.class();
        let narrow = |mask: u64| u32::try_from(mask).unwrap_or(u32::MAX);
        let l2_ways = |mask: u64| match mask {
            0 => CacheGeometry::L2.all_ways(),
            mask => (0..rdt::L2_MASK_BITS)
                .filter(|bit| mask >> bit & 1 != 0)
                .fold(0, |ways, bit| ways | 0b11 << (2 * bit)),
        };
        Requester {
            rmid: u16::try_from(class.rmid).unwrap_or(0),
            l3_data_ways: narrow(class.l3_data),
            l3_code_ways: narrow(class.l3_code),
            l2_data_ways: l2_ways(class.l2_data),
            l2_code_ways: l2_ways(class.l2_code),
            delay: class.delay,
        }
    }

    /// The RMID whose occupancy IA32_QM_CTR shows next; `None` if it shows no occupancy.
    pub fn monitored_rmid(&self) -> Option<u16> {
        let rmid = self.rdt.monitored_rmid()?;
        u16::try_from(rmid).ok().filter(|_| self.charges_rmids())
    }

    /// Sets the number of L3 lines of the [`Msrs::monitored_rmid`].
    ///
    /// Needed before an access to a row with [`super::UpdateBefore::CacheOccupancy`].
    pub const fn set_occupied_lines(&mut self, lines: u64) {
        self.rdt.set_occupied_lines(lines);
    }

    /// Reports to the package whether a cache model counts occupancy and traffic.
    pub(super) fn update_cache_tracking(&self) {
        self.rdt.package().set_tracked(self.charges_rmids());
    }

    /// What an engine that executes one instruction after another does for the counters.
    ///
    /// Cycles, and the data of a PEBS record, are the caller's.
    pub fn engine_counting(&self) -> EngineCounting {
        let limits = self.pmu.limits();
        let needs = self.pmu.needs();
        let accesses = needs.contains(PmuNeeds::ACCESSES) || self.needs_cache_model();
        // PEBS is off in system-management mode (rule PEBS-25).
        let record = (self.pmu.due() != 0 && self.suspended.is_none()).then(|| PebsDue {
            area: self.branch.ds_area(),
            counters: self.pmu.due(),
            status: self.pmu.status(),
            records: self.pmu.due_records(),
            data: None,
        });
        EngineCounting {
            instructions: limits.instructions,
            last_alone: limits.last_alone,
            accesses: accesses.then_some(limits.accesses),
            fetches: self.needs_cache_model(),
            cache_models: self.needs_cache_model().into(),
            // A delayed request moves the clock at once.
            batches: record.is_none() && self.requester().delay == 0,
            record,
        }
    }

    /// Adds the branches that counters count to those that branch recording needs.
    pub(super) fn add_counted_branches(&self, observe: Observe) -> Observe {
        let needs = self.pmu.needs();
        // A predictor also learns from branches that are not taken.
        let observe = Observe {
            not_taken: observe.not_taken || self.needs_predictor(),
            newest: if self.needs_predictor() {
                0
            } else {
                observe.newest
            },
            ..observe
        };
        if !needs.contains(PmuNeeds::BRANCHES) {
            return observe;
        }
        let least = match self.pmu.limits().branches.least() {
            u64::MAX => 0,
            least => u32::try_from(least).unwrap_or(u32::MAX),
        };
        Observe {
            branches: true,
            newest: 0,
            counted: !observe.branches && !self.needs_predictor() && observe.bts.is_none(),
            not_taken: observe.not_taken || needs.contains(PmuNeeds::NOT_TAKEN),
            every: match (observe.every, least) {
                (0, every) | (every, 0) => every,
                (one, other) => one.min(other),
            },
            ..observe
        }
    }

    /// Begins or ends a transaction; counters and branches are up to date.
    pub fn transaction(&mut self, event: TransactionEvent) {
        self.branch
            .set_in_transaction(event == TransactionEvent::Begun);
        self.pmu.transaction(event);
    }

    /// The entries of the LBR stack for a PEBS record; all branches are up to date.
    pub fn pebs_lbr(&self) -> PebsLbr {
        self.branch.newest_first()
    }

    /// Completes a PEBS record that was stored or dropped. Returns whether it requests a PMI.
    #[must_use]
    pub fn pebs_record_done(&mut self, outcome: &PebsOutcome) -> bool {
        let freeze = self.freeze();
        let pmi = self.pmu.record_done(outcome, freeze);
        self.freeze_lbrs(pmi, freeze);
        pmi
    }

    /// Freezes what IA32_DEBUGCTL says when branch trace store requests a PMI (rules FRZ-01,
    /// BTS-12).
    pub fn bts_requests_pmi(&mut self) {
        let freeze = self.freeze();
        self.pmu.freeze(freeze);
        self.freeze_lbrs(true, freeze);
    }

    /// RDPMC. SDM Vol. 2B, "RDPMC—Read Performance-Monitoring Counters".
    ///
    /// # Errors
    ///
    /// [`GpFault`] for a counter that does not exist. The engine checks the privilege level.
    pub fn rdpmc(&self, index: u32) -> Result<u64, GpFault> {
        if !self.config.facilities.contains(Facilities::PMU) {
            return Err(GpFault);
        }
        self.pmu.rdpmc(index)
    }

    /// What a request for a PMI freezes, as IA32_DEBUGCTL says.
    fn freeze(&self) -> PmiFreeze {
        PmiFreeze::from_debugctl(self.branch.debugctl())
    }

    /// Stops the LBR stack if a PMI was requested and freezes it.
    ///
    /// From perfmon version 4 on a status bit does, before it the processor clears
    /// IA32_DEBUGCTL.LBR. SDM Vol. 3B, "Freezing LBR and Performance Counters on PMI".
    fn freeze_lbrs(&mut self, pmi: bool, freeze: PmiFreeze) {
        self.update_lbr_freeze();
        if pmi && freeze.lbrs && !self.pmu.freezes_by_status() {
            self.branch.clear_lbr();
        }
    }

    /// Stops or restarts the LBR stack as IA32_PERF_GLOBAL_STATUS.LBR_FRZ says.
    pub(super) const fn update_lbr_freeze(&mut self) {
        self.branch.set_frozen(self.pmu.lbrs_frozen());
    }
}
