//! The path of a deterministic vCPU: a hash of its branches, and the last of them.

use std::collections::VecDeque;

use hindsight_cpu::branch::{Branch, BranchClass};

/// Maximum number of branches to show after a run.
const RECENT: usize = 16;

/// Maximum number of interrupts and exceptions to hold, to find which handler a vCPU returns from.
const DELIVERIES: usize = 256;

/// The path of a vCPU. A restore clears all but the hash.
#[derive(Debug, Default)]
pub(crate) struct BranchPath {
    /// See [`crate::state::RunLogState::path`].
    hash: u64,
    /// The last branches, at most [`RECENT`], the oldest first.
    recent: Vec<Branch>,
    /// The last interrupts and exceptions, at most [`DELIVERIES`], the oldest first.
    deliveries: VecDeque<Branch>,
    interrupts: u64,
    exceptions: u64,
}

impl BranchPath {
    /// A path with this hash and no branches.
    pub(super) fn with_hash(hash: u64) -> Self {
        Self {
            hash,
            ..Self::default()
        }
    }

    /// The hash of all branches so far.
    pub(super) const fn hash(&self) -> u64 {
        self.hash
    }

    /// The last branches, the oldest first.
    pub(crate) fn recent(&self) -> &[Branch] {
        &self.recent
    }

    /// The number of interrupts, and of exceptions.
    pub(crate) const fn delivered(&self) -> (u64, u64) {
        (self.interrupts, self.exceptions)
    }

    /// The last interrupt or exception that was delivered at RIP `from`.
    pub(crate) fn last_delivery_from(&self, from: u64) -> Option<&Branch> {
        self.deliveries
            .iter()
            .rev()
            .find(|delivery| delivery.from == from)
    }

    /// Adds branches to the path. How they are divided among calls makes no difference.
    pub(crate) fn extend(&mut self, branches: &[Branch]) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut hash = self.hash;
        for branch in branches {
            let count = u64::from(branch.at).wrapping_mul(0xd6e8_feb8_6659_fd93);
            let interrupt = branch.class == BranchClass::Interrupt;
            self.interrupts += u64::from(interrupt);
            let delivery = interrupt || !branch.class.is_instruction();
            self.exceptions += u64::from(!interrupt && delivery);
            if delivery {
                self.add_delivery(*branch);
            }
            hash = (hash.rotate_left(23) ^ branch.to.wrapping_add(count)).wrapping_mul(ODD);
        }
        self.hash = hash;
        let remaining = RECENT.saturating_sub(branches.len());
        let old = self.recent.len().saturating_sub(remaining);
        self.recent.drain(..old);
        let new = branches.len().saturating_sub(RECENT);
        self.recent.extend_from_slice(&branches[new..]);
    }

    #[cold]
    fn add_delivery(&mut self, delivery: Branch) {
        if self.deliveries.len() == DELIVERIES {
            self.deliveries.pop_front();
        }
        self.deliveries.push_back(delivery);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_hash_depends_on_each_branch_and_not_on_their_division() {
        let branch = |to, at| Branch {
            at,
            ..Branch::new(BranchClass::Return, 1, to)
        };
        let branches: Vec<_> = (0..50).map(|n| branch(n * 8, 3)).collect();
        let hash = |parts: &[&[Branch]]| {
            let mut path = BranchPath::default();
            parts.iter().for_each(|part| path.extend(part));
            assert_eq!(path.recent, branches[50 - RECENT..]);
            path.hash
        };
        let whole = hash(&[&branches]);
        assert_eq!(
            whole,
            hash(&[&branches[..7], &[], &branches[7..9], &branches[9..]])
        );
        for changed in [branch(1, 3), branch(0, 4)] {
            let mut other = branches.clone();
            other[0] = changed;
            assert_ne!(whole, hash(&[&other]));
        }
    }
}
