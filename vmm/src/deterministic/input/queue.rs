//! The queue of input that other threads send to a deterministic machine.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::log::{ENTRY_MAX, InputEvent};
use crate::sync::lock;

/// Maximum number of bytes in the queue for each device.
const QUEUE_MAX: usize = 4096;

/// The device that input is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputDevice {
    /// COM1.
    Serial,
    /// The keyboard.
    Keyboard,
}

/// The devices that accept at least one more byte.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Accepting {
    pub(crate) serial: bool,
    pub(crate) keyboard: bool,
}

#[derive(Debug, Default)]
struct QueuedInput {
    bytes: VecDeque<u8>,
    /// Scan codes of set 1.
    keys: VecDeque<u8>,
    quit: bool,
}

impl QueuedInput {
    fn is_ready(&self, accepting: Accepting) -> bool {
        self.quit
            || accepting.serial && !self.bytes.is_empty()
            || accepting.keyboard && !self.keys.is_empty()
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

    /// Drops all bytes and scan codes.
    pub(super) fn clear(&self) {
        let mut queued = lock(&self.queued);
        queued.bytes.clear();
        queued.keys.clear();
    }

    /// Queues scan codes of the keyboard, all or none. Returns how many.
    pub fn push_keys(&self, codes: &[u8]) -> usize {
        let mut queued = lock(&self.queued);
        if codes.len() > QUEUE_MAX - queued.keys.len() {
            return 0;
        }
        queued.keys.extend(codes);
        self.changed.notify_all();
        codes.len()
    }

    /// Ends the run.
    pub fn quit(&self) {
        lock(&self.queued).quit = true;
        self.changed.notify_all();
    }

    /// Sleeps until there is input, for at most `limit`. Bytes count only for devices that are `accepting`.
    pub(super) fn sleep(&self, accepting: Accepting, limit: Duration) {
        let queued = lock(&self.queued);
        let empty = |queued: &mut QueuedInput| !queued.is_ready(accepting);
        let slept = self.changed.wait_timeout_while(queued, limit, empty);
        drop(slept.unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes the next input: as many bytes as `accept` takes, or the end of the run.
    pub(super) fn take(&self, accept: impl Fn(InputDevice, &[u8]) -> usize) -> Option<InputEvent> {
        let mut queued = lock(&self.queued);
        let take = |bytes: &mut VecDeque<u8>, device| {
            let front: Vec<u8> = bytes.iter().copied().take(ENTRY_MAX).collect();
            let count = if front.is_empty() {
                0
            } else {
                accept(device, &front)
            };
            debug_assert!(count <= front.len(), "no more than it was offered");
            bytes.drain(..count);
            (count != 0).then(|| front[..count].to_vec())
        };
        if let Some(bytes) = take(&mut queued.bytes, InputDevice::Serial) {
            return Some(InputEvent::Serial(bytes));
        }
        if let Some(codes) = take(&mut queued.keys, InputDevice::Keyboard) {
            return Some(InputEvent::Keys(codes));
        }
        // The user can end the run of a guest that reads no input.
        queued.quit.then_some(InputEvent::Quit)
    }

    /// Whether there is input. Bytes count only for devices that are `accepting`.
    pub(super) fn is_ready(&self, accepting: Accepting) -> bool {
        lock(&self.queued).is_ready(accepting)
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
        assert_eq!(queue.push_keys(&[0; 2 * QUEUE_MAX]), 0);
        assert_eq!(queue.push_keys(&[0; QUEUE_MAX]), QUEUE_MAX);
        assert_eq!(queue.push_keys(b"x"), 0);
    }
}
