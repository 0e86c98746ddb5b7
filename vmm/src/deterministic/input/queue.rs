//! The queue of input that other threads send to a deterministic machine.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::log::{ENTRY_MAX, InputEvent};
use crate::sync::lock;

/// Maximum number of bytes in the queue.
const QUEUE_MAX: usize = 4096;

#[derive(Debug, Default)]
struct QueuedInput {
    bytes: VecDeque<u8>,
    quit: bool,
}

impl QueuedInput {
    fn is_ready(&self, accepts_bytes: bool) -> bool {
        self.quit || accepts_bytes && !self.bytes.is_empty()
    }
}

/// Input on its way to a machine, from any thread.
#[derive(Debug, Default)]
pub struct InputQueue {
    queued: Mutex<QueuedInput>,
    changed: Condvar,
}

impl InputQueue {
    /// Queues bytes for COM1. Returns how many of them fit.
    pub fn push(&self, bytes: &[u8]) -> usize {
        let mut queued = lock(&self.queued);
        let count = bytes.len().min(QUEUE_MAX - queued.bytes.len());
        queued.bytes.extend(&bytes[..count]);
        self.changed.notify_all();
        count
    }

    /// Queues all of these bytes, or none if they do not fit.
    pub(super) fn push_all(&self, bytes: &[u8]) -> bool {
        let mut queued = lock(&self.queued);
        let fits = bytes.len() <= QUEUE_MAX - queued.bytes.len();
        if fits {
            queued.bytes.extend(bytes);
        }
        fits
    }

    /// Drops all bytes.
    pub(super) fn clear(&self) {
        lock(&self.queued).bytes.clear();
    }

    /// Ends the run.
    pub fn quit(&self) {
        lock(&self.queued).quit = true;
        self.changed.notify_all();
    }

    /// Sleeps until there is input, for at most `limit`. Bytes count only if `accepts_bytes`.
    pub(super) fn sleep(&self, accepts_bytes: bool, limit: Duration) {
        let queued = lock(&self.queued);
        let empty = |queued: &mut QueuedInput| !queued.is_ready(accepts_bytes);
        let slept = self.changed.wait_timeout_while(queued, limit, empty);
        drop(slept.unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes the next input: as many bytes as `accept` takes, or the end of the run.
    pub(super) fn take(&self, accept: impl FnOnce(&[u8]) -> usize) -> Option<InputEvent> {
        let mut queued = lock(&self.queued);
        let front: Vec<u8> = queued.bytes.iter().copied().take(ENTRY_MAX).collect();
        let count = if front.is_empty() { 0 } else { accept(&front) };
        debug_assert!(count <= front.len(), "no more than it was offered");
        if count != 0 {
            queued.bytes.drain(..count);
            return Some(InputEvent::Serial(front[..count].to_vec()));
        }
        // The user can end the run of a guest that reads no input.
        queued.quit.then_some(InputEvent::Quit)
    }

    /// Whether there is input. Bytes count only if `accepts_bytes`.
    pub(super) fn is_ready(&self, accepts_bytes: bool) -> bool {
        lock(&self.queued).is_ready(accepts_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_queue_is_bounded() {
        let queue = InputQueue::default();
        assert_eq!(queue.push(&[0; 2 * QUEUE_MAX]), QUEUE_MAX);
        assert_eq!(queue.push(b"x"), 0);
    }
}
