//! The last branches of a vCPU, without the repetitions of loops.
//!
//! Without this, a loop of a million passes would evict all earlier branches from the limited
//! queue. So the queue keeps the first two passes of a sequence of branches that repeats, and
//! drops the further passes. An inner loop is shortened before the outer loop repeats: nested loops
//! and repeated calls take no more space than their code. Only whole passes are dropped, so the
//! branches in the queue are still one possible path through the code.

use std::collections::VecDeque;

/// Source and target of a branch.
type SourceTarget = (u64, u64);

/// Number of passes of a repeated sequence that are kept.
const PASSES: usize = 2;
/// Maximum length of the table of recent branches.
const RECENT_MAX: usize = 1 << 16;

/// A bounded queue of branches.
#[derive(Debug)]
pub(super) struct BranchRing {
    edges: VecDeque<SourceTarget>,
    limit: usize,
    /// The number of the oldest branch in the queue.
    ///
    /// Branches are numbered in the order in which they were appended. When a pass is dropped, the
    /// next branches get its numbers.
    first: u64,
    /// The last number of a recent branch, by a hash of its addresses.
    ///
    /// Empty if every branch is kept.
    recent: Vec<u64>,
    /// The length in branches of the sequence that currently repeats; 0 if none does.
    period: usize,
    /// The number of last branches that are each equal to the branch one period before it.
    matched: usize,
}

impl BranchRing {
    /// Makes a queue of at most `limit` branches. With `every`, it keeps repetitions.
    pub(super) fn new(limit: usize, every: bool) -> Self {
        let recent_len = limit.next_power_of_two().min(RECENT_MAX);
        Self {
            edges: VecDeque::new(),
            limit,
            first: 0,
            recent: if every {
                Vec::new()
            } else {
                vec![u64::MAX; recent_len]
            },
            period: 0,
            matched: 0,
        }
    }

    /// Maximum number of branches that are kept.
    pub(super) const fn limit(&self) -> usize {
        self.limit
    }

    /// The branches, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = SourceTarget> + '_ {
        self.edges.iter().copied()
    }

    /// The last branch.
    pub(super) fn last(&self) -> Option<SourceTarget> {
        self.edges.back().copied()
    }

    /// Appends a branch. If it completes a further pass, drops the pass.
    ///
    /// Returns the number of dropped branches.
    pub(super) fn push(&mut self, edge: SourceTarget) -> usize {
        if self.edges.len() >= self.limit {
            self.edges.pop_front();
            self.first += 1;
        }
        self.edges.push_back(edge);
        if self.recent.is_empty() {
            return 0;
        }
        self.follow(edge);
        if self.period == 0 || self.matched < PASSES * self.period {
            return 0;
        }
        self.leave_out();
        self.period
    }

    /// Updates `period` and `matched` for `edge`, which was just appended.
    fn follow(&mut self, edge: SourceTarget) {
        let last = self.edges.len() - 1;
        let slot = self.slot(edge);
        let occurrence = self.recent[slot];
        self.recent[slot] = self.first + last as u64;
        let continues = last
            .checked_sub(self.period)
            .and_then(|at| self.edges.get(at));
        if self.period != 0 && continues == Some(&edge) {
            self.matched += 1;
            return;
        }
        (self.period, self.matched) = (0, 0);
        let before = occurrence.checked_sub(self.first);
        let Some(at) = before.and_then(|at| usize::try_from(at).ok()) else {
            return;
        };
        if at < last && self.edges.get(at) == Some(&edge) {
            self.period = last - at;
            let pairs = self
                .edges
                .range(..=at)
                .rev()
                .zip(self.edges.range(..=last).rev());
            let same = pairs.take_while(|(earlier, later)| earlier == later);
            self.matched = same.take(PASSES * self.period).count();
        }
    }

    /// Removes the branches of the last pass.
    fn leave_out(&mut self) {
        let remaining = self.edges.len() - self.period;
        for at in remaining..self.edges.len() {
            let slot = self.slot(self.edges[at]);
            if self.recent[slot] == self.first + at as u64 {
                self.recent[slot] -= self.period as u64;
            }
        }
        self.edges.truncate(remaining);
        self.matched -= self.period;
    }

    fn slot(&self, (from, to): SourceTarget) -> usize {
        let mixed = (from ^ to.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        usize::try_from(mixed >> 32).unwrap_or(0) & (self.recent.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Appends a branch for each of `sources`. Returns the sources of the branches that are kept.
    fn remaining(limit: usize, sources: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut ring = BranchRing::new(limit, false);
        for source in sources {
            ring.push((source, source + 1));
        }
        ring.iter().map(|edge| edge.0).collect()
    }

    #[test]
    fn loop_keeps_two_passes_and_what_came_before() {
        let path = [1, 2].into_iter().chain([7, 8, 9].repeat(1000)).chain([3]);
        assert_eq!(remaining(16, path), [1, 2, 7, 8, 9, 7, 8, 9, 3]);
        assert_eq!(remaining(16, [5; 100]), [5, 5]);
    }

    #[test]
    fn loops_with_other_counts_in_each_pass_of_an_outer_one_are_left_out() {
        let path = (3..500).flat_map(|count| {
            let inner = [20].repeat(count);
            [10].into_iter().chain(inner).chain([30])
        });
        let path = [1].into_iter().chain(path).chain([2]);
        assert_eq!(remaining(64, path), [1, 10, 20, 20, 30, 10, 20, 20, 30, 2]);
    }

    #[test]
    fn record_of_every_branch_has_all_passes() {
        let mut ring = BranchRing::new(4, true);
        for source in 0..10 {
            assert_eq!(ring.push((source % 2, 0)), 0);
        }
        assert_eq!(ring.iter().count(), 4);
    }

    proptest! {
        #[test]
        fn kept_branches_are_a_path_of_the_code(steps in proptest::collection::vec(0_u64..4, 1..400)) {
            // The target of each branch is where the next one is taken.
            let mut ring = BranchRing::new(32, false);
            let mut at = 0;
            for step in &steps {
                let next = (at * 3 + step) % 7;
                ring.push((at, next));
                at = next;
            }
            let edges: Vec<_> = ring.iter().collect();
            prop_assert!(edges.len() <= 32);
            prop_assert!(edges.windows(2).all(|pair| pair[0].1 == pair[1].0));
            prop_assert_eq!(edges.last().map(|edge| edge.1), Some(at));
        }

        #[test]
        fn path_without_repetition_is_kept(count in 1_usize..200) {
            prop_assert_eq!(remaining(256, 0..count as u64).len(), count);
        }
    }
}
