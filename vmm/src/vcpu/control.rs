//! Pause, resume, stop and kick, from any thread, without lost wake-ups.
//!
//! A processor's thread looks for work, then runs the guest or sleeps. Whoever gives it work sets
//! its flag first and only then interrupts it: either the thread sees the flag before it runs, or
//! `immediate_exit` (set after the flag) throws it out of KVM_RUN, or the condition variable wakes
//! it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::kvm::kick::Kicker;

/// Locks `mutex`; a panic elsewhere while it was held does not spread.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One processor's doorbell.
#[derive(Debug, Default)]
pub struct Doorbell {
    /// Somebody wants the processor to look around.
    rung: AtomicBool,
    /// Throws the thread out of KVM_RUN; there while it is inside of its run loop.
    kicker: Mutex<Option<Kicker>>,
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
    pub fn set_kicker(&self, kicker: Option<Kicker>) {
        *lock(&self.kicker) = kicker;
    }
}

/// What all processors of a machine should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    Paused,
    Stopped,
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    /// Threads inside of their run loop.
    active: usize,
    /// Threads that wait for the end of a pause.
    waiting: usize,
}

/// The machine's run state, and the doorbells of its processors.
#[derive(Debug)]
pub struct Control {
    inner: Mutex<Inner>,
    changed: Condvar,
    doorbells: Vec<Doorbell>,
}

/// What a thread does after a [`Control::checkpoint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Checkpoint {
    /// Runs on.
    Run,
    /// Ends.
    Stop,
}

impl Control {
    /// For a machine of `cpus` processors, which starts paused.
    pub fn new(cpus: usize) -> Self {
        Self {
            inner: Mutex::new(Inner {
                phase: Phase::Paused,
                active: 0,
                waiting: 0,
            }),
            changed: Condvar::new(),
            doorbells: (0..cpus).map(|_| Doorbell::default()).collect(),
        }
    }

    /// The doorbell of processor `id`.
    pub fn doorbell(&self, id: usize) -> &Doorbell {
        &self.doorbells[id]
    }

    fn ring_all(&self) {
        self.doorbells.iter().for_each(Doorbell::ring);
    }

    /// Lets the processors run. No effect on a stopped machine.
    pub fn resume(&self) {
        let mut inner = lock(&self.inner);
        if inner.phase == Phase::Paused {
            inner.phase = Phase::Running;
            self.changed.notify_all();
        }
    }

    /// Holds all processors, and returns when none runs any more. `false`: the machine is stopped.
    pub fn pause(&self) -> bool {
        let mut inner = lock(&self.inner);
        if inner.phase == Phase::Stopped {
            return false;
        }
        inner.phase = Phase::Paused;
        drop(inner);
        self.ring_all();
        inner = lock(&self.inner);
        while inner.phase == Phase::Paused && inner.waiting < inner.active {
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
        inner.phase == Phase::Paused
    }

    /// Ends all processors for good; does not wait for them.
    pub fn stop(&self) {
        lock(&self.inner).phase = Phase::Stopped;
        self.changed.notify_all();
        self.ring_all();
    }

    /// Lets a stopped machine run again: it was set back to before its end.
    pub fn reopen(&self) {
        let mut inner = lock(&self.inner);
        if inner.phase == Phase::Stopped {
            inner.phase = Phase::Running;
        }
    }

    /// Whether [`Control::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        lock(&self.inner).phase == Phase::Stopped
    }

    /// A thread enters its run loop. It must reach [`Control::checkpoint`] before it runs a guest.
    pub fn enter(&self) {
        lock(&self.inner).active += 1;
    }

    /// A thread leaves its run loop.
    pub fn leave(&self) {
        lock(&self.inner).active -= 1;
        self.changed.notify_all();
    }

    /// Called by a processor's thread, with nothing locked, when its doorbell rang: waits out a
    /// pause.
    pub fn checkpoint(&self) -> Checkpoint {
        let mut inner = lock(&self.inner);
        while inner.phase == Phase::Paused {
            inner.waiting += 1;
            self.changed.notify_all();
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
            inner.waiting -= 1;
        }
        if inner.phase == Phase::Stopped {
            Checkpoint::Stop
        } else {
            Checkpoint::Run
        }
    }

    /// Whether a thread must come to a [`Control::checkpoint`].
    pub fn wants_checkpoint(&self) -> bool {
        lock(&self.inner).phase != Phase::Running
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::thread;

    /// Runs `cpus` threads that count until stopped, looking only when their doorbell rings.
    fn counters(cpus: usize) -> (Arc<Control>, Arc<AtomicU64>, Vec<thread::JoinHandle<()>>) {
        let control = Arc::new(Control::new(cpus));
        let count = Arc::new(AtomicU64::new(0));
        let threads = (0..cpus)
            .map(|id| {
                let (control, count) = (control.clone(), count.clone());
                control.enter();
                thread::spawn(move || {
                    control.doorbell(id).ring();
                    loop {
                        if control.doorbell(id).answer() && control.checkpoint() == Checkpoint::Stop
                        {
                            break;
                        }
                        count.fetch_add(1, Ordering::SeqCst);
                        thread::yield_now();
                    }
                    control.leave();
                })
            })
            .collect();
        (control, count, threads)
    }

    #[test]
    fn paused_machine_does_not_run_until_resumed() {
        let (control, count, threads) = counters(4);
        for _ in 0..50 {
            control.resume();
            assert!(control.pause());
            let before = count.load(Ordering::SeqCst);
            thread::yield_now();
            assert_eq!(count.load(Ordering::SeqCst), before);
        }
        control.stop();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(!control.pause(), "a stopped machine cannot be paused");
    }

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
    fn stop_ends_sleeping_threads() {
        let control = Arc::new(Control::new(1));
        let other = control.clone();
        let sleeper = thread::spawn(move || {
            while !other.is_stopped() {
                other.doorbell(0).sleep(Duration::from_secs(60));
                other.doorbell(0).answer();
            }
        });
        control.stop();
        sleeper.join().unwrap();
    }
}
