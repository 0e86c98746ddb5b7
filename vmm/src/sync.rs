//! Mutexes that a panic in another thread does not poison, and the lock types that loom can check.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, even if a thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lock and atomic types of run control: those of std, or with `--cfg loom` those of loom, which
/// explores every interleaving of a test's threads.
pub(crate) mod checked {
    use std::sync::PoisonError;
    #[cfg(not(loom))]
    use std::time::Instant;

    #[cfg(loom)]
    pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};
    #[cfg(loom)]
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    #[cfg(not(loom))]
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
    #[cfg(not(loom))]
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

    /// Locks `mutex`, whether or not a thread panicked while it held the lock.
    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a notification.
    pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a notification, until `deadline`. Returns `None` when the deadline has passed.
    #[cfg(not(loom))]
    pub(crate) fn wait_until<'a, T>(
        condvar: &Condvar,
        guard: MutexGuard<'a, T>,
        deadline: Instant,
    ) -> Option<MutexGuard<'a, T>> {
        let left = deadline.checked_duration_since(Instant::now())?;
        let waited = condvar.wait_timeout(guard, left);
        Some(waited.unwrap_or_else(PoisonError::into_inner).0)
    }
}
