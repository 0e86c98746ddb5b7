//! A flight recorder: the last branches of a vCPU, for a debugger.

use std::collections::VecDeque;

use hindsight_cpu::branch::{Branch, BranchClass};

/// Most branches that one vCPU's history keeps, 16 bytes each.
pub const BRANCHES_MAX: usize = 1 << 24;

/// A copy of the history at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BranchSnapshot {
    /// Source and target of each branch, the oldest first. All addresses are linear.
    pub branches: Vec<(u64, u64)>,
    /// Branches since the recording started, including those that were dropped.
    pub total: u64,
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

/// The last branches of a vCPU.
#[derive(Debug)]
pub struct BranchHistory {
    ring: VecDeque<(u64, u64)>,
    limit: usize,
    total: u64,
    start: u64,
    /// The base of CS, and the base before the next branch.
    base: u64,
    from_base: u64,
}

impl BranchHistory {
    /// A history of `limit` branches, 1 to [`BRANCHES_MAX`], that starts at RIP `start` of a code segment
    /// with this base.
    pub fn new(limit: usize, start: u64, base: u64) -> Self {
        Self {
            ring: VecDeque::new(),
            limit: limit.clamp(1, BRANCHES_MAX),
            total: 0,
            start: linear(start, base),
            base,
            from_base: base,
        }
    }

    /// Sets the base of CS for the next branches. Only a far branch comes from another base.
    pub fn set_base(&mut self, base: u64) {
        self.base = base;
    }

    /// The most branches that it keeps.
    pub const fn limit(&self) -> usize {
        self.limit
    }

    /// Restarts at a code segment with this base, which the vCPU reached without a branch.
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
            if self.ring.len() >= self.limit {
                self.ring.pop_front();
            }
            let near = branch.class.is_near();
            let from_base = if near { self.base } else { self.from_base };
            self.from_base = self.base;
            let (from, to) = (linear(branch.from, from_base), linear(branch.to, self.base));
            self.ring.push_back((from, to));
            self.total += 1;
        }
    }

    /// A copy of the history.
    pub fn snapshot(&self) -> BranchSnapshot {
        BranchSnapshot {
            branches: self.ring.iter().copied().collect(),
            total: self.total,
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
                start: 0x100
            }
        );
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
