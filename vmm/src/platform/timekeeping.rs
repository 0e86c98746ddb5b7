//! The machine's clock, and what wakes the thread that fires its timers.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use hindsight_devices::clock::Clock;

use crate::sync::lock;

/// How often the timer thread interrupts a vCPU that waits for an interrupt window.
pub const WINDOW_POLL: Duration = Duration::from_millis(1);

/// Wakes the timer thread.
#[derive(Debug, Default)]
pub struct TimerBell {
    rung: Mutex<bool>,
    wake: Condvar,
    /// The thread sleeps longer than [`WINDOW_POLL`].
    sleeps_long: AtomicBool,
}

impl TimerBell {
    /// Wakes the timer thread: its next event may have become earlier.
    pub fn ring(&self) {
        *lock(&self.rung) = true;
        self.wake.notify_one();
    }

    /// Like [`TimerBell::ring`], unless the thread wakes within [`WINDOW_POLL`] anyway.
    fn ring_if_long(&self) {
        if self.sleeps_long.load(Ordering::SeqCst) {
            self.ring();
        }
    }

    /// Announces whether the next sleep is longer than [`WINDOW_POLL`].
    pub fn set_sleeps_long(&self, long: bool) {
        self.sleeps_long.store(long, Ordering::SeqCst);
    }

    /// Sleeps until rung, at most for `limit`.
    pub fn sleep(&self, limit: Option<Duration>) {
        let rung = lock(&self.rung);
        let silent = |rung: &mut bool| !*rung;
        let mut rung = match limit {
            None => self
                .wake
                .wait_while(rung, silent)
                .unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                let waited = self.wake.wait_timeout_while(rung, limit, silent);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        *rung = false;
    }
}

/// All guest-visible time, and the timer thread's bell.
#[derive(Debug)]
pub struct Timekeeping {
    /// The machine's clock.
    pub clock: Arc<Clock>,
    /// Wakes the timer thread.
    pub bell: Arc<TimerBell>,
    /// vCPUs that wait for KVM to open an interrupt window, one bit each.
    windows: AtomicU64,
}

impl Timekeeping {
    /// Timekeeping by `clock`.
    pub fn new(clock: Arc<Clock>, bell: Arc<TimerBell>) -> Self {
        Self {
            clock,
            bell,
            windows: AtomicU64::new(0),
        }
    }

    /// Starts or ends polling for an interrupt window of vCPU `id`. Some KVMs report windows late or
    /// never: while the vCPU waits for one, the timer thread kicks it out of KVM_RUN every
    /// [`WINDOW_POLL`], and the exit says whether it can be interrupted.
    pub fn poll_window(&self, id: usize, poll: bool) {
        let bit = 1 << id;
        let polled = self.windows.load(Ordering::Relaxed) & bit != 0;
        if polled == poll {
            return;
        }
        if poll {
            self.windows.fetch_or(bit, Ordering::SeqCst);
            self.bell.ring_if_long();
        } else {
            self.windows.fetch_and(!bit, Ordering::SeqCst);
        }
    }

    /// vCPUs whose interrupt windows are polled, one bit each.
    pub fn polled_windows(&self) -> u64 {
        self.windows.load(Ordering::SeqCst)
    }
}
