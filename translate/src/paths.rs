//! Records of the branches that translated code executes.
//!
//! A *path* is a way through a unit: the branches between its entry and the point at which it is
//! left. All of them are known when the unit is made, but for the target of an indirect branch.
//! Translated code therefore stores one [`PathRecord`] for a path, and [`Paths`] finds its
//! branches again.

use crate::layout::{PATH_RECORDS, PathRecord};

/// A branch of a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathBranch {
    pub(crate) from: u64,
    /// 0 for an indirect branch: the record has the target.
    pub(crate) to: u64,
    pub(crate) word: u32,
    /// Instructions that were charged, but come after the branch.
    pub(crate) rest: u32,
}

/// The branches of a way through a unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownPath {
    /// Index of the first of the unit's branches in [`Paths::branches`].
    first: u32,
    /// Number of the branches before the last one.
    before: u32,
    last: PathBranch,
    indirect: bool,
    /// The number of branches of each [`BranchKind`](crate::BranchKind), a byte each.
    kinds: u64,
}

/// A path in the code of a unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathCode {
    /// Number of the unit's branches before the last one.
    pub(crate) before: usize,
    pub(crate) last: PathBranch,
    /// The record has the target of the last branch.
    pub(crate) indirect: bool,
}

/// The most branches of a path.
const PATH_BRANCHES: usize = 16;

/// The most branches of the records of paths that translated code adds before it is left.
pub const RECORDED_BRANCHES: u64 = ((PATH_RECORDS + 1) * PATH_BRANCHES) as u64;

/// The kinds of [`KnownPath::kinds`] in every second byte.
const EVEN_KINDS: u64 = 0x00ff_00ff_00ff_00ff;
/// Counts of even and of odd kinds do not overflow their 16 bits.
const _: () = assert!(RECORDED_BRANCHES <= u16::MAX as u64);

/// The paths of all units.
#[derive(Debug, Default)]
pub(crate) struct Paths {
    paths: Vec<KnownPath>,
    branches: Vec<PathBranch>,
}

/// A branch that translated code has executed: its address, its target, and a word.
///
/// The word contains the time stamp in its lower half, and in its upper half the word of the
/// branch's kind in [`BranchFormat::words`](crate::BranchFormat::words).
pub type BranchWords = [u64; 3];

impl PathBranch {
    /// Returns the words of the branch; `stamp` is the time stamp at the end of the unit.
    #[inline(always)]
    fn words(&self, to: u64, stamp: u32) -> BranchWords {
        let stamp = stamp.wrapping_sub(self.rest);
        [self.from, to, u64::from(self.word) << 32 | u64::from(stamp)]
    }
}

impl Paths {
    /// The number that the next path gets.
    pub(crate) fn next(&self) -> Option<u32> {
        u32::try_from(self.paths.len()).ok()
    }

    /// Adds the paths of a unit, and the branches between its blocks.
    ///
    /// `words` are those of the unit's [`BranchFormat`](crate::BranchFormat).
    pub(crate) fn add(&mut self, branches: &[PathBranch], paths: &[PathCode], words: &[u32; 8]) {
        let kinds = |found: &[PathBranch]| -> u64 {
            debug_assert!(found.len() < PATH_BRANCHES);
            let kind = |b: &PathBranch| words.iter().position(|&word| word == b.word);
            found
                .iter()
                .filter_map(kind)
                .map(|kind| 1 << (8 * kind))
                .sum()
        };
        // The numbers of paths are 32 bits wide, and each has more bytes of code than branches.
        let first = u32::try_from(self.branches.len()).unwrap_or(u32::MAX);
        self.branches.extend(branches);
        for path in paths {
            self.paths.push(KnownPath {
                first,
                before: u32::try_from(path.before).unwrap_or(u32::MAX),
                last: path.last,
                indirect: path.indirect,
                kinds: kinds(&branches[..path.before]) + kinds(&[path.last]),
            });
        }
    }

    fn path(&self, record: &PathRecord) -> Option<&KnownPath> {
        self.paths.get(record.path as usize)
    }

    /// Returns how many of the first records have no branch among the newest ones, and the number
    /// of their branches.
    pub(crate) fn superseded(&self, records: &[PathRecord], newest: usize) -> (usize, u64) {
        let len = |r: &PathRecord| self.path(r).map_or(0, |p| u64::from(p.before) + 1);
        let mut newer = 0;
        let mut first = records.len();
        while first != 0 && newer < newest as u64 {
            first -= 1;
            newer += len(&records[first]);
        }
        (first, records[..first].iter().map(len).sum())
    }

    /// Returns the number of the records' branches of each kind.
    ///
    /// There are at most as many records as translated code adds before it is left.
    pub(crate) fn count(&self, records: &[PathRecord]) -> [u64; 8] {
        debug_assert!(records.len() <= PATH_RECORDS + 1);
        let (mut even, mut odd) = (0_u64, 0_u64);
        for path in records.iter().filter_map(|r| self.path(r)) {
            even += path.kinds & EVEN_KINDS;
            odd += path.kinds >> 8 & EVEN_KINDS;
        }
        std::array::from_fn(|kind| {
            let counts = if kind % 2 == 0 { even } else { odd };
            counts >> (16 * (kind / 2)) & 0xffff
        })
    }

    /// Stores the branches of records in `to`, as long as there is room for all branches of one.
    ///
    /// `end_stamp` is the time stamp at which the budget is used up. Returns the numbers of records
    /// and branches.
    pub(crate) fn expand(
        &self,
        records: &[PathRecord],
        end_stamp: u32,
        to: &mut [BranchWords],
    ) -> (usize, usize) {
        let mut free = to;
        let capacity = free.len();
        for (n, record) in records.iter().enumerate() {
            let Some(path) = self.path(record) else {
                debug_assert!(false, "a record has the number of a path");
                continue;
            };
            let (first, before) = (path.first as usize, path.before as usize);
            if free.len() <= before {
                return (n, capacity - free.len());
            }
            let (now, later) = std::mem::take(&mut free).split_at_mut(before + 1);
            let stamp = end_stamp.wrapping_sub(record.budget);
            if let (Some((last, others)), Some(branches)) = (
                now.split_last_mut(),
                self.branches.get(first..first + before),
            ) {
                for (other, branch) in others.iter_mut().zip(branches) {
                    *other = branch.words(branch.to, stamp);
                }
                let to = if path.indirect {
                    record.target
                } else {
                    path.last.to
                };
                *last = path.last.words(to, stamp);
            }
            free = later;
        }
        (records.len(), capacity - free.len())
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}
