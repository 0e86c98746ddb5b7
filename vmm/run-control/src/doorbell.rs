//! A vCPU's doorbell: makes its thread check for work, without lost wake-ups.
//!
//! The thread checks for work, then runs the guest or sleeps. A thread that gives it work stores the work
//! first and then rings. So the thread sees the flag before it runs, or `immediate_exit` (set after
//! the flag) kicks it out of KVM_RUN, or the condition variable wakes it.

use std::fmt;
use std::time::Duration;
#[cfg(not(loom))]
use std::time::Instant;

#[cfg(not(loom))]
use crate::sync::wait_until;
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, lock};

/// Interrupts a thread that may be inside KVM_RUN.
pub trait Kick: Send {
    /// Makes the thread leave KVM_RUN: at once if it is inside, else as soon as it enters.
    fn kick(&self);

    /// Withdraws the kick: the thread may enter KVM_RUN again.
    fn clear(&self);
}

/// One vCPU's doorbell.
#[derive(Default)]
pub struct Doorbell {
    rung: AtomicBool,
    /// Set while the thread is inside the run loop of KVM.
    kicker: Mutex<Option<Box<dyn Kick>>>,
    asleep: Mutex<bool>,
    wake: Condvar,
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doorbell")
            .field("rung", &self.is_rung())
            .finish_non_exhaustive()
    }
}

impl Doorbell {
    /// Makes the thread check for work, wherever it is.
    pub fn ring(&self) {
        if self.rung.swap(true, Ordering::SeqCst) {
            return;
        }
        if let Some(kicker) = lock(&self.kicker).as_ref() {
            kicker.kick();
        }
        if *lock(&self.asleep) {
            self.wake.notify_all();
        }
    }

    /// Answers a ring. The thread calls this before it checks for work, when [`Doorbell::is_rung`] or
    /// after it was kicked out of KVM_RUN. A ring in the middle of this call leaves `immediate_exit`
    /// set with `rung` clear, which costs one more turn of the run loop and loses nothing.
    pub fn answer(&self) -> bool {
        if let Some(kicker) = lock(&self.kicker).as_ref() {
            kicker.clear();
        }
        self.rung.swap(false, Ordering::SeqCst)
    }

    /// Whether the doorbell rang since the last [`Doorbell::answer`].
    pub fn is_rung(&self) -> bool {
        self.rung.load(Ordering::SeqCst)
    }

    /// Sleeps until rung, at most for `limit`.
    #[cfg(not(loom))]
    pub fn sleep(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut asleep = lock(&self.asleep);
        *asleep = true;
        while !self.is_rung() {
            let Some(guard) = wait_until(&self.wake, asleep, deadline) else {
                *lock(&self.asleep) = false;
                return;
            };
            asleep = guard;
        }
        *asleep = false;
    }

    /// Sleeps until rung: loom has no clock.
    #[cfg(loom)]
    pub fn sleep(&self, _: Duration) {
        let mut asleep = lock(&self.asleep);
        *asleep = true;
        while !self.is_rung() {
            asleep = crate::sync::wait(&self.wake, asleep);
        }
        *asleep = false;
    }

    /// Installs the kicker of a thread that enters the run loop of KVM, or removes it before what it
    /// points to ends.
    pub fn set_kicker(&self, kicker: Option<Box<dyn Kick>>) {
        *lock(&self.kicker) = kicker;
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn ring_before_sleep_is_not_lost() {
        let doorbell = Doorbell::default();
        doorbell.ring();
        let start = Instant::now();
        doorbell.sleep(Duration::from_secs(60));
        assert!(start.elapsed() < Duration::from_secs(30));
        assert!(doorbell.answer());
        assert!(!doorbell.answer());
    }

    #[test]
    fn sleep_ends_at_its_limit() {
        let doorbell = Doorbell::default();
        doorbell.sleep(Duration::from_millis(1));
        assert!(!doorbell.answer());
    }
}
