//! Retired instructions by ring, and how far the performance counters let the processor run.
//!
//! Counting instructions costs nothing: the budget of a slice is cut so that it ends where the
//! platform wants to look at the counters. The instruction that a PEBS record is about is executed
//! in a slice of its own, or is the branch noted last.

#![expect(
    clippy::cast_possible_truncation,
    reason = "the clock of branches is cut to 32 bits"
)]

use crate::core::{Core, Fault, Leave};
use hindsight_cpu::pmu::pebs::{self, PebsSample as Sample};
use hindsight_cpu::pmu::{EngineCounting as Counting, Ring};
use hindsight_cpu::transaction::AbortCause as Cause;
use hindsight_cpu::uarch::cache::LINE_SHIFT;
use hindsight_cpu::uarch::{
    AccessKind as Kind, InstructionAccesses as Accesses, MemoryAccess as Touch,
};

/// What is kept for the performance counters.
pub(crate) struct Counters {
    /// Instructions retired at CPL 1 to 3 before the current slice.
    user: u64,
    /// Where the slice runs.
    ring: Ring,
    /// RIP at the start of the slice.
    start: u64,
    /// RIP of the instruction that retired last, if it was a slice of its own.
    last: Option<u64>,
    /// The slice executes RSM, which no record is about: it is of system-management mode.
    resumes: bool,
    wants: Counting,
    /// The accesses of the instruction that runs are noted.
    noting: bool,
    touches: Vec<Touch>,
    locked: bool,
    /// RIP of the XBEGIN of a transaction that was aborted in this slice, and what a record tells of that.
    aborted: Option<(u64, u64)>,
    /// The line of code that was told last, guest-physical.
    line: u64,
}

impl Counters {
    pub(crate) fn new() -> Self {
        Self {
            user: 0,
            ring: Ring::Os,
            start: 0,
            last: None,
            resumes: false,
            wants: Counting::NONE,
            noting: false,
            touches: Vec::new(),
            locked: false,
            aborted: None,
            line: u64::MAX,
        }
    }

    /// Instructions retired at CPL 1 to 3, with `used` ones of the current slice.
    pub(crate) fn user(&self, used: u64) -> u64 {
        match self.ring {
            Ring::Os => self.user,
            Ring::User => self.user.wrapping_add(used),
        }
    }

    /// Sets the count of instructions retired at CPL 1 to 3, in a state that comes from outside.
    pub(crate) fn set_user(&mut self, user: u64) {
        self.user = user;
        self.ring = Ring::Os;
        self.last = None;
    }

    /// Accesses are told one by one.
    pub(crate) fn tells_accesses(&self) -> bool {
        self.wants.accesses.is_some()
    }

    /// A transaction was aborted: RIP of its XBEGIN, and what a PEBS record tells of it.
    pub(crate) const fn note_abort(&mut self, about: (u64, u64)) {
        self.aborted = Some(about);
    }

    /// The instruction that runs is RSM.
    pub(crate) fn resume(&mut self) {
        self.resumes = true;
    }

    /// The instruction that runs locks the bus.
    pub(crate) fn lock(&mut self) {
        self.locked = true;
    }
}

impl Core {
    /// Starts a slice of at most `most` instructions, where `rest` may still follow, and of no more
    /// than the counters allow.
    pub(crate) fn begin_slice(&mut self, rest: i64, most: i64) {
        let counters = &mut self.counters;
        counters.ring = Ring::of(self.cpl);
        counters.start = self.rip;
        counters.aborted = None;
        let mut left = counters.wants.instructions.left(counters.ring);
        if counters.wants.record.is_some() {
            left = 1;
        } else if counters.wants.last_alone && left != u64::MAX && left > 1 {
            left -= 1;
        }
        let rest = rest.min(i64::try_from(left).unwrap_or(i64::MAX)).max(1);
        self.begin(rest.min(most));
        self.beyond = rest - self.slice;
    }

    /// Ends a slice: counts what it retired, and says how many cycles it took.
    pub(crate) fn account(&mut self) -> i64 {
        let used = self.slice - self.budget;
        let extra = std::mem::take(&mut self.extra);
        let retired = (used - extra).max(0).cast_unsigned();
        self.extra_base = self.extra_base.wrapping_add_signed(extra);
        self.retired_base = self.retired_base.wrapping_add(retired);
        let counters = &mut self.counters;
        counters.user = counters.user(retired);
        if retired != 0 {
            let resumes = std::mem::take(&mut counters.resumes);
            counters.last = (retired == 1 && !resumes).then_some(counters.start);
            counters.wants.instructions.spend(counters.ring, retired);
        }
        self.begin(0);
        used
    }

    /// Asks the platform how far the counters let the processor run.
    pub(crate) fn recount(&mut self) {
        let wants = self.platform().counting();
        let told = self.counters.tells_accesses();
        self.counters.wants = wants;
        if self.counters.tells_accesses() != told {
            self.leave = true;
            self.update_set();
        }
    }

    /// At a boundary: has the counters looked at where they are due, and stores a PEBS record.
    pub(crate) fn look_at_counters(&mut self) {
        // Before the branches are told, and gone.
        let last = self.counters.last.or_else(|| self.branch_just_now());
        self.tell_if_due();
        if self.counters.wants.is_due() {
            self.tell_branches();
            self.reobserve();
        }
        let Some(due) = self.counters.wants.record else {
            return;
        };
        // A record ends a transaction, and is then about that.
        self.leave_region(Cause::Event);
        match (self.counters.aborted.take(), last) {
            (Some((xbegin, about)), _) => self.store_sample(&due, xbegin, about),
            (None, Some(eventing_rip)) => self.store_sample(&due, eventing_rip, 0),
            (None, None) => {}
        }
    }

    /// RIP of the branch noted last, if nothing retired after it.
    fn branch_just_now(&self) -> Option<u64> {
        let branch = self.rec.last()?;
        let now = self.retired_base as u32;
        (branch.at == now && branch.class.is_instruction()).then_some(branch.from)
    }

    fn store_sample(&mut self, due: &pebs::PebsDue, eventing_rip: u64, transaction: u64) {
        let mut gpr = [0; 16];
        gpr.copy_from_slice(&self.regs[..16]);
        let sample = Sample {
            rflags: self.rflags(),
            rip: self.rip,
            gpr,
            long: self.code == 8,
            eventing_rip,
            tsc: self.platform().tsc(),
            transaction,
        };
        let stored = pebs::store(self, due, &sample);
        self.platform().pebs_stored(&stored);
        self.reobserve();
    }

    /// Before the instruction at a linear address, which was decoded without a fault.
    pub(crate) fn begin_accesses(&mut self, lin: u64) {
        if !self.counters.tells_accesses() {
            return;
        }
        self.counters.noting = true;
        self.counters.locked = false;
        self.counters.touches.clear();
        if self.counters.wants.fetches
            && let Ok(gpa) = self.translate_code(lin)
            && gpa >> LINE_SHIFT != self.counters.line
        {
            self.counters.line = gpa >> LINE_SHIFT;
            self.note_touch(lin, gpa, 1, Kind::Code);
        }
    }

    /// After the instruction.
    pub(crate) fn end_accesses(&mut self) {
        if !std::mem::take(&mut self.counters.noting) {
            return;
        }
        let retired = self.why != Leave::Fault;
        if self.counters.touches.is_empty() || (!retired && self.fault != Fault::Repeat) {
            return;
        }
        let touches = std::mem::take(&mut self.counters.touches);
        let ring = self.counters.ring;
        let accesses = Accesses {
            accesses: &touches,
            locked: self.counters.locked,
            retired,
        };
        let used = self.platform().accessed(ring, &accesses);
        self.counters.touches = touches;
        if let Some(quota) = &mut self.counters.wants.accesses {
            quota.spend(ring, used);
        }
    }

    /// An access was made, within a page.
    pub(crate) fn note_touch(&mut self, linear: u64, gpa: u64, len: usize, kind: Kind) {
        if self.counters.noting && len != 0 {
            self.counters.touches.push(Touch {
                linear,
                gpa,
                len: len as u32,
                kind,
                cached: self.memory.page(gpa).is_some(),
            });
        }
    }

    /// A locked read-modify-write was made in place.
    pub(crate) fn note_locked(&mut self, lin: u64, len: usize) {
        if !self.counters.noting {
            return;
        }
        self.counters.locked = true;
        if let Some(known) = self.wr.known(lin, self.set) {
            self.note_touch(lin, known.gpa, len, Kind::Load);
            self.note_touch(lin, known.gpa, len, Kind::Store);
        }
    }
}
