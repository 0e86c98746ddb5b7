//! Counts how far the processor may run, and how far it has run.
//!
//! A run of the interpreter is divided into slices. A slice has a number of core cycles: one for
//! each retired instruction, and one for each iteration of a repeated string instruction after its
//! first. Entering a block subtracts all of its instructions from the budget at once, so that
//! counting costs nothing per instruction. If the block is left early, the instructions that did
//! not retire are added back.

#![expect(
    clippy::cast_possible_truncation,
    reason = "the time stamp of branches has 32 bits"
)]

/// Counts of the current slice, and totals of all slices before it.
#[derive(Debug)]
pub(crate) struct Progress {
    /// Cycles of the slice that no block has taken yet.
    ///
    /// A block takes the cycles of all its instructions when it begins. The value is negative only
    /// within a repeated string instruction, whose iterations take further cycles.
    budget: i64,
    /// Instructions from the general operation that runs to the end of its block, itself included;
    /// 0 outside such operations.
    remaining: u8,
    /// Retired instructions, modulo 2^32, once the whole budget of the slice is used.
    end_stamp: u32,
    /// Cycles of the slice.
    slice: i64,
    /// Cycles of the slice so far in which no instruction retired.
    extra: i64,
    /// Cycles of the slice that are reserved while one instruction is executed alone.
    reserve: i64,
    /// Cycles that may follow after the slice before the performance counters must be polled.
    beyond: i64,
    /// Retired instructions before the slice.
    retired_before: u64,
    /// Cycles before the slice in which no instruction retired.
    extra_before: u64,
}

/// What a slice used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SliceUse {
    /// Core cycles.
    pub(crate) cycles: i64,
    /// Retired instructions.
    pub(crate) retired: u64,
}

/// The state of a slice before [`Progress::isolate_instruction`].
#[derive(Debug)]
#[must_use]
pub(crate) struct Isolated {
    budget: i64,
    slice: i64,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self {
            budget: 0,
            remaining: 0,
            end_stamp: 0,
            slice: 0,
            extra: 0,
            reserve: 0,
            beyond: 0,
            retired_before: 0,
            extra_before: 0,
        }
    }

    /// Sets all counts, between slices.
    pub(crate) fn set_totals(&mut self, retired: u64, cycles: u64) {
        debug_assert_eq!((self.slice, self.extra), (0, 0), "no slice runs");
        self.retired_before = retired;
        self.extra_before = cycles.wrapping_sub(retired);
        self.update_end_stamp();
    }

    /// Begins a slice of at most `most` cycles.
    ///
    /// `rest` is the number of cycles that the run may still take. Later slices may take the
    /// others, without a poll of the counters before them.
    pub(crate) fn begin_slice(&mut self, rest: i64, most: i64) {
        debug_assert!(rest > 0 && most > 0);
        debug_assert_eq!((self.slice, self.extra), (0, 0), "the last slice was ended");
        self.set_slice(rest.min(most));
        self.beyond = rest - self.slice;
    }

    /// Ends the slice and adds what it used to the totals.
    pub(crate) fn end_slice(&mut self) -> SliceUse {
        debug_assert_eq!(self.reserve, 0, "no instruction is isolated");
        let cycles = self.slice - self.budget;
        let extra = std::mem::take(&mut self.extra);
        let retired = (cycles - extra).max(0).cast_unsigned();
        self.extra_before = self.extra_before.wrapping_add_signed(extra);
        self.retired_before = self.retired_before.wrapping_add(retired);
        self.set_slice(0);
        SliceUse { cycles, retired }
    }

    fn set_slice(&mut self, cycles: i64) {
        self.slice = cycles;
        self.budget = cycles;
        self.update_end_stamp();
    }

    fn update_end_stamp(&mut self) {
        let end = (self.slice - self.extra).cast_unsigned();
        self.end_stamp = self.retired_before.wrapping_add(end) as u32;
    }

    /// Cycles of the slice that no block has taken yet.
    pub(crate) fn budget(&self) -> i64 {
        self.budget
    }

    /// Sets the rest of the budget, after translated code has used it.
    pub(crate) fn set_budget(&mut self, budget: i64) {
        debug_assert!((0..=self.slice).contains(&budget));
        self.budget = budget;
    }

    /// Returns the retired instructions, modulo 2^32, once the whole budget is used.
    pub(crate) fn end_stamp(&self) -> u32 {
        self.end_stamp
    }

    /// Whether the slice has cycles left.
    pub(crate) fn has_budget(&self) -> bool {
        self.budget > 0
    }

    /// Whether the budget covers a block of `count` instructions.
    pub(crate) fn covers(&self, count: u32) -> bool {
        i64::from(count) <= self.budget
    }

    /// Whether a block that the budget does not cover may begin the next slice.
    ///
    /// It may if this slice has executed an instruction, and the counters need no poll before the
    /// end of the block.
    pub(crate) fn next_slice_covers(&self, count: u32) -> bool {
        self.budget < self.slice && i64::from(count) <= self.budget + self.beyond
    }

    /// Subtracts a block of `count` instructions from the budget.
    ///
    /// Returns false, and does nothing, if the budget does not cover them.
    #[inline(always)]
    pub(crate) fn take(&mut self, count: u32) -> bool {
        let budget = self.budget - i64::from(count);
        if budget < 0 {
            return false;
        }
        self.budget = budget;
        true
    }

    /// Adds instructions of a block that did not retire back to the budget.
    pub(crate) fn give_back(&mut self, instructions: u8) {
        self.budget += i64::from(instructions);
        debug_assert!(self.budget <= self.slice);
    }

    /// Begins an operation that may read the counts or take cycles within its block.
    #[inline(always)]
    pub(crate) fn begin_operation(&mut self, remaining: u8) {
        self.remaining = remaining;
    }

    /// Ends an operation that [`Progress::begin_operation`] began.
    pub(crate) fn end_operation(&mut self) {
        self.remaining = 0;
    }

    /// Makes the slice end after the next instruction, so that it is executed alone.
    pub(crate) fn isolate_instruction(&mut self) -> Isolated {
        debug_assert!(self.budget > 0 && self.reserve == 0);
        let isolated = Isolated {
            budget: self.budget,
            slice: self.slice,
        };
        self.set_slice(self.slice - self.budget + 1);
        self.budget = 1;
        self.reserve = isolated.budget - 1;
        isolated
    }

    /// Continues the slice after an instruction that was executed alone.
    pub(crate) fn rejoin(&mut self, isolated: Isolated) {
        self.budget += isolated.budget - 1;
        self.reserve = 0;
        self.slice = isolated.slice;
        self.update_end_stamp();
    }

    /// Returns the cycles of the slice so far in which no instruction retired.
    pub(crate) fn extra(&self) -> i64 {
        self.extra
    }

    /// Returns how many iterations the budget allows a repeated string instruction.
    ///
    /// The instruction's own cycle pays for one of them.
    pub(crate) fn affordable_iterations(&self) -> u64 {
        debug_assert!(self.remaining != 0, "an operation runs");
        let rest = self.budget + i64::from(self.remaining) + self.reserve;
        rest.max(0).cast_unsigned()
    }

    /// Subtracts iterations of a repeated string instruction from the budget.
    pub(crate) fn charge_iterations(&mut self, iterations: u64) {
        let cycles = iterations.cast_signed();
        debug_assert!(cycles >= 0);
        self.budget -= cycles;
        self.extra += cycles;
        self.update_end_stamp();
    }

    /// Ends a repeated string instruction, which retires.
    ///
    /// `before` was [`Progress::extra`] when it began or continued. One of the iterations since
    /// then is the instruction's own cycle. Returns whether the budget still covers the rest of the
    /// block.
    pub(crate) fn finish_repetition(&mut self, before: i64) -> bool {
        debug_assert!(before <= self.extra);
        if self.extra > before {
            self.extra -= 1;
            self.budget += 1;
            self.update_end_stamp();
        }
        self.budget >= 0 || self.remaining <= 1
    }

    /// Returns the time stamp of the branch that ends the current block.
    ///
    /// It is the number of instructions retired up to the end of the block, modulo 2^32.
    #[inline(always)]
    pub(crate) fn branch_stamp(&self) -> u32 {
        self.end_stamp
            .wrapping_sub(self.budget.cast_unsigned() as u32)
    }

    /// Returns the instructions retired in this slice, without the current one.
    pub(crate) fn retired_in_slice(&self) -> u64 {
        let retired = self.slice - self.budget - i64::from(self.remaining) - self.extra;
        retired.max(0).cast_unsigned()
    }

    /// Instructions retired before this slice.
    pub(crate) fn retired_before_slice(&self) -> u64 {
        self.retired_before
    }

    /// Returns the retired instructions, without the current one.
    pub(crate) fn retired(&self) -> u64 {
        self.retired_before.wrapping_add(self.retired_in_slice())
    }

    /// Returns the core cycles, without that of the current instruction.
    pub(crate) fn cycles(&self) -> u64 {
        let extra = self.extra_before.wrapping_add_signed(self.extra);
        self.retired().wrapping_add(extra)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_is_taken_whole_or_not_at_all() {
        let mut progress = Progress::new();
        progress.begin_slice(100, 10);
        assert!(progress.take(7) && !progress.take(4) && progress.take(3));
        assert!(!progress.has_budget());
        let used = SliceUse {
            cycles: 10,
            retired: 10,
        };
        assert_eq!(progress.end_slice(), used);
        assert_eq!((progress.retired(), progress.cycles()), (10, 10));
    }

    #[test]
    fn fault_gives_back_what_did_not_retire() {
        let mut progress = Progress::new();
        progress.begin_slice(100, 100);
        assert!(progress.take(8));
        progress.begin_operation(5);
        assert_eq!(progress.retired(), 3, "the fourth of eight runs");
        progress.give_back(5);
        progress.end_operation();
        assert_eq!(progress.end_slice().retired, 3);
    }

    #[test]
    fn iterations_beyond_the_first_are_cycles_that_retire_nothing() {
        let mut progress = Progress::new();
        progress.begin_slice(50, 50);
        assert!(progress.take(2));
        progress.begin_operation(2);
        let before = progress.extra();
        assert_eq!(progress.affordable_iterations(), 50);
        progress.charge_iterations(20);
        assert!(progress.finish_repetition(before));
        progress.end_operation();
        let used = progress.end_slice();
        assert_eq!((used.cycles, used.retired), (21, 2));
        assert_eq!((progress.retired(), progress.cycles()), (2, 21));
    }

    #[test]
    fn repetition_that_uses_up_the_budget_leaves_the_block() {
        let mut progress = Progress::new();
        progress.begin_slice(10, 10);
        assert!(progress.take(5));
        progress.begin_operation(5);
        let before = progress.extra();
        progress.charge_iterations(progress.affordable_iterations());
        assert!(
            !progress.finish_repetition(before),
            "four instructions wait"
        );
    }

    #[test]
    fn isolated_instruction_sees_the_reserve_and_the_slice_continues() {
        let mut progress = Progress::new();
        progress.begin_slice(30, 30);
        assert!(progress.take(4));
        let isolated = progress.isolate_instruction();
        assert!(progress.take(1));
        progress.begin_operation(1);
        assert_eq!(progress.retired(), 4);
        assert_eq!(progress.affordable_iterations(), 26);
        progress.end_operation();
        progress.rejoin(isolated);
        assert!(progress.take(25) && !progress.take(1));
        assert_eq!(progress.end_slice().retired, 30);
    }

    #[test]
    fn branch_stamp_counts_all_instructions_up_to_the_branch() {
        let mut progress = Progress::new();
        progress.set_totals(u64::from(u32::MAX), u64::from(u32::MAX) + 5);
        progress.begin_slice(10, 10);
        assert!(progress.take(3));
        assert_eq!(progress.branch_stamp(), 2, "modulo 2^32");
        assert_eq!(progress.cycles(), u64::from(u32::MAX) + 8);
    }

    #[test]
    fn next_slice_covers_a_block_only_if_this_one_has_run() {
        let mut progress = Progress::new();
        progress.begin_slice(20, 4);
        assert!(!progress.covers(6) && !progress.next_slice_covers(6));
        assert!(progress.take(2));
        assert!(progress.next_slice_covers(6) && !progress.next_slice_covers(19));
    }
}
