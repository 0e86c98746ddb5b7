//! The last branches of a processor, kept for a debugger: a flight recorder.

use std::collections::VecDeque;

use hindsight_cpu::branch::{Branch, BranchClass};

/// Most branches that are kept for one processor: 16 bytes each.
pub const MOST: usize = 1 << 24;

/// What was kept, as of one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptBranches {
    /// Where each branch was and went, the oldest first. All addresses are linear.
    pub branches: Vec<(u64, u64)>,
    /// Branches since the recording began, those that were forgotten included.
    pub total: u64,
    /// Where the recording began.
    pub start: u64,
}

/// The linear address of code, by its place in a code segment. Only segments of 16- and 32-bit code
/// have a base.
const fn linear(ip: u64, base: u64) -> u64 {
    match base {
        0 => ip,
        base => ip.wrapping_add(base) & 0xffff_ffff,
    }
}

/// The last branches of a processor.
#[derive(Debug)]
pub struct BranchHistory {
    ring: VecDeque<(u64, u64)>,
    limit: usize,
    total: u64,
    start: u64,
    /// The base of CS, and what it was before the branch that is told next.
    base: u64,
    from_base: u64,
}

impl BranchHistory {
    /// Keeps `limit` branches, 1 to [`MOST`], from RIP `start` in a code segment with this base on.
    pub fn new(limit: usize, start: u64, base: u64) -> Self {
        Self {
            ring: VecDeque::new(),
            limit: limit.clamp(1, MOST),
            total: 0,
            start: linear(start, base),
            base,
            from_base: base,
        }
    }

    /// The base of CS of the code that the next branches are in. Only a far branch comes from
    /// another one.
    pub fn set_base(&mut self, base: u64) {
        self.base = base;
    }

    /// How many branches are kept at most.
    pub const fn limit(&self) -> usize {
        self.limit
    }

    /// The processor was put elsewhere, without a branch.
    pub fn restart(&mut self, base: u64) {
        self.base = base;
        self.from_base = base;
    }

    /// Takes branches, in order.
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

    /// What is kept now.
    pub fn kept(&self) -> KeptBranches {
        KeptBranches {
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
    fn the_last_ones_are_kept_and_all_are_counted() {
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
            history.kept(),
            KeptBranches {
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
        let kept = history.kept();
        assert_eq!(kept.start, 0x7010);
        assert_eq!(
            kept.branches,
            [
                (0x7012, 0x7020),
                (0x7022, 0xf_0030),
                (0xf_0034, 0xf_0040),
                (0xf_0042, 0x5000),
            ]
        );
    }
}
