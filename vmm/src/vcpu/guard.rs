//! Leaving a processor's run loop in order.

use std::sync::Arc;

use crate::machine::{Board, MachineError, Outcome};

/// Leaves the run loop in order, whichever way it ends. A panic in there would be a flaw of ours;
/// it ends the machine instead of leaving the other threads to wait for this one.
pub(super) struct LoopGuard<'a> {
    pub(super) id: usize,
    pub(super) board: &'a Arc<Board>,
}

impl Drop for LoopGuard<'_> {
    fn drop(&mut self) {
        self.board.control.doorbell(self.id).set_kicker(None);
        self.board.control.leave();
        if std::thread::panicking() {
            let error = Box::new(MachineError::Panicked);
            self.board.finish(Outcome::Failed(error));
        }
    }
}
