//! Why a deterministic run stopped, and how another thread stops it.

use hindsight_cpu::stops::StopHit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why [`super::DeterministicMachine::run_to`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStop {
    /// The machine reached the requested instruction count.
    Reached,
    /// The run ended before that; [`super::DeterministicMachine::take_outcome`] says how.
    Ended,
    /// A vCPU reached what [`super::DeterministicMachine::set_stops`] requests.
    Hit {
        /// Number of the vCPU.
        cpu: usize,
        /// What it reached.
        hit: StopHit,
    },
    /// An exception was delivered while [`super::DeterministicMachine::stop_at_exceptions`] is on.
    Delivered {
        /// Number of the vCPU.
        cpu: usize,
    },
    /// The guest cannot continue, and a debugger inspects it.
    Crashed {
        /// Number of the vCPU.
        cpu: usize,
    },
    /// The guest has ended the run, and a debugger holds it there: no instruction follows.
    AtEnd,
    /// [`StopHandle::stop`] was called, or a debugger pauses the machine. It can continue.
    Interrupted,
}

/// StopConditions [`super::DeterministicMachine::run_to`] from another thread.
#[derive(Clone, Debug, Default)]
pub struct StopHandle(Arc<AtomicBool>);

impl StopHandle {
    /// Makes the current or next run return within about ten thousand instructions.
    pub fn stop(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether a stop was requested; clears the request.
    pub(super) fn take(&self) -> bool {
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::SeqCst)
    }
}
