//! A guard that takes a vCPU out of run control when its run loop ends.

use super::board::Board;
use super::run_control::RunError;

/// Takes the vCPU out of run control when it is dropped, however the run loop ends.
///
/// If the thread panics, the guard ends the machine: the other threads would wait for this one.
#[derive(Debug)]
pub struct LoopGuard<'a> {
    /// The vCPU.
    pub id: usize,
    /// The vCPU's machine.
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
