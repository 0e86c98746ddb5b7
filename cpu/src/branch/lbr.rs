//! The LBR stack. SDM Vol. 3B, "LBR Stack" and "LBR Stack and IA32_DEBUGCTL MSR".

use hindsight_regs::branch::{CYC_CNT_MAX, LBR_DEPTH, LbrCtl, LbrInfo, LbrSelect};

use super::record_format::RecordFormat;
use super::{Branch, BranchClass};
use crate::model::LbrModel;
use crate::uarch::predictor::PENALTY;

/// One entry of the LBR stack: the values of its three MSRs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LbrEntry {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) info: u64,
}

/// The LBR stack, its filter and the last exception record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lbr {
    pub(super) format: RecordFormat,
    /// Number of entries, a power of 2; IA32_LBR_DEPTH.
    pub(super) depth: usize,
    /// The first `depth` of these exist.
    pub(super) entries: [LbrEntry; LBR_DEPTH],
    /// Index of the newest entry, below `depth`.
    pub(super) tos: usize,
    /// MSR_LBR_SELECT, or what IA32_LBR_CTL means in its terms.
    pub(super) select: LbrSelect,
    /// The branch recorded last, also if it was popped, without flags in FROM: LER gets it.
    pub(super) last: LbrEntry,
    pub(super) ler: LbrEntry,
    /// [`Branch::at`] of the last update, from which CYC_CNT counts.
    pub(super) since: u32,
    /// Cycles lost to mispredictions since then.
    pub(super) lost: u32,
    /// The next branches are inside a transaction. Not saved: no transaction outlives a run.
    pub(super) in_transaction: bool,
}

/// The filter bit of a class; `None` for a class that is never recorded.
const fn filter(class: BranchClass) -> Option<LbrSelect> {
    Some(match class {
        BranchClass::Conditional => LbrSelect::JCC,
        BranchClass::DirectJump => LbrSelect::NEAR_REL_JMP,
        BranchClass::IndirectJump => LbrSelect::NEAR_IND_JMP,
        BranchClass::DirectCall | BranchClass::CallNext => LbrSelect::NEAR_REL_CALL,
        BranchClass::IndirectCall => LbrSelect::NEAR_IND_CALL,
        BranchClass::Return => LbrSelect::NEAR_RET,
        BranchClass::Far
        | BranchClass::Abort
        | BranchClass::SoftwareInterrupt
        | BranchClass::Exception
        | BranchClass::Interrupt => LbrSelect::FAR_BRANCH,
        BranchClass::Debug | BranchClass::NotTaken => return None,
    })
}

/// Whether the class updates the last exception record (rules LER-01, LER-03, LER-08).
const fn is_event(class: BranchClass) -> bool {
    matches!(
        class,
        BranchClass::Exception | BranchClass::Interrupt | BranchClass::SoftwareInterrupt
    )
}

/// The classes and levels that IA32_LBR_CTL does not record.
pub(super) fn suppressed(control: LbrCtl) -> LbrSelect {
    let mut select = LbrSelect::empty();
    for (pass, suppress) in [
        (LbrCtl::OS, LbrSelect::CPL_EQ_0),
        (LbrCtl::USR, LbrSelect::CPL_NEQ_0),
        (LbrCtl::JCC, LbrSelect::JCC),
        (LbrCtl::NEAR_REL_JMP, LbrSelect::NEAR_REL_JMP),
        (LbrCtl::NEAR_IND_JMP, LbrSelect::NEAR_IND_JMP),
        (LbrCtl::NEAR_REL_CALL, LbrSelect::NEAR_REL_CALL),
        (LbrCtl::NEAR_IND_CALL, LbrSelect::NEAR_IND_CALL),
        (LbrCtl::NEAR_RET, LbrSelect::NEAR_RET),
        (LbrCtl::OTHER_BRANCH, LbrSelect::FAR_BRANCH),
    ] {
        select.set(suppress, !control.contains(pass));
    }
    let call_stack = control.contains(LbrCtl::CALL_STACK);
    select.set(LbrSelect::EN_CALLSTACK, call_stack);
    select
}

/// The bit that suppresses branches that end at this privilege level.
const fn level(cpl: u8) -> LbrSelect {
    if cpl == 0 {
        LbrSelect::CPL_EQ_0
    } else {
        LbrSelect::CPL_NEQ_0
    }
}

/// Number of leading branches whose records in a stack of `depth` entries later plain branches of
/// the batch overwrite.
fn overwritten(batch: &[Branch], depth: usize) -> Option<usize> {
    let mut plain = batch.iter().enumerate().rev().filter(|(_, b)| is_plain(b));
    Some(plain.nth(depth)?.0 + 1)
}

/// The set of classes that occur: bit n for class n.
fn classes(branches: &[Branch]) -> u32 {
    branches
        .iter()
        .fold(0, |classes, b| classes | 1 << b.class as u32)
}

/// Whether the branch is recorded without a change of the last exception record.
fn is_plain(branch: &Branch) -> bool {
    PLAIN >> branch.class as u32 & 1 != 0
}

/// The set of classes whose branches are recorded without a change of the last exception record.
const PLAIN: u32 = 1 << BranchClass::Conditional as u32
    | 1 << BranchClass::DirectJump as u32
    | 1 << BranchClass::IndirectJump as u32
    | 1 << BranchClass::DirectCall as u32
    | 1 << BranchClass::CallNext as u32
    | 1 << BranchClass::IndirectCall as u32
    | 1 << BranchClass::Return as u32
    | 1 << BranchClass::Far as u32
    | 1 << BranchClass::Abort as u32;

/// The set of classes for which [`is_event`] holds.
const EVENTS: u32 = 1 << BranchClass::Exception as u32
    | 1 << BranchClass::Interrupt as u32
    | 1 << BranchClass::SoftwareInterrupt as u32;

impl Lbr {
    pub(super) const fn new(model: &LbrModel, transactions: bool) -> Self {
        debug_assert!(model.depth.is_power_of_two() && model.depth <= LBR_DEPTH);
        let empty = LbrEntry {
            from: 0,
            to: 0,
            info: 0,
        };
        Self {
            format: RecordFormat::of(model, transactions),
            depth: model.depth,
            entries: [empty; LBR_DEPTH],
            tos: 0,
            select: LbrSelect::empty(),
            last: empty,
            ler: empty,
            since: 0,
            lost: 0,
            in_transaction: false,
        }
    }

    /// The index of an entry, modulo the number of entries.
    pub(super) const fn wrap(&self, index: usize) -> usize {
        index & (self.depth - 1) & (LBR_DEPTH - 1)
    }

    /// Records all branches of a batch, in order.
    pub(super) fn record(&mut self, batch: &[Branch]) {
        let mut batch = batch;
        // Fast path: of a long batch only the last branches stay, unless LER needs an earlier one.
        if self.select.is_empty()
            && let Some(at) = overwritten(batch, self.depth)
        {
            let (old, new) = batch.split_at(at);
            // An event in `new` may need the cycles of a branch in `old` for IA32_LER_INFO.
            let needs_info =
                self.format == RecordFormat::Architectural && classes(new) & EVENTS != 0;
            let recorded = old.iter().filter(|b| is_plain(b)).count();
            if classes(old) & EVENTS == 0 && !needs_info {
                self.skip(old, recorded);
                batch = new;
            }
        }
        let all_plain = self.select.is_empty() && classes(batch) & !PLAIN == 0;
        for branch in batch {
            if all_plain {
                self.add_penalty(branch);
                self.push(branch);
            } else {
                self.record_one(branch);
            }
        }
    }

    /// The number of near branches after which nothing is left of older ones; 0 if a filter may drop
    /// branches.
    pub(super) fn newest(&self) -> u32 {
        if self.select.is_empty() {
            // CYC_CNT of the oldest entry counts from one more branch.
            u32::try_from(self.depth + 1).unwrap_or(0)
        } else {
            0
        }
    }

    /// Accounts for near branches whose records the next ones overwrite: [`Lbr::newest`] or more.
    pub(super) fn skip_overwritten(&mut self, count: u64) {
        let entries = count % self.depth as u64;
        self.tos = self.wrap(self.tos + usize::try_from(entries).unwrap_or(0));
    }

    /// Accounts for branches whose `recorded` records will be overwritten; none is an event.
    fn skip(&mut self, old: &[Branch], recorded: usize) {
        self.tos = self.wrap(self.tos + recorded);
        let newest = old.iter().rposition(is_plain);
        if let Some(b) = newest.and_then(|at| old.get(at)) {
            // Of architectural LBR a later branch replaces it before an event.
            self.last = LbrEntry {
                from: b.from,
                to: b.to,
                info: 0,
            };
            (self.since, self.lost) = (b.at, 0);
        }
        let after = newest.map_or(0, |at| at + 1);
        for _ in old[after..].iter().filter(|b| b.mispredicted) {
            self.lost = self.lost.saturating_add(PENALTY);
        }
    }

    fn record_one(&mut self, branch: &Branch) {
        self.add_penalty(branch);
        let Some(class) = filter(branch.class) else {
            return;
        };
        if is_event(branch.class) {
            self.ler = self.last;
        }
        if self.select.intersects(class.union(level(branch.to_cpl))) {
            return;
        }
        if self.select.contains(LbrSelect::EN_CALLSTACK) {
            match branch.class {
                BranchClass::Return => return self.pop(branch),
                BranchClass::CallNext => return,
                _ => {}
            }
        }
        let hidden = self.select.contains(level(branch.cpl));
        if hidden && self.format == RecordFormat::Architectural {
            // The source is at a level that is not recorded.
            return self.push(&Branch {
                from: u64::MAX,
                ..*branch
            });
        }
        self.push(branch);
    }

    /// Adds the cycles that a misprediction costs.
    fn add_penalty(&mut self, branch: &Branch) {
        if branch.mispredicted {
            self.lost = self.lost.saturating_add(PENALTY);
        }
    }

    fn push(&mut self, branch: &Branch) {
        debug_assert!(self.tos < self.depth, "TOS indexes the stack");
        self.tos = self.wrap(self.tos + 1);
        let cycles = u64::from(branch.at.wrapping_sub(self.since)) + u64::from(self.lost);
        let mut flags = LbrInfo::empty();
        flags.set(LbrInfo::MISPRED, branch.mispredicted);
        flags.set(LbrInfo::IN_TSX, self.in_transaction);
        flags.set(LbrInfo::TSX_ABORT, branch.class == BranchClass::Abort);
        (self.since, self.lost) = (branch.at, 0);
        let cycles = cycles.min(CYC_CNT_MAX);
        let (from, info) = self.format.record(branch.class, branch.from, flags, cycles);
        let last_info = match self.format {
            RecordFormat::Architectural => info,
            _ => 0,
        };
        self.last = LbrEntry {
            from: branch.from,
            to: branch.to,
            info: last_info,
        };
        self.entries[self.tos] = LbrEntry {
            from,
            to: branch.to,
            info,
        };
    }

    /// Zeroes the newest entry and decrements TOS (rules LSEL-12 to LSEL-14).
    fn pop(&mut self, branch: &Branch) {
        debug_assert!(self.tos < self.depth, "TOS indexes the stack");
        self.entries[self.tos] = LbrEntry::default();
        self.tos = self.wrap(self.tos + self.depth - 1);
        (self.since, self.lost) = (branch.at, 0);
    }
}
