//! A flight recorder: the last branches of a vCPU, for a debugger.

use hindsight_cpu::branch::{Branch, BranchClass};

use super::branch_ring::BranchRing;

/// Maximum number of branches that one vCPU's history keeps, of 16 bytes each.
pub const BRANCHES_MAX: usize = 1 << 24;

/// A copy of the history at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BranchSnapshot {
    /// Source and target of each branch, the oldest first. All addresses are linear.
    pub branches: Vec<(u64, u64)>,
    /// Branches since the recording started, including all that the history no longer has.
    pub total: u64,
    /// How many of these branches were dropped as repetitions of a loop.
    pub left_out: u64,
    /// The address at which the recording was frozen, if it was.
    pub end: Option<u64>,
    /// The address at which the recording started.
    pub start: u64,
}

/// The linear address of an instruction pointer. Only segments of 16- and 32-bit code have a base.
const fn linear(ip: u64, base: u64) -> u64 {
    match base {
        0 => ip,
        base => ip.wrapping_add(base) & 0xffff_ffff,
    }
}

/// The event that freezes a recording: no later branch is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordStop {
    /// A branch to this linear address.
    Address(u64),
    /// The delivery of this exception.
    Exception(u8),
}

/// How the flight recorder records the branches of each vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordOptions {
    /// Maximum number of branches to keep, 1 to [`BRANCHES_MAX`].
    pub limit: usize,
    /// Whether to keep the repetitions of loops.
    pub every: bool,
    /// The event that freezes the recording, if any.
    pub stop: Option<RecordStop>,
}

/// The last branches of a vCPU.
#[derive(Debug)]
pub struct BranchHistory {
    ring: BranchRing,
    stop: Option<RecordStop>,
    /// The handler of the exception that freezes the recording, which the vCPU is about to reach.
    handler: Option<u64>,
    end: Option<u64>,
    total: u64,
    left_out: u64,
    start: u64,
    /// The base of CS after the next branch, and the base before it.
    base: u64,
    from_base: u64,
}

impl BranchHistory {
    /// Makes a history of the last `limit` branches, 1 to [`BRANCHES_MAX`], with repetitions.
    ///
    /// It starts at RIP `start` in a code segment with the base `base`.
    pub fn new(limit: usize, start: u64, base: u64) -> Self {
        let options = RecordOptions {
            limit,
            every: true,
            stop: None,
        };
        Self::with_options(options, start, base)
    }

    /// Makes a history that starts at RIP `start` in a code segment with the base `base`.
    pub fn with_options(options: RecordOptions, start: u64, base: u64) -> Self {
        Self {
            ring: BranchRing::new(options.limit.clamp(1, BRANCHES_MAX), options.every),
            stop: options.stop,
            handler: None,
            end: None,
            total: 0,
            left_out: 0,
            start: linear(start, base),
            base,
            from_base: base,
        }
    }

    /// Sets the base of CS for the next branches. Only a far branch changes the base.
    pub fn set_base(&mut self, base: u64) {
        self.base = base;
    }

    /// Maximum number of branches that the history keeps.
    pub const fn limit(&self) -> usize {
        self.ring.limit()
    }

    /// Reports that the vCPU delivered an exception whose handler is at RIP `handler`.
    pub fn exception(&mut self, vector: u8, handler: u64) {
        if self.end.is_some() || self.stop != Some(RecordStop::Exception(vector)) {
            return;
        }
        // The branch to the handler is reported before or after the delivery.
        match self.ring.last() {
            Some((_, to)) if to == linear(handler, self.base) => self.end = Some(to),
            _ => self.handler = Some(handler),
        }
    }

    /// Sets the base of CS after the vCPU has changed it without a branch.
    pub fn restart(&mut self, base: u64) {
        self.base = base;
        self.from_base = base;
    }

    /// Appends branches, in order.
    pub fn push(&mut self, branches: &[Branch]) {
        for branch in branches {
            if branch.class == BranchClass::NotTaken {
                continue;
            }
            if self.end.is_some() {
                return;
            }
            let near = branch.class.is_near();
            let from_base = if near { self.base } else { self.from_base };
            self.from_base = self.base;
            let (from, to) = (linear(branch.from, from_base), linear(branch.to, self.base));
            self.left_out += self.ring.push((from, to)) as u64;
            self.total += 1;
            let is_delivery = matches!(branch.class, BranchClass::Exception | BranchClass::Debug);
            let frozen = match self.stop {
                Some(RecordStop::Address(at)) => at == to,
                Some(RecordStop::Exception(_)) => is_delivery && self.handler == Some(branch.to),
                None => false,
            };
            if frozen {
                self.end = Some(to);
            }
        }
    }

    /// Freezes the recording at the next branch to the linear address `at`.
    pub fn stop_at(&mut self, at: u64) {
        self.stop = Some(RecordStop::Address(at));
    }

    /// A copy of the history.
    pub fn snapshot(&self) -> BranchSnapshot {
        BranchSnapshot {
            branches: self.ring.iter().collect(),
            total: self.total,
            left_out: self.left_out,
            end: self.end,
            start: self.start,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_keeps_the_last_branches_and_counts_all() {
        let mut history = BranchHistory::new(2, 0x100, 0);
        let branch = |from, class| Branch {
            from,
            to: from + 1,
            at: 0,
            class,
            cpl: 0,
            to_cpl: 0,
            mispredicted: false,
        };
        history.push(&[
            branch(1, BranchClass::Far),
            branch(2, BranchClass::NotTaken),
        ]);
        history.push(&[branch(3, BranchClass::Return), branch(4, BranchClass::Far)]);
        assert_eq!(
            history.snapshot(),
            BranchSnapshot {
                branches: vec![(3, 4), (4, 5)],
                total: 3,
                start: 0x100,
                ..BranchSnapshot::default()
            }
        );
    }

    fn stopping_history(stop: RecordStop) -> BranchHistory {
        let options = RecordOptions {
            limit: 8,
            every: false,
            stop: Some(stop),
        };
        BranchHistory::with_options(options, 0, 0)
    }

    #[test]
    fn history_freezes_at_an_address() {
        let mut history = stopping_history(RecordStop::Address(0x20));
        history.push(&[
            Branch::new(BranchClass::DirectJump, 1, 0x10),
            Branch::new(BranchClass::DirectCall, 0x11, 0x20),
            Branch::new(BranchClass::DirectJump, 0x21, 0x30),
        ]);
        let snapshot = history.snapshot();
        assert_eq!(snapshot.branches, [(1, 0x10), (0x11, 0x20)]);
        assert_eq!((snapshot.total, snapshot.end), (2, Some(0x20)));
    }

    #[test]
    fn address_that_is_found_later_freezes_the_history() {
        let mut history = BranchHistory::new(8, 0, 0);
        history.push(&[Branch::new(BranchClass::DirectCall, 1, 0x20)]);
        history.stop_at(0x20);
        history.push(&[
            Branch::new(BranchClass::Return, 0x21, 2),
            Branch::new(BranchClass::DirectCall, 3, 0x20),
            Branch::new(BranchClass::Return, 0x21, 4),
        ]);
        let snapshot = history.snapshot();
        assert_eq!((snapshot.total, snapshot.end), (3, Some(0x20)));
    }

    #[test]
    fn history_freezes_at_an_exception_reported_before_or_after_its_branch() {
        for before in [true, false] {
            let mut history = stopping_history(RecordStop::Exception(14));
            history.exception(6, 0x60);
            history.push(&[Branch::new(BranchClass::Exception, 1, 0x60)]);
            let branch = Branch::new(BranchClass::Exception, 2, 0xe0);
            if before {
                history.exception(14, 0xe0);
                history.push(&[branch]);
            } else {
                history.push(&[branch]);
                history.exception(14, 0xe0);
            }
            history.push(&[Branch::new(BranchClass::DirectJump, 3, 4)]);
            assert_eq!(
                history.snapshot().branches,
                [(1, 0x60), (2, 0xe0)],
                "{before}"
            );
            assert_eq!(history.snapshot().end, Some(0xe0));
        }
    }

    #[test]
    fn repetitions_are_counted_and_left_out() {
        let options = RecordOptions {
            limit: 8,
            every: false,
            stop: None,
        };
        let mut history = BranchHistory::with_options(options, 0, 0);
        for _ in 0..100 {
            history.push(&[Branch::new(BranchClass::Conditional, 5, 1)]);
        }
        let snapshot = history.snapshot();
        assert_eq!((snapshot.total, snapshot.left_out), (100, 98));
        assert_eq!(snapshot.branches, [(5, 1); 2]);
    }

    #[test]
    fn addresses_are_linear_in_segments_with_a_base() {
        let mut history = BranchHistory::new(4, 0x10, 0x7000);
        let branch = |from, to, class| Branch {
            from,
            to,
            at: 0,
            class,
            cpl: 0,
            to_cpl: 0,
            mispredicted: false,
        };
        history.set_base(0x7000);
        history.push(&[branch(0x12, 0x20, BranchClass::DirectJump)]);
        history.set_base(0xf_0000);
        history.push(&[
            branch(0x22, 0x30, BranchClass::Far),
            branch(0x34, 0x40, BranchClass::Return),
        ]);
        history.set_base(0);
        history.push(&[branch(0x42, 0x5000, BranchClass::Exception)]);
        let snapshot = history.snapshot();
        assert_eq!(snapshot.start, 0x7010);
        assert_eq!(
            snapshot.branches,
            [
                (0x7012, 0x7020),
                (0x7022, 0xf_0030),
                (0xf_0034, 0xf_0040),
                (0xf_0042, 0x5000),
            ]
        );
    }
}
