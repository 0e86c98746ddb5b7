//! Why and how the dispatch loop is left.

use crate::code::OpId;
use crate::fault::{ExitReason, Fault};

/// What handlers report to the run loop.
#[derive(Debug)]
pub(crate) struct ExitState {
    /// The block must be left after the operation that runs, because the event state, the mode or
    /// the code may have changed.
    pub(crate) requested: bool,
    /// Why the dispatch loop was left last.
    pub(crate) reason: ExitReason,
    /// The fault, where the reason is [`ExitReason::Fault`].
    pub(crate) fault: Fault,
    /// The task was switched: the fault is one of the new task.
    pub(crate) switched_task: bool,
    /// RIP of the last software interrupt.
    pub(crate) software_rip: u64,
    /// Its operation.
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
