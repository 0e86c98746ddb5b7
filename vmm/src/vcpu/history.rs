//! The last branches of a processor, kept for a debugger: a flight recorder.

use std::collections::VecDeque;

use hindsight_cpu::branch::{Branch, BranchClass};

/// Most branches that are kept for one processor: 16 bytes each.
pub const MOST: usize = 1 << 24;

/// What was kept, as of one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Where each branch was and went, the oldest first.
    pub branches: Vec<(u64, u64)>,
    /// Branches since the recording began, those that were forgotten included.
    pub total: u64,
    /// RIP where the recording began.
    pub start: u64,
}

/// The last branches of a processor.
#[derive(Debug)]
pub struct History {
    ring: VecDeque<(u64, u64)>,
    limit: usize,
    total: u64,
    start: u64,
}

impl History {
    /// Keeps `limit` branches, 1 to [`MOST`], from RIP `start` on.
    pub fn new(limit: usize, start: u64) -> Self {
        Self {
            ring: VecDeque::new(),
            limit: limit.clamp(1, MOST),
            total: 0,
            start,
        }
    }

    /// How many branches are kept at most.
    pub const fn limit(&self) -> usize {
        self.limit
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
            self.ring.push_back((branch.from, branch.to));
            self.total += 1;
        }
    }

    /// What is kept now.
    pub fn kept(&self) -> Kept {
        Kept {
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
        let mut history = History::new(2, 0x100);
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
            Kept {
                branches: vec![(3, 4), (4, 5)],
                total: 3,
                start: 0x100
            }
        );
    }
}
