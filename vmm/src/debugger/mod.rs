//! A machine as a debugger's server sees it: [`hindsight_gdb::DebugTarget`] for a [`Board`].
//!
//! Nothing else in the monitor knows the server. Whatever a client sets, no guest can see: breakpoints
//! are the engine's, never changes of guest memory or of the guest's debug registers.

mod abilities;
mod commands;
mod engine;
mod irq_text;
mod stops;
mod target;
mod trace;
mod trace_command;

use std::fmt;
use std::io::{self, Write as _};
use std::sync::Arc;

use hindsight_gdb::{GdbServer, Listener};

use crate::sandbox::{ThreadKind, enter};
use crate::vcpu::board::Board;
use target::MachineTarget;

pub use trace::DebuggerTrace;

/// Writes a picture of the machine's screen to the file that the run has for it.
pub type Screendump = Box<dyn FnMut() -> anyhow::Result<()> + Send>;

/// Presses and releases keys, given as scan codes of set 1. Returns how many bytes the keyboard took.
pub type SendKey = Box<dyn Fn(&[u8]) -> usize + Send>;

/// What of a run debuggers may have written.
#[derive(Default)]
pub struct DebuggerFiles {
    /// Writes a picture of the screen; `None` if the run has no file for it.
    pub screendump: Option<Screendump>,
    /// The file for traces, if the run has one.
    pub trace: Option<DebuggerTrace>,
    /// Presses keys; `None` if the machine has no keyboard, or the run takes no input.
    pub sendkey: Option<SendKey>,
}

impl fmt::Debug for DebuggerFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DebuggerFiles")
            .field("trace", &self.trace)
            .finish_non_exhaustive()
    }
}

/// Serves debuggers that connect at `listener`. Resumes the machine, unless it is to `wait` for the
/// first of them. Monitor commands write to `files`.
///
/// From now on, a vCPU whose guest cannot continue waits for a debugger.
///
/// # Errors
///
/// When the host has no more threads or file descriptors.
pub fn serve(
    board: &Arc<Board>,
    listener: Listener,
    wait: bool,
    files: DebuggerFiles,
) -> io::Result<GdbServer> {
    board.run.stops.request();
    if !wait {
        board.resume();
    }
    let target = Box::new(MachineTarget::new(board.clone(), wait, files));
    let report = |message: &str| {
        // Without stderr there is nowhere to report to.
        let _ = io::stderr().write_all(message.as_bytes());
    };
    GdbServer::start_with(target, listener, report, || enter(ThreadKind::Debugger))
}
