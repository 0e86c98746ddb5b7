//! The lock and atomic types of run control: those of std, or with `--cfg loom` those of loom, which
//! explores every interleaving of a test's threads.

use std::sync::PoisonError;
#[cfg(not(loom))]
use std::time::Instant;

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, Ordering};
#[cfg(loom)]
pub use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(loom))]
pub use std::sync::{Condvar, Mutex, MutexGuard};

/// Locks `mutex`, whether or not a thread panicked while it held the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification.
pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification, until `deadline`. Returns `None` when the deadline has passed.
#[cfg(not(loom))]
pub fn wait_until<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Instant,
) -> Option<MutexGuard<'a, T>> {
    let left = deadline.checked_duration_since(Instant::now())?;
    let waited = condvar.wait_timeout(guard, left);
    Some(waited.unwrap_or_else(PoisonError::into_inner).0)
}
