//! The transaction of a processor: how deep it is nested, and what an abort restores.

use super::shared::{AccessState, Shared};
use crate::fault::Fault;
use crate::platform::AbortCause;
use crate::thunk::vectors::Vectors;
use hindsight_cpu::transaction::NEST_MAX;
use hindsight_regs::rflags::Rflags;
use std::sync::Arc;

/// The access or the instruction cannot be part of a transaction.
pub(crate) const NOT_ALLOWED: Fault = Fault::Abort(AbortCause::Instruction);

/// The transaction of a processor, if one is open.
#[derive(Debug)]
pub(crate) struct Transaction {
    /// How deep XBEGIN is nested; 0: none is open.
    depth: u8,
    /// The state before the outermost XBEGIN.
    pub(super) saved: Box<SavedState>,
    /// How the processor accesses memory, for the other processors.
    pub(super) access_state: Arc<AccessState>,
    /// A page walk has read an entry that the transaction has written.
    walked_own_write: bool,
    /// The next #DB to deliver interrupted a transaction.
    debugged: bool,
}

/// The state that an abort restores.
#[derive(Debug)]
pub(super) struct SavedState {
    pub(super) gpr: [u64; 16],
    pub(super) rflags: Rflags,
    pub(super) vec: Vectors,
    /// RIP of the XBEGIN.
    pub(super) rip: u64,
    /// RIP after an abort.
    pub(super) fallback: u64,
    /// Cycles at its start.
    pub(super) cycles: u64,
}

impl Transaction {
    pub(crate) fn new(access_state: Arc<AccessState>) -> Self {
        Self {
            depth: 0,
            saved: Box::new(SavedState {
                gpr: [0; 16],
                rflags: Rflags::FIXED,
                vec: Vectors::default(),
                rip: 0,
                fallback: 0,
                cycles: 0,
            }),
            access_state,
            walked_own_write: false,
            debugged: false,
        }
    }

    /// Whether a transaction is open.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.depth != 0
    }

    /// Whether it is nested.
    pub(super) fn is_nested(&self) -> bool {
        self.depth > 1
    }

    /// Enters one more level of nesting. Returns whether it is the outermost one.
    ///
    /// # Errors
    /// The abort of a transaction that is nested too deep.
    pub(super) fn nest(&mut self) -> Result<bool, Fault> {
        debug_assert!(self.depth <= NEST_MAX);
        if self.depth == NEST_MAX {
            return Err(Fault::Abort(AbortCause::Nesting));
        }
        self.depth += 1;
        if self.depth == 1 {
            self.walked_own_write = false;
        }
        Ok(self.depth == 1)
    }

    /// Leaves a nested level. Returns false, and leaves none, if only the outermost one is open.
    pub(super) fn unnest(&mut self) -> bool {
        debug_assert!(self.is_open());
        let nested = self.is_nested();
        if nested {
            self.depth -= 1;
        }
        nested
    }

    /// Leaves all levels.
    pub(super) fn close(&mut self) {
        self.depth = 0;
    }

    /// Records that the next #DB interrupted this transaction.
    pub(super) fn set_debugged(&mut self) {
        self.debugged = true;
    }

    /// Whether the #DB to deliver interrupted a transaction. Resets that.
    pub(super) fn take_debugged(&mut self) -> bool {
        std::mem::take(&mut self.debugged)
    }

    /// Records that a page walk reads the paging-structure entry at `gpa`.
    pub(crate) fn walk_reads(&mut self, shared: &Shared, gpa: u64) {
        if self.is_open() && shared.wrote(&self.access_state, gpa, 1) {
            self.walked_own_write = true;
        }
    }

    /// Checks the entries that the last page walk read.
    ///
    /// # Errors
    /// The abort of a transaction that has written one of the entries.
    pub(crate) fn check_walk(&mut self) -> Result<(), Fault> {
        if std::mem::take(&mut self.walked_own_write) {
            return Err(NOT_ALLOWED);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_is_limited_and_only_the_first_level_is_the_outermost() {
        let shared = Shared::new();
        let mut transaction = Transaction::new(shared.add_processor());
        assert_eq!(transaction.nest(), Ok(true));
        for _ in 1..NEST_MAX {
            assert_eq!(transaction.nest(), Ok(false));
        }
        let too_deep = Err(Fault::Abort(AbortCause::Nesting));
        assert_eq!(transaction.nest(), too_deep);
        for _ in 1..NEST_MAX {
            assert!(transaction.unnest());
        }
        assert!(!transaction.unnest() && transaction.is_open());
        transaction.close();
        assert!(!transaction.is_open());
    }

    #[test]
    fn walk_over_an_entry_that_the_transaction_wrote_aborts() {
        let shared = Shared::new();
        let access_state = shared.add_processor();
        let mut transaction = Transaction::new(Arc::clone(&access_state));
        assert_eq!(transaction.nest(), Ok(true));
        assert!(shared.begin(&access_state));
        assert_eq!(shared.write(&access_state, 0x1000, &[1]), Ok(()));
        transaction.walk_reads(&shared, 0x2000);
        assert_eq!(transaction.check_walk(), Ok(()));
        transaction.walk_reads(&shared, 0x1008);
        assert_eq!(transaction.check_walk(), Err(NOT_ALLOWED));
        assert_eq!(transaction.check_walk(), Ok(()), "once");
    }
}
