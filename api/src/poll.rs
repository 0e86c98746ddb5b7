//! Stops a machine from other threads, and interrupts its runs for a poll function.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hindsight_vmm::deterministic;

/// The time between two calls of a poll function.
const TICK: Duration = Duration::from_millis(100);

/// Stops a machine from another thread.
#[derive(Clone, Debug)]
pub struct StopHandle {
    pub(crate) machine: deterministic::StopHandle,
    /// Tells this stop from the interruptions of a [`Ticker`].
    pub(crate) stopped: Arc<AtomicBool>,
}

impl StopHandle {
    /// Makes the current or next run stop within about ten thousand instructions.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.machine.stop();
    }
}

/// A poll function, and what interrupts runs for it.
pub(crate) struct Poll {
    pub(crate) function: Box<dyn FnMut() -> bool + Send>,
    pub(crate) ticker: Ticker,
}

/// A thread that interrupts runs every [`TICK`]. A guest can spend any time without the retirement of
/// an instruction, so counting these is not enough.
pub(crate) struct Ticker {
    running: Arc<AtomicBool>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    pub(crate) fn start(machine: deterministic::StopHandle) -> Self {
        let (running, ends) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (runs, end) = (Arc::clone(&running), Arc::<AtomicBool>::clone(&ends));
        let thread = thread::spawn(move || {
            while !end.load(Ordering::SeqCst) {
                thread::park_timeout(TICK);
                if runs.load(Ordering::SeqCst) {
                    machine.stop();
                }
            }
        });
        Self {
            running,
            ends,
            thread: Some(thread),
        }
    }

    /// Interrupts what runs from now on, until the returned value is dropped.
    pub(crate) fn begin(&self) -> Running {
        self.running.store(true, Ordering::SeqCst);
        Running(self.running.clone())
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It cannot panic.
            let _ = thread.join();
        }
    }
}

/// While this exists, a machine runs.
pub(crate) struct Running(Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
