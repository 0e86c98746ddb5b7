//! The thread that lets time pass for the devices.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::{Board, MachineError, Outcome};
use crate::vcpu::control::lock;

/// How often a processor that waits for an interrupt window is looked at.
const WINDOW_POLL: Duration = Duration::from_millis(1);

/// The shortest sleep: a guest that programs timers of nanoseconds must not keep a host processor
/// busy. Periods that pass meanwhile merge, as on a slow processor.
const SLEEP_MIN: Duration = Duration::from_micros(20);

/// Wakes the timer thread.
#[derive(Debug, Default)]
pub(super) struct TimerBell {
    rung: Mutex<bool>,
    wake: Condvar,
    /// The thread sleeps longer than [`WINDOW_POLL`].
    long: AtomicBool,
}

impl TimerBell {
    /// The next event may have become earlier.
    pub(super) fn ring(&self) {
        *lock(&self.rung) = true;
        self.wake.notify_one();
    }

    /// As [`TimerBell::ring`], unless the thread looks round soon anyway.
    pub(super) fn ring_if_long(&self) {
        if self.long.load(Ordering::SeqCst) {
            self.ring();
        }
    }

    fn sleep(&self, limit: Option<Duration>) {
        let rung = lock(&self.rung);
        let quiet = |rung: &mut bool| !*rung;
        let mut rung = match limit {
            None => self
                .wake
                .wait_while(rung, quiet)
                .unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                let waited = self.wake.wait_timeout_while(rung, limit, quiet);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        *rung = false;
    }
}

/// Ends the machine if the timer thread panics, which would be a flaw of ours: a guest without
/// time hangs.
struct Guard<'a>(&'a Board);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let error = Box::new(MachineError::Panicked);
            self.0.finish(Outcome::Failed(error));
        }
    }
}

/// Fires what is due until the machine stops.
pub(super) fn thread(board: &Board) {
    let _guard = Guard(board);
    while !board.control.is_stopped() {
        let now = board.clock.now();
        board.irq.advance(now);
        let windows = board.windows.load(Ordering::SeqCst);
        for id in (0..64).filter(|id| windows & 1 << id != 0) {
            board.control.doorbell(id).ring();
        }
        // A paused clock does not move: nothing becomes due until somebody resumes it and rings.
        let next_event = board.irq.next_event().filter(|_| !board.clock.is_paused());
        let until = next_event.map(|due| {
            Duration::from_nanos(
                board
                    .clock
                    .ns_from_ticks(due.saturating_sub(board.clock.now())),
            )
        });
        let poll = (windows != 0).then_some(WINDOW_POLL);
        let modes = board.modes.tick();
        let limit = until.into_iter().chain(poll).chain(modes).min();
        let long = limit.is_none_or(|limit| limit > WINDOW_POLL);
        board.timer.long.store(long, Ordering::SeqCst);
        if long && board.windows.load(Ordering::SeqCst) != windows {
            continue;
        }
        board.timer.sleep(limit.map(|limit| limit.max(SLEEP_MIN)));
    }
}
