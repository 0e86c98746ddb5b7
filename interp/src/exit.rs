//! Why and how the dispatch loop is left.

use crate::code::OpId;
use crate::fault::{ExitReason, Fault};

/// Results that handlers report to the run loop.
#[derive(Debug)]
pub(crate) struct ExitState {
    /// Whether the block must be left after the current operation.
    ///
    /// The event state, the mode or the code may have changed.
    pub(crate) requested: bool,
    /// Why the dispatch loop was left last.
    pub(crate) reason: ExitReason,
    /// The fault, where the reason is [`ExitReason::Fault`].
    pub(crate) fault: Fault,
    /// Whether the task was switched: the fault is then one of the new task.
    pub(crate) switched_task: bool,
    /// RIP of the last software interrupt.
    pub(crate) software_rip: u64,
    /// Operation of the last software interrupt.
    pub(crate) software_op: OpId,
}

impl ExitState {
    pub(crate) fn new() -> Self {
        Self {
            requested: false,
            reason: ExitReason::Poll,
            fault: Fault::Unimplemented,
            switched_task: false,
            software_rip: 0,
            software_op: OpId::default(),
        }
    }
}
