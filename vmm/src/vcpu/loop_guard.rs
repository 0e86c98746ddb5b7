//! Leaving a vCPU thread's run loop in order.

use super::board::Board;
use super::run_control::RunError;

/// Leaves the run loop in order when it is dropped, whichever way the loop ends. A panic inside is a
/// bug of the monitor; the guard ends the machine, so that the other threads do not wait for this one.
#[derive(Debug)]
pub struct LoopGuard<'a> {
    /// The vCPU.
    pub id: usize,
    /// Its machine.
    pub board: &'a Board,
}

impl Drop for LoopGuard<'_> {
    fn drop(&mut self) {
        let run = &self.board.run;
        run.vcpus.doorbell(self.id).set_kicker(None);
        run.vcpus.leave();
        if std::thread::panicking() {
            tracing::error!(
                "the thread of vCPU {} panicked: ending the machine",
                self.id
            );
            run.finish(RunError::Panicked);
        }
    }
}
