//! Converts errors to error numbers, because most replies carry no text.

use gdbstub::target::TargetError as StubError;

use crate::debugger::{DebugError, Debugger};
use crate::target::TargetError;

/// EINVAL.
pub(crate) const INVALID: u8 = 22;

/// The number of an error, in Linux's terms.
pub(crate) fn of(error: &DebugError) -> u8 {
    tracing::debug!(target: "gdb", "{error}");
    match error {
        // EFAULT.
        DebugError::NotMemory(_) => 14,
        // ESRCH.
        DebugError::Target(TargetError::Ended) => 3,
        // EBUSY.
        DebugError::Running => 16,
        // EOPNOTSUPP.
        DebugError::Target(TargetError::Unsupported(_))
        | DebugError::Unavailable(_)
        | DebugError::NoBranchTrace => 95,
        _ => INVALID,
    }
}

impl Debugger {
    /// The error as `gdbstub` takes it without ending the session. Its text is kept for the reply.
    pub(super) fn refuse(&mut self, error: DebugError) -> StubError<DebugError> {
        let errno = of(&error);
        self.error_text = Some(error.to_string());
        StubError::Errno(errno)
    }
}
