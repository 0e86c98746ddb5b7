//! Recognizes a guest that has halted for good: every processor sleeps with interrupts off.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::sync::lock;

/// Which vCPUs sleep and accept no maskable interrupt.
#[derive(Debug)]
pub struct HaltWatch {
    /// A bit for each vCPU that sleeps with interrupts off.
    asleep: AtomicU64,
    /// The bits of all vCPUs.
    all: u64,
    /// The vCPU that executed the last HLT, and the address after the HLT.
    last: Mutex<Option<(usize, u64)>>,
    ends_run: AtomicBool,
    reported: AtomicBool,
}

impl HaltWatch {
    /// The vCPUs of a machine that has not started, of which there are at most 64.
    pub fn new(cpus: usize) -> Self {
        Self {
            asleep: AtomicU64::new(0),
            all: u64::MAX >> (64 - cpus.clamp(1, 64)),
            last: Mutex::default(),
            ends_run: AtomicBool::new(false),
            reported: AtomicBool::new(false),
        }
    }

    /// Makes a halt for good end the run from now on.
    pub fn end_run(&self) {
        self.ends_run.store(true, Ordering::SeqCst);
    }

    /// Whether a halt for good ends the run.
    pub fn ends_run(&self) -> bool {
        self.ends_run.load(Ordering::SeqCst)
    }

    /// Records that vCPU `id` sleeps: after a HLT before `rip`, or to wait for a start-up IPI.
    ///
    /// Returns the last HLT, if all vCPUs sleep now.
    pub(super) fn enter(&self, id: usize, rip: Option<u64>) -> Option<(usize, u64)> {
        let own = 1 << id;
        let mut last = lock(&self.last);
        if let Some(rip) = rip {
            *last = Some((id, rip));
        }
        let asleep = self.asleep.fetch_or(own, Ordering::SeqCst) | own;
        last.filter(|_| asleep == self.all)
    }

    /// Records that vCPU `id` no longer sleeps, because its doorbell was rung.
    pub(super) fn leave(&self, id: usize) {
        self.asleep.fetch_and(!(1 << id), Ordering::SeqCst);
    }

    /// Whether this is the first report of a halt for good.
    pub(super) fn report(&self) -> bool {
        !self.reported.swap(true, Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_vcpu_to_sleep_completes_the_halt() {
        let watch = HaltWatch::new(3);
        assert_eq!(watch.enter(0, Some(1)), None);
        assert_eq!(watch.enter(2, None), None);
        watch.leave(0);
        assert_eq!(watch.enter(1, None), None);
        assert_eq!(watch.enter(0, Some(2)), Some((0, 2)));
        assert_eq!(watch.enter(2, None), Some((0, 2)), "again");
        assert_eq!(HaltWatch::new(1).enter(0, Some(3)), Some((0, 3)));
        let watch = HaltWatch::new(64);
        assert!((0..63).all(|id| watch.enter(id, Some(0)).is_none()));
        assert!(watch.enter(63, None).is_some());
    }

    #[test]
    fn halt_is_reported_once() {
        let watch = HaltWatch::new(1);
        assert!(watch.report());
        assert!(!watch.report());
    }
}
