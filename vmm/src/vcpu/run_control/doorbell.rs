//! A vCPU's doorbell: makes its thread check for work, without lost wake-ups.
//!
//! The thread checks for work, then runs the guest or sleeps. Whoever gives it work stores the work
//! first and then rings. So the thread sees the flag before it runs, or `immediate_exit` (set after
//! the flag) kicks it out of KVM_RUN, or the condition variable wakes it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::kvm::kick::KvmKicker;
use crate::sync::lock;

/// One processor's doorbell.
#[derive(Debug, Default)]
pub struct Doorbell {
    /// Somebody wants the processor to look around.
    rung: AtomicBool,
    /// Throws the thread out of KVM_RUN; there while it is inside of its run loop.
    kicker: Mutex<Option<KvmKicker>>,
    asleep: Mutex<bool>,
    wake: Condvar,
}

impl Doorbell {
    /// Makes the processor look for work, whatever it does.
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

    /// Takes a ring. The thread calls this before it looks for work, when [`Doorbell::is_rung`] or
    /// after KVM_RUN was thrown out: a ring that comes in the middle leaves `immediate_exit` set
    /// with `rung` clear, which costs one more turn and loses nothing.
    pub fn answer(&self) -> bool {
        if let Some(kicker) = lock(&self.kicker).as_ref() {
            kicker.clear();
        }
        self.rung.swap(false, Ordering::SeqCst)
    }

    /// Whether somebody rang since the last [`Doorbell::answer`].
    pub fn is_rung(&self) -> bool {
        self.rung.load(Ordering::SeqCst)
    }

    /// Sleeps until rung, `limit` at most.
    pub fn sleep(&self, limit: Duration) {
        let mut asleep = lock(&self.asleep);
        *asleep = true;
        let deadline = Instant::now() + limit;
        while !self.rung.load(Ordering::SeqCst) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                break;
            };
            asleep = self
                .wake
                .wait_timeout(asleep, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        *asleep = false;
    }

    /// Puts the kicker in place, or takes it away before what it points to ends.
    pub fn set_kicker(&self, kicker: Option<KvmKicker>) {
        *lock(&self.kicker) = kicker;
    }
}

#[cfg(test)]
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
}
