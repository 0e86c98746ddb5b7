//! The performance-monitoring unit among the other models: what it takes from IA32_DEBUGCTL, and
//! what it does to branch recording.

use hindsight_regs::rdt;

use super::Msrs;
use crate::branch::Observe;
use crate::facility::Facilities;
use crate::pmu::pebs::{Due, Stored};
use crate::pmu::{Counting, EventTotals, Freeze, Needs, Pmu};
use crate::transaction::Step;
use crate::uarch::{Geometry, Who};

impl Msrs {
    /// The performance-monitoring unit, as of the last [`Msrs::count`].
    pub const fn pmu(&self) -> &Pmu {
        &self.pmu
    }

    /// Moves the counters up to `totals`: before an access to a register of the unit or to
    /// IA32_DEBUGCTL, and where [`Msrs::counting`] says. Answers whether a performance-monitoring
    /// interrupt is requested.
    #[must_use]
    pub fn count(&mut self, totals: &EventTotals) -> bool {
        let pmi = self.pmu.sync(totals, self.freeze());
        self.follow_freeze();
        pmi
    }

    /// Somebody wants to know which branches were mispredicted.
    pub fn wants_predictor(&self) -> bool {
        self.config.models && (self.branch.records() || self.pmu.needs().contains(Needs::PREDICTOR))
    }

    /// Somebody wants to know what the caches do.
    pub fn wants_caches(&self) -> bool {
        self.pmu.needs().contains(Needs::CACHES) || self.charges()
    }

    /// What the caches do is charged to RMIDs, and kept to capacity masks.
    pub fn charges(&self) -> bool {
        self.config.models && self.rdt.is_armed()
    }

    /// On whose behalf the processor accesses memory. A mask of the second level has a bit for two ways.
    pub fn who(&self) -> Who {
        const SECOND: u32 = rdt::L2_MASK_BITS;
        if !self.charges() {
            return Who::default();
        }
        let class = self.rdt.class();
        let narrow = |mask: u64| u32::try_from(mask).unwrap_or(u32::MAX);
        let second = |mask: u64| match mask {
            0 => Geometry::L2.all_ways(),
            mask => (0..SECOND)
                .filter(|bit| mask >> bit & 1 != 0)
                .fold(0, |ways, bit| ways | 0b11 << (2 * bit)),
        };
        Who {
            rmid: u16::try_from(class.rmid).unwrap_or(0),
            data: narrow(class.l3_data),
            code: narrow(class.l3_code),
            second_data: second(class.l2_data),
            second_code: second(class.l2_code),
            delay: class.delay,
        }
    }

    /// The RMID whose occupancy IA32_QM_CTR shows next, if it shows one.
    pub fn monitored(&self) -> Option<u16> {
        let rmid = self.rdt.monitored()?;
        u16::try_from(rmid).ok().filter(|_| self.charges())
    }

    /// How many lines of the last level the [`Msrs::monitored`] RMID has.
    pub const fn set_occupied(&mut self, lines: u64) {
        self.rdt.set_occupied(lines);
    }

    /// Use of resource control may have begun or ended.
    pub(super) fn follow_use(&self) {
        self.rdt.package().set_warm(self.charges());
    }

    /// What an engine that executes instruction after instruction does for the counters; cycles,
    /// and the data of a record, are the caller's.
    pub fn counting(&self) -> Counting {
        let limits = self.pmu.limits();
        let needs = self.pmu.needs();
        let accesses = needs.contains(Needs::ACCESSES) || self.wants_caches();
        // PEBS is off in system-management mode (rule PEBS-25).
        let record = (self.pmu.due() != 0 && self.suspended.is_none()).then(|| Due {
            area: self.branch.ds_area(),
            counters: self.pmu.due(),
            data: None,
        });
        Counting {
            instructions: limits.instructions,
            last_alone: limits.last_alone,
            accesses: accesses.then_some(limits.accesses),
            fetches: self.wants_caches(),
            record,
        }
    }

    /// Branches that counters want to be told of are observed as well.
    pub(super) fn with_counted_branches(&self, observe: Observe) -> Observe {
        let needs = self.pmu.needs();
        // A predictor learns from those that are not taken, too.
        let observe = Observe {
            not_taken: observe.not_taken || self.wants_predictor(),
            ..observe
        };
        if !needs.contains(Needs::BRANCHES) {
            return observe;
        }
        let least = self.pmu.limits().branches.least();
        Observe {
            branches: true,
            not_taken: observe.not_taken || needs.contains(Needs::NOT_TAKEN),
            every: match (observe.every, u32::try_from(least).unwrap_or(0)) {
                (0, every) | (every, 0) => every,
                (one, other) => one.min(other),
            },
            ..observe
        }
    }

    /// A transaction begins or ends; the counters and the branches are up to date.
    pub fn transaction(&mut self, step: Step) {
        self.branch.set_in_transaction(step == Step::Begun);
        self.pmu.transaction(step);
    }

    /// A PEBS record was stored, or could not be. Answers whether a performance-monitoring
    /// interrupt is requested.
    #[must_use]
    pub fn pebs_stored(&mut self, stored: &Stored) -> bool {
        let pmi = self.pmu.stored(stored, self.freeze());
        self.follow_freeze();
        pmi
    }

    /// Branch trace store requests a performance-monitoring interrupt: what that freezes (rule
    /// FRZ-01, and BTS-12).
    pub fn trace_interrupts(&mut self) {
        self.pmu.freeze(self.freeze());
        self.follow_freeze();
    }

    /// RDPMC; `None` asks for #GP(0). Whether the privilege level allows it is the engine's matter.
    pub fn rdpmc(&self, index: u32) -> Option<u64> {
        let present = self.config.facilities.contains(Facilities::PMU);
        self.pmu.rdpmc(index).filter(|_| present)
    }

    /// What IA32_DEBUGCTL makes a request for an interrupt freeze.
    fn freeze(&self) -> Freeze {
        Freeze::by_debugctl(self.branch.debugctl().bits())
    }

    /// IA32_PERF_GLOBAL_STATUS.LBR_FRZ stops the LBR stack.
    pub(super) const fn follow_freeze(&mut self) {
        self.branch.set_frozen(self.pmu.lbrs_frozen());
    }
}
