//! Buffers branches for the platform, and stores them in the BTS buffer.
//!
//! [`BranchBuffer::push`] compares the number of buffered branches with a limit, at which the
//! branch handlers must call `Core::handle_due_branches`. With BTS on, the limit is reached after
//! every branch, because the guest may read its records with the next instruction. Otherwise it is
//! reached when the platform has requested a report, or when the buffer is full.

#![expect(
    unsafe_code,
    reason = "a branch is written in three stores, and its fast BTS record through host addresses"
)]

use crate::memory::{load_u64, store_record, store_u64};
use crate::platform::{Branch, BranchClass, Observe};
use hindsight_cpu::branch::bts::{self, BtsFastPath};
use hindsight_translate::{BranchKind, BranchWords, RECORDED_BRANCHES, Translator};
use std::mem::offset_of;
use std::ops::Range;

/// Capacity of the buffer, a power of two: few enough branches for the L1 cache, and enough that
/// reporting them costs little.
const CAPACITY: usize = 1024;

/// The bit offset of a field in the word that follows the addresses.
const CLASS: usize = (offset_of!(Branch, class) - STAMP) * 8;
const CPL: usize = (offset_of!(Branch, cpl) - STAMP) * 8;
const TO_CPL: usize = (offset_of!(Branch, to_cpl) - STAMP) * 8;
const STAMP: usize = offset_of!(Branch, at);
const _: () = assert!(
    offset_of!(Branch, from) == 0
        && offset_of!(Branch, to) == 8
        && STAMP == 16
        && size_of::<Branch>() == 24
        && size_of::<BranchClass>() == 1
        && offset_of!(Branch, mispredicted) == 23
        && align_of::<Branch>() == 8
);

const NO_BRANCH: Branch = Branch::new(BranchClass::Far, 0, 0);

/// Where to store the next BTS records.
///
/// Valid until the TLB for writes evicts a page.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BtsTarget {
    /// [`Tlb::epoch`](crate::mmu::Tlb::epoch) for which it is valid; 0 for no target.
    pub(crate) epoch: u64,
    /// Host address of the four writable BTS fields of the DS management area.
    pub(crate) area: u64,
    /// Linear address of the page of the BTS buffer.
    pub(crate) page: u64,
    /// The difference between the host address and the linear address of the page.
    pub(crate) add: u64,
    /// Which records only have to be stored.
    pub(crate) fast_path: BtsFastPath,
}

/// How translated code records near branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BranchRecords {
    /// Not at all.
    None,
    /// In the branch buffer.
    Stamped,
    /// In the branch buffer, with conditional branches that are not taken.
    StampedAll,
    /// In the guest's BTS buffer.
    Bts,
    /// As paths, because only the newest branches must be reported, or only the number of branches.
    Paths,
    /// As paths, with conditional branches that are not taken.
    PathsAll,
    /// In a way that translated code does not support.
    Unsupported,
}

impl BranchRecords {
    /// Whether translated code records paths.
    pub(crate) fn are_paths(self) -> bool {
        matches!(self, Self::Paths | Self::PathsAll)
    }
}

/// The near branches of translated code, in the order of
/// [`BranchKind`](hindsight_translate::BranchKind).
const KINDS: [BranchClass; 8] = {
    let mut kinds = [BranchClass::Conditional; 8];
    kinds[BranchKind::DirectJump as usize] = BranchClass::DirectJump;
    kinds[BranchKind::IndirectJump as usize] = BranchClass::IndirectJump;
    kinds[BranchKind::DirectCall as usize] = BranchClass::DirectCall;
    kinds[BranchKind::CallNext as usize] = BranchClass::CallNext;
    kinds[BranchKind::IndirectCall as usize] = BranchClass::IndirectCall;
    kinds[BranchKind::Return as usize] = BranchClass::Return;
    kinds[BranchKind::NotTaken as usize] = BranchClass::NotTaken;
    kinds
};

/// Near branches of translated code that are reported by their number: by ring and kind.
pub(crate) type KindCounts = [[u64; 8]; 2];

/// Where translated code can store BTS records: host addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BtsWindow {
    /// Address of the next record.
    pub(crate) next: usize,
    /// The address from which on records need other work.
    pub(crate) end: usize,
    /// Address of the writable BTS fields of the DS management area.
    pub(crate) area: u64,
    /// The difference between host addresses and linear addresses.
    add: u64,
}

/// Branches that have not been reported to the platform.
///
/// Invariant: at most [`CAPACITY`] branches are in the buffer.
#[derive(Debug)]
pub(crate) struct BranchBuffer {
    observe: Observe,
    bts_target: BtsTarget,
    buffer: [Branch; CAPACITY],
    /// Number of branches in the buffer.
    count: usize,
    /// Number of branches at which the handlers must call `Core::handle_due_branches`.
    due: usize,
    /// Number of branches at which they must be reported.
    full: usize,
    /// Number of branches that were reported.
    reported: u64,
    /// Number of recorded branches that were not taken.
    not_taken: u64,
    /// The privilege level, in both of its fields of a near branch's last word.
    levels: u64,
    /// Branches that were only counted, and not reported.
    counts: KindCounts,
    /// Number of those branches.
    counted: u64,
}

impl BranchBuffer {
    pub(crate) fn new() -> Self {
        Self {
            observe: Observe::default(),
            bts_target: BtsTarget::default(),
            buffer: [NO_BRANCH; CAPACITY],
            count: 0,
            due: CAPACITY,
            full: CAPACITY,
            reported: 0,
            not_taken: 0,
            levels: 0,
            counts: [[0; 8]; 2],
            counted: 0,
        }
    }

    /// What the platform requests.
    #[inline(always)]
    pub(crate) fn observe(&self) -> &Observe {
        &self.observe
    }

    /// Whether branches must be recorded at all.
    pub(crate) fn records(&self) -> bool {
        self.observe.needs_branches()
    }

    /// Sets what the platform requests, and updates the buffer accordingly.
    pub(crate) fn set_observe(&mut self, observe: Observe) {
        self.observe = observe;
        self.forget_bts_target();
        self.schedule();
    }

    /// Sets the privilege level of near branches that are added from now on.
    pub(crate) fn set_cpl(&mut self, cpl: u8) {
        debug_assert!(cpl < 4);
        self.levels = u64::from(cpl) * (1 << CPL | 1 << TO_CPL);
    }

    /// Sets the numbers of branches at which the handlers must act and report.
    fn schedule(&mut self) {
        self.full = match self.observe.every as usize {
            0 => CAPACITY,
            n => n.min(CAPACITY),
        };
        self.due = if self.observe.bts.is_some() || !self.observe.branches {
            self.count + 1
        } else {
            self.full
        };
    }

    /// Invalidates the BTS target.
    ///
    /// Called when the privilege level, the mode, or who observes branches may have changed.
    pub(crate) fn forget_bts_target(&mut self) {
        self.bts_target = BtsTarget::default();
    }

    /// Sets the BTS target.
    ///
    /// # Safety
    /// While the TLB for writes has the epoch of the target, the addresses of the target must be
    /// those of writable guest memory: the BTS fields of the management area, and a page.
    pub(crate) unsafe fn set_bts_target(&mut self, target: BtsTarget) {
        debug_assert!(target.epoch != 0 && target.page & 0xfff == 0);
        self.bts_target = target;
    }

    /// Adds a near branch at the current privilege level.
    ///
    /// Returns true if the branch must be handled before the next instruction.
    #[inline(always)]
    pub(crate) fn push(&mut self, from: u64, to: u64, class: BranchClass, stamp: u32) -> bool {
        let rest = u64::from(stamp) | (class as u64) << CLASS | self.levels;
        let i = self.count;
        debug_assert!(i < CAPACITY);
        let branch = &raw mut self.buffer[i & (CAPACITY - 1)];
        // SAFETY: the three words are a `Branch`, as the constants check: `rest` has a valid class,
        // and its highest byte, `mispredicted`, is 0.
        unsafe { branch.cast::<[u64; 3]>().write([from, to, rest]) };
        self.count = i + 1;
        i + 1 >= self.due
    }

    /// Adds a conditional branch that was not taken, like [`BranchBuffer::push`].
    pub(crate) fn push_not_taken(&mut self, from: u64, to: u64, stamp: u32) -> bool {
        self.not_taken += 1;
        self.push(from, to, BranchClass::NotTaken, stamp)
    }

    /// Adds any branch; the buffer must not be full.
    pub(crate) fn push_far(&mut self, branch: Branch) {
        debug_assert!(self.count < CAPACITY);
        self.buffer[self.count & (CAPACITY - 1)] = branch;
        self.count += 1;
    }

    /// Stores the BTS record of a near branch of 64-bit code on the fast path.
    ///
    /// Returns false and stores nothing if the fast path does not apply.
    ///
    /// It applies if the record directly follows the previous one, reaches no page end, wrap or
    /// threshold, and nothing else requires the branch.
    #[inline(always)]
    pub(crate) fn store_near(&mut self, from: u64, to: u64, write_epoch: u64) -> bool {
        let target = &self.bts_target;
        if target.epoch != write_epoch {
            return false;
        }
        let area = target.area;
        // SAFETY: the contract of `set_bts_target`, for the epoch that was just compared.
        let index = unsafe { load_u64::<8>(area) };
        if index.wrapping_sub(target.page) > 4096 - bts::RECORD {
            return false;
        }
        // SAFETY: as above, for both.
        let maximum = || unsafe { load_u64::<16>(area) };
        // SAFETY: as above.
        let threshold = || unsafe { load_u64::<24>(area) };
        let Some(end) = target.fast_path.next_index(index, maximum, threshold) else {
            return false;
        };
        // SAFETY: as above; the record lies within the page, as just checked.
        unsafe {
            store_record(target.add, index, from, to);
            store_u64::<8>(area, end);
        }
        self.reported = self.reported.wrapping_add(1);
        true
    }

    /// Returns where BTS records can be stored without other work.
    ///
    /// `None` if there is no target for `write_epoch`, or the next record needs other work.
    pub(crate) fn bts_window(&self, write_epoch: u64) -> Option<BtsWindow> {
        let target = &self.bts_target;
        if target.epoch != write_epoch {
            return None;
        }
        let area = target.area;
        // SAFETY: the contract of `set_bts_target`, for the epoch that was just compared.
        let (index, maximum, threshold) = unsafe {
            (
                load_u64::<8>(area),
                load_u64::<16>(area),
                load_u64::<24>(area),
            )
        };
        let end = target
            .fast_path
            .end(maximum, threshold)
            .min(target.page + (4096 - bts::RECORD + 1));
        if index < target.page || index >= end {
            return None;
        }
        let host = |linear: u64| linear.wrapping_add(target.add);
        // Records must not overwrite the fields themselves.
        let fields = area..area + 32;
        if host(index) < fields.end && fields.start < host(end) + bts::RECORD {
            return None;
        }
        Some(BtsWindow {
            next: usize::try_from(host(index)).ok()?,
            end: usize::try_from(host(end)).ok()?,
            area,
            add: target.add,
        })
    }

    /// Updates the BTS index after records were stored in a window, up to a host address.
    ///
    /// # Safety
    /// Nothing may have changed the guest's memory since [`BranchBuffer::bts_window`] returned the
    /// window.
    pub(crate) unsafe fn stored_up_to(&mut self, window: &BtsWindow, next: usize) {
        let bytes = next.wrapping_sub(window.next);
        let index = (next as u64).wrapping_sub(window.add);
        debug_assert!((bytes as u64).is_multiple_of(bts::RECORD) && bytes < 4096 + 24);
        // SAFETY: the area is that of a target, and the guest's memory is still there.
        unsafe { store_u64::<8>(window.area, index) };
        self.reported = self.reported.wrapping_add(bytes as u64 / bts::RECORD);
    }

    /// Returns the addresses of the next free entry and of the limit.
    pub(crate) fn entries(&mut self) -> (usize, usize) {
        debug_assert!(self.count < CAPACITY && self.due <= CAPACITY);
        let start = self.buffer.as_mut_ptr().expose_provenance();
        let at = |count: usize| start + count * size_of::<Branch>();
        (at(self.count), at(self.due))
    }

    /// Counts branches that translated code has added, up to an entry's address.
    pub(crate) fn added_up_to(&mut self, next: usize) {
        let bytes = next.wrapping_sub(self.buffer.as_ptr().expose_provenance());
        let count = bytes / size_of::<Branch>();
        assert!(
            bytes.is_multiple_of(size_of::<Branch>()) && (self.count..=CAPACITY).contains(&count)
        );
        if self.observe.not_taken {
            let added = &self.buffer[self.count..count];
            let not_taken = added.iter().filter(|b| b.class == BranchClass::NotTaken);
            self.not_taken += not_taken.count() as u64;
        }
        self.count = count;
    }

    /// Adds the branches of the records `range` of translated code, as long as there is room.
    ///
    /// `end_stamp` is the time stamp at which the budget is used up. Returns the number of records.
    pub(crate) fn add_paths(
        &mut self,
        translator: &Translator,
        range: Range<usize>,
        end_stamp: u32,
    ) -> usize {
        let free = &mut self.buffer[self.count..];
        let (data, len) = (free.as_mut_ptr().cast::<BranchWords>(), free.len());
        // SAFETY: a branch is three words, as the constants above check, and the translator stores
        // only words of `last_word`, which have a valid class.
        let free = unsafe { std::slice::from_raw_parts_mut(data, len) };
        let (records, branches) = translator.expand(range, end_stamp, free);
        self.count += branches;
        records
    }

    /// Whether units may count branches: a report is not due before the next exit of a unit.
    pub(crate) fn counts_paths(&self) -> bool {
        let left = match self.observe.every {
            0 => u64::MAX,
            every => u64::from(every),
        };
        let pending = self.counted + self.count as u64;
        self.observe.counted && pending + CAPACITY as u64 + RECORDED_BRANCHES <= left
    }

    /// Counts branches of translated code, by kind.
    pub(crate) fn add_counts(&mut self, counts: &[u64; 8]) {
        let ring = usize::from(self.levels != 0);
        for (sum, count) in self.counts[ring].iter_mut().zip(counts) {
            *sum += count;
        }
        let all: u64 = counts.iter().sum();
        self.counted += all;
        self.reported = self.reported.wrapping_add(all);
        self.not_taken += counts[BranchKind::NotTaken as usize];
        if !self.counts_paths() {
            // The next branch of the interpreter is the last one before a report.
            self.due = self.count + 1;
        }
    }

    /// Returns and clears the branches that were only counted; `None` if there are none.
    pub(crate) fn take_counts(&mut self) -> Option<KindCounts> {
        (std::mem::take(&mut self.counted) != 0).then(|| std::mem::take(&mut self.counts))
    }

    /// The classes of the branches of [`BranchBuffer::take_counts`].
    pub(crate) const fn kinds() -> [BranchClass; 8] {
        KINDS
    }

    /// Counts taken branches that are reported by their number alone.
    pub(crate) fn skip(&mut self, count: u64) {
        self.reported = self.reported.wrapping_add(count);
    }

    /// Returns the last word of a branch of a class, without its time stamp.
    ///
    /// It is for a branch at the current privilege level.
    pub(crate) fn last_word(&self, class: BranchClass) -> u32 {
        let word = (class as u64) << CLASS | self.levels;
        u32::try_from(word >> 32).unwrap_or(0)
    }

    /// Returns the number of branches in the buffer.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.count
    }

    /// Whether the buffer is full.
    pub(crate) fn is_full(&self) -> bool {
        self.count >= CAPACITY
    }

    /// Whether branches must be reported.
    pub(crate) fn report_is_due(&self) -> bool {
        self.count >= self.full || self.counted != 0 && !self.counts_paths()
    }

    /// Returns the branch that was added last, if it was not reported yet.
    pub(crate) fn last(&self) -> Option<&Branch> {
        self.buffer.get(self.count.checked_sub(1)?)
    }

    /// Drops a branch that was handled, unless the platform requests branches.
    ///
    /// Returns whether another branch fits before a report is due.
    pub(crate) fn keep_handled(&mut self) -> bool {
        if !self.observe.branches {
            self.reported = self.reported.wrapping_add(self.count as u64);
            self.count = 0;
            return true;
        }
        self.schedule();
        !self.report_is_due()
    }

    /// Empties the buffer, and returns how many branches it had.
    ///
    /// They stay readable in [`BranchBuffer::emptied`].
    pub(crate) fn empty(&mut self) -> usize {
        debug_assert!(self.count <= CAPACITY);
        let count = std::mem::take(&mut self.count).min(CAPACITY);
        if count != 0 {
            self.reported = self.reported.wrapping_add(count as u64);
            self.schedule();
        }
        count
    }

    /// Returns the `count` branches that [`BranchBuffer::empty`] removed.
    pub(crate) fn emptied(&mut self, count: usize) -> &mut [Branch] {
        &mut self.buffer[..count]
    }

    /// Returns how many taken branches were recorded, modulo 2^64.
    pub(crate) fn taken(&self) -> u64 {
        let all = self.reported.wrapping_add(self.count as u64);
        all.wrapping_sub(self.not_taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(observe: Observe) -> BranchBuffer {
        let mut buffer = BranchBuffer::new();
        buffer.set_observe(observe);
        buffer
    }

    #[test]
    fn pushed_branch_has_all_its_fields() {
        let mut buffer = buffer(Observe::BRANCHES);
        buffer.set_cpl(3);
        assert!(!buffer.push(0x1000, 0x2000, BranchClass::Return, 0xffff_fff0));
        let expected = Branch {
            from: 0x1000,
            to: 0x2000,
            at: 0xffff_fff0,
            class: BranchClass::Return,
            cpl: 3,
            to_cpl: 3,
            mispredicted: false,
        };
        assert_eq!(buffer.last(), Some(&expected));
        let n = buffer.empty();
        assert_eq!(buffer.emptied(n), [expected]);
        assert_eq!((buffer.len(), buffer.last()), (0, None));
    }

    #[test]
    fn report_is_due_when_asked_for_or_full() {
        for (every, expected) in [(7, 7), (0, CAPACITY), (5000, CAPACITY)] {
            let mut observe = Observe::BRANCHES;
            observe.every = every;
            let mut buffer = buffer(observe);
            let mut pushed = 1;
            while !buffer.push(1, 2, BranchClass::DirectJump, 0) {
                pushed += 1;
            }
            assert_eq!(pushed, expected, "every {every}");
            assert!(buffer.report_is_due());
        }
    }

    #[test]
    fn branch_that_only_stepping_requires_is_dropped_once_handled() {
        let mut observe = Observe::default();
        observe.step_on_branch = true;
        let mut buffer = buffer(observe);
        assert!(
            buffer.push(1, 2, BranchClass::DirectJump, 0),
            "every one is due"
        );
        assert!(buffer.keep_handled());
        assert_eq!((buffer.len(), buffer.taken()), (0, 1));
    }

    #[test]
    fn branches_that_are_not_taken_do_not_count_as_taken() {
        let mut buffer = buffer(Observe::BRANCHES);
        buffer.push(1, 2, BranchClass::Conditional, 0);
        buffer.push_not_taken(3, 4, 0);
        assert_eq!(buffer.taken(), 1);
        buffer.empty();
        assert_eq!(buffer.taken(), 1);
    }
}
