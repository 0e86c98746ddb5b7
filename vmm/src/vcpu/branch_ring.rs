//! The last branches of a vCPU, with repetitions left out.
//!
//! A loop that runs a million times would push out of a limited record what came before it. So of
//! a sequence that repeats, the record keeps the first two passes. Inner loops are shortened before the outer
//! ones repeat, so nested loops and repeated calls take no more space than their code. What is left out is
//! whole passes: the record stays one possible path through the code.

use std::collections::VecDeque;

/// Source and target of a branch.
type SourceTarget = (u64, u64);

/// Passes of a repeated sequence that are kept.
const PASSES: usize = 2;
/// The length of the table of last occurrences, at most.
const RECENT_MAX: usize = 1 << 16;

/// A bounded queue of branches.
#[derive(Debug)]
pub(super) struct BranchRing {
    edges: VecDeque<SourceTarget>,
    limit: usize,
    /// The number of the oldest branch kept: numbers count what was kept, and those of a pass that is
    /// left out are used again.
    first: u64,
    /// The number of a recent branch, by a hash of its addresses; empty if every branch is kept.
    recent: Vec<u64>,
    /// How many branches ago the current sequence passed here last; 0 if it never did.
    period: usize,
    /// How many branches in a row were the same as one period ago.
    matched: usize,
}

impl BranchRing {
    /// A queue of at most `limit` branches; `every`: with all repetitions.
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

    /// The most branches that are kept.
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

    /// Appends a branch. Returns how many branches were left out because it completed a further pass.
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

    /// Finds how far the branches up to the last one repeat earlier ones.
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

    /// Removes the last pass.
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

    /// What is kept of branches with these sources, each to the source of the next one.
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
