//! Collects what performance counters need.
//!
//! That is retired instructions by ring, the accesses of each instruction, and the instruction that
//! a PEBS record describes.

#![expect(
    clippy::cast_possible_truncation,
    reason = "an access has at most a page"
)]

use hindsight_cpu::pmu::{EngineCounting as Counting, Ring};
use hindsight_cpu::uarch::CacheAccess;
use hindsight_cpu::uarch::cache::LINE_SHIFT;
use hindsight_cpu::uarch::{InstructionAccesses as Accesses, MemoryAccess as Touch};

/// An aborted transaction, as a PEBS record describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AbortRecord {
    /// RIP of the XBEGIN.
    pub(crate) xbegin: u64,
    /// The abort information of the record.
    pub(crate) information: u64,
}

/// Data that is collected for the performance counters.
#[derive(Debug)]
pub(crate) struct Counters {
    /// Instructions retired at CPL 1 to 3 before the current slice.
    user: u64,
    /// The ring in which the slice runs.
    ring: Ring,
    /// RIP at the start of the slice.
    start: u64,
    /// RIP of the instruction that retired last, if it was alone in its slice.
    last: Option<u64>,
    /// The slice executes RSM, which no PEBS record describes: it belongs to SMM.
    resumes: bool,
    /// What the platform requests.
    counting: Counting,
    /// Whether the accesses of the current instruction are collected.
    collecting: bool,
    touches: Vec<Touch>,
    locked: bool,
    /// The transaction that was aborted in this slice.
    aborted: Option<AbortRecord>,
    /// Guest-physical address of the cache line of code that was fetched last.
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
            counting: Counting::NONE,
            collecting: false,
            touches: Vec::new(),
            locked: false,
            aborted: None,
            line: u64::MAX,
        }
    }

    /// What the platform requests.
    pub(crate) fn counting(&self) -> &Counting {
        &self.counting
    }

    /// Sets what the platform requests.
    ///
    /// Returns whether [`Counters::counts_accesses`] changed.
    pub(crate) fn set_counting(&mut self, counting: Counting) -> bool {
        let before = self.counts_accesses();
        self.counting = counting;
        self.counts_accesses() != before
    }

    /// Whether every access is reported to the platform.
    pub(crate) fn counts_accesses(&self) -> bool {
        self.counting.accesses.is_some()
    }

    /// Instructions retired at CPL 1 to 3, when `in_slice` have retired in the current slice.
    pub(crate) fn user(&self, in_slice: u64) -> u64 {
        match self.ring {
            Ring::Os => self.user,
            Ring::User => self.user.wrapping_add(in_slice),
        }
    }

    /// Sets the count of instructions retired at CPL 1 to 3, between slices.
    pub(crate) fn set_user(&mut self, user: u64) {
        self.user = user;
        self.ring = Ring::Os;
        self.last = None;
    }

    /// The ring in which the slice runs.
    pub(crate) fn ring(&self) -> Ring {
        self.ring
    }

    /// Begins a slice at `rip`, and returns how many instructions it may have.
    ///
    /// The limit comes from the performance counters; it may be 0.
    pub(crate) fn begin_slice(&mut self, ring: Ring, rip: u64) -> u64 {
        self.ring = ring;
        self.start = rip;
        self.aborted = None;
        let left = self.counting.instructions.left(ring);
        if self.counting.record.is_some() {
            return 1;
        }
        // The instruction that a PEBS record describes must be alone in its slice.
        let apart = self.counting.last_alone && left != u64::MAX && left > 1;
        left - u64::from(apart)
    }

    /// Ends a slice in which so many instructions retired.
    pub(crate) fn end_slice(&mut self, retired: u64) {
        self.user = self.user(retired);
        if retired != 0 {
            let resumes = std::mem::take(&mut self.resumes);
            self.last = (retired == 1 && !resumes).then_some(self.start);
            self.counting.instructions.spend(self.ring, retired);
        }
    }

    /// Returns RIP of the instruction that retired last, if it was alone in its slice.
    pub(crate) fn last_instruction(&self) -> Option<u64> {
        self.last
    }

    /// Records an aborted transaction.
    pub(crate) fn record_abort(&mut self, abort: AbortRecord) {
        self.aborted = Some(abort);
    }

    /// Returns and clears the transaction that was aborted in this slice.
    pub(crate) fn take_abort(&mut self) -> Option<AbortRecord> {
        self.aborted.take()
    }

    /// Records that the current instruction is RSM.
    pub(crate) fn record_rsm(&mut self) {
        self.resumes = true;
    }

    /// Records that the current instruction locks the bus.
    pub(crate) fn record_lock(&mut self) {
        self.locked = true;
    }

    /// Begins to collect the accesses of an instruction.
    pub(crate) fn begin_accesses(&mut self) {
        debug_assert!(self.counts_accesses());
        self.collecting = true;
        self.locked = false;
        self.touches.clear();
    }

    /// Whether the accesses of the current instruction are collected.
    pub(crate) fn collects(&self) -> bool {
        self.collecting
    }

    /// Records a code fetch at `gpa`; false if the last one was from the same line.
    pub(crate) fn fetch_line(&mut self, gpa: u64) -> bool {
        let line = gpa >> LINE_SHIFT;
        let new = line != self.line;
        self.line = line;
        new
    }

    /// The cache line of code that was fetched last.
    pub(crate) fn last_line(&self) -> u64 {
        self.line
    }

    /// Sets the cache line of code that was fetched last.
    pub(crate) fn set_last_line(&mut self, line: u64) {
        self.line = line;
    }

    /// Whether so many instructions may access memory before the counters must be updated.
    pub(crate) fn covers_accesses(&self, instructions: u64) -> bool {
        let quota = &self.counting.accesses;
        quota.is_some_and(|q| q.left(self.ring) > instructions)
    }

    /// Subtracts instructions that accessed memory from the quota.
    pub(crate) fn spend_instructions(&mut self, instructions: u64) {
        if let Some(quota) = &mut self.counting.accesses {
            quota.spend(self.ring, instructions);
        }
    }

    /// Adds an access within a page.
    pub(crate) fn push_touch(
        &mut self,
        linear: u64,
        gpa: u64,
        len: usize,
        kind: CacheAccess,
        ram: bool,
    ) {
        debug_assert!(self.collecting && len != 0);
        self.touches.push(Touch {
            linear,
            gpa,
            len: len as u32,
            kind,
            cached: ram,
        });
    }

    /// Stops collecting, and returns the accesses of the instruction if it counts.
    ///
    /// An instruction counts if it retired, or stopped between two iterations.
    pub(crate) fn end_accesses(&mut self, retired: bool, between_iterations: bool) -> Vec<Touch> {
        let collecting = std::mem::take(&mut self.collecting);
        // An empty buffer stays here, with its capacity.
        if !collecting || self.touches.is_empty() || !(retired || between_iterations) {
            return Vec::new();
        }
        std::mem::take(&mut self.touches)
    }

    /// Returns the accesses in the form that the platform takes.
    pub(crate) fn accesses<'a>(&self, touches: &'a [Touch], retired: bool) -> Accesses<'a> {
        Accesses {
            accesses: touches,
            locked: self.locked,
            retired,
        }
    }

    /// Subtracts accesses from the quota, and keeps their buffer for later use.
    pub(crate) fn spend_accesses(&mut self, used: u64, touches: Vec<Touch>) {
        self.touches = touches;
        if let Some(quota) = &mut self.counting.accesses {
            quota.spend(self.ring, used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_cpu::pmu::EventQuota as Quota;

    #[test]
    fn instructions_count_for_the_ring_that_their_slice_started_in() {
        let mut counters = Counters::new();
        counters.begin_slice(Ring::Os, 0);
        assert_eq!(counters.user(5), 0);
        counters.end_slice(5);
        counters.begin_slice(Ring::User, 0);
        assert_eq!(counters.user(7), 7);
        counters.end_slice(7);
        assert_eq!(counters.user(0), 7);
    }

    #[test]
    fn only_a_slice_of_one_instruction_knows_its_rip() {
        let mut counters = Counters::new();
        counters.begin_slice(Ring::Os, 0x1000);
        counters.end_slice(1);
        assert_eq!(counters.last_instruction(), Some(0x1000));
        counters.begin_slice(Ring::Os, 0x1001);
        counters.end_slice(0);
        assert_eq!(counters.last_instruction(), Some(0x1000), "nothing retired");
        counters.begin_slice(Ring::Os, 0x1001);
        counters.record_rsm();
        counters.end_slice(1);
        assert_eq!(counters.last_instruction(), None, "RSM");
        counters.begin_slice(Ring::Os, 0x2000);
        counters.end_slice(2);
        assert_eq!(counters.last_instruction(), None);
    }

    #[test]
    fn instruction_of_a_record_gets_a_slice_of_its_own() {
        let mut counters = Counters::new();
        let limit = |both| Quota {
            both,
            ..Quota::NONE
        };
        counters.set_counting(Counting {
            instructions: limit(10),
            last_alone: true,
            ..Counting::NONE
        });
        assert_eq!(counters.begin_slice(Ring::Os, 0), 9);
        counters.end_slice(9);
        assert_eq!(counters.begin_slice(Ring::Os, 0), 1);
    }

    #[test]
    fn accesses_of_an_instruction_that_faulted_are_dropped() {
        let mut counters = Counters::new();
        counters.set_counting(Counting {
            accesses: Some(Quota::NONE),
            ..Counting::NONE
        });
        for (retired, between, expected) in [(true, false, 1), (false, true, 1), (false, false, 0)]
        {
            counters.begin_accesses();
            counters.push_touch(0x1000, 0x1000, 4, CacheAccess::Load, true);
            assert_eq!(counters.end_accesses(retired, between).len(), expected);
        }
    }
}
