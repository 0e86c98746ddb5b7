//! One processor's handle on guest memory.
//!
//! It has the processor's bit in the code marks of pages, and its position in the log of code
//! changes.

use super::Memory;
use std::ops::Deref;
use std::sync::Arc;

/// One processor's handle on guest memory.
#[derive(Debug)]
pub(crate) struct MemoryHandle {
    memory: Arc<Memory>,
    /// The processor's bit in the code marks of pages.
    code_mark: u64,
    /// Number of entries of the log of code changes that this processor has applied.
    log_position: u64,
    /// Number of code pages when the write TLB was last flushed because of new ones.
    code_epoch: u64,
}

/// Changes that other processors and devices made to code pages.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CodeChanges {
    /// Pages have become code pages: the write TLB must no longer contain them.
    pub(crate) new_code_pages: bool,
    /// Ranges of code pages that were written, as address and length; `None` if some are unknown.
    pub(crate) written: Option<Vec<(u64, usize)>>,
}

impl Deref for MemoryHandle {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.memory
    }
}

impl MemoryHandle {
    /// Creates a handle for a further processor.
    pub(crate) fn new(memory: Arc<Memory>) -> Self {
        Self {
            code_mark: memory.join(),
            log_position: memory.log_len(),
            code_epoch: memory.code_epoch(),
            memory,
        }
    }

    /// The memory that this handle refers to.
    pub(crate) fn shared_memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Marks a page: this processor has decoded code of it.
    pub(crate) fn mark_code(&self, gpa: u64) {
        self.memory.mark_code(gpa, self.code_mark);
    }

    /// Removes this processor's mark from a page.
    pub(crate) fn unmark_code(&self, gpa: u64) {
        self.memory.unmark_code(gpa, self.code_mark);
    }

    /// Whether a page with these code marks holds code that another processor has decoded.
    pub(crate) fn is_others_code(&self, marks: u64) -> bool {
        marks & !self.code_mark != 0
    }

    /// Whether there are changes for [`MemoryHandle::take_code_changes`].
    pub(crate) fn has_code_changes(&self) -> bool {
        self.memory.code_epoch() != self.code_epoch || self.memory.log_len() != self.log_position
    }

    /// Returns the changes since the last call; `None` if there are none.
    pub(crate) fn take_code_changes(&mut self) -> Option<CodeChanges> {
        let epoch = self.memory.code_epoch();
        let len = self.memory.log_len();
        if epoch == self.code_epoch && len == self.log_position {
            return None;
        }
        let changes = CodeChanges {
            new_code_pages: epoch != self.code_epoch,
            written: if len == self.log_position {
                Some(Vec::new())
            } else {
                self.memory.log_since(self.log_position)
            },
        };
        debug_assert!(epoch >= self.code_epoch && len >= self.log_position);
        self.code_epoch = epoch;
        self.log_position = len;
        Some(changes)
    }
}
