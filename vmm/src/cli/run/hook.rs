//! The functions that another command adds to a run.

use std::path::Path;

use crate::cli::config::RunConfig;
use crate::debugger::DebuggerTrace;
use crate::machine::Machine;

/// Follows a run from its configuration to its end.
pub(in crate::cli) trait RunHook {
    /// Checks its options against a guest with this image.
    ///
    /// # Errors
    ///
    /// When they do not go together; the run does not start then.
    fn check(&mut self, config: &RunConfig, image: (&Path, &[u8])) -> anyhow::Result<()>;

    /// Prepares a machine that is about to run, and opens what it writes to.
    ///
    /// # Errors
    ///
    /// When the run cannot be followed.
    fn start(&mut self, machine: &mut Machine) -> anyhow::Result<()>;

    /// Completes its work when the run has ended.
    ///
    /// # Errors
    ///
    /// When that fails, which becomes the result of the run.
    fn finish(&mut self) -> anyhow::Result<()>;

    /// The file of the run for the traces of its debuggers, from [`RunHook::start`] on.
    fn debugger_trace(&self) -> Option<DebuggerTrace> {
        None
    }
}
