//! The queues of one device while it serves them.

use thiserror::Error;
use virtio_queue::{Queue, QueueOwnedT, QueueT};

use super::chain::{BUFFERS_MAX, Chain};
use super::memory::DmaMemory;

/// Requests that a device serves at a time. A queue has fewer; a guest gets beyond it if it adds requests
/// meanwhile, from another processor or through a buffer in its own available ring.
pub const CHAINS_MAX: u16 = 1024;
/// Bytes of the buffers of such requests: the longest requests of a full queue of Linux have fewer.
pub const BYTES_MAX: usize = 512 << 20;

/// Bytes whose transfer takes as long as a slow request may, such as one that the host synchronizes.
pub const SLOW_REQUEST: usize = 16 << 20;

/// A driver's violation of the specification. The device then stops until the driver resets it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueError {
    /// The ring is not in memory, or its index jumped by more than the queue's size.
    #[error("its available or used ring is invalid")]
    Ring,
    /// A buffer is not in guest memory.
    #[error("a buffer of {len:#x} bytes at {address:#x} is not in guest memory")]
    NotMemory {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        len: u32,
    },
    /// A chain has more descriptors than its table, or leads out of the table or of memory.
    #[error("the chain of descriptor {0} has no end")]
    Endless(u16),
    /// A chain has more buffers than any driver makes.
    #[error("the chain of descriptor {0} has more than {BUFFERS_MAX} buffers")]
    Long(u16),
    /// A device-readable buffer follows a device-writable one.
    #[error("the chain of descriptor {0} has a readable buffer after a writable one")]
    Order(u16),
    /// A request is too short, or lacks the buffer for its answer.
    #[error("a request is malformed: {0}")]
    Request(&'static str),
}

impl QueueError {
    pub(super) fn not_memory(address: u64, len: usize) -> Self {
        Self::NotMemory {
            address,
            len: u32::try_from(len).unwrap_or(u32::MAX),
        }
    }
}

/// The queues of a device, and guest memory.
///
/// After [`CHAINS_MAX`] requests or [`BYTES_MAX`] bytes there is no further request in any queue. The
/// transport serves the queues that have more after the processors had a chance to stop.
#[derive(Debug)]
pub struct VirtQueues<'a> {
    memory: &'a DmaMemory,
    queues: &'a mut [Queue],
    /// Queues to whose used rings something was added, a bit each.
    used: u64,
    /// The queue that was accessed last, for the log.
    last: usize,
    /// Requests and bytes that may still be served.
    chains_left: u16,
    bytes_left: usize,
    /// Queues that have requests beyond that, a bit each.
    backlog: u64,
}

impl<'a> VirtQueues<'a> {
    pub(super) fn new(memory: &'a DmaMemory, queues: &'a mut [Queue]) -> Self {
        Self {
            memory,
            queues,
            used: 0,
            last: 0,
            chains_left: CHAINS_MAX,
            bytes_left: BYTES_MAX,
            backlog: 0,
        }
    }

    /// Guest memory.
    pub fn memory(&self) -> &'a DmaMemory {
        self.memory
    }

    /// Takes the next request of a queue; none if the driver offers no more or has not set it up, or if
    /// enough were served. The device is then called again for this queue.
    ///
    /// # Errors
    /// The driver violated the specification.
    pub fn pop(&mut self, index: usize) -> Result<Option<Chain>, QueueError> {
        self.last = index;
        let memory = self.memory;
        let Some(queue) = self.queues.get_mut(index).filter(|queue| queue.ready()) else {
            return Ok(None);
        };
        if self.chains_left == 0 || self.bytes_left == 0 {
            let more = queue.enable_notification(memory);
            if more.map_err(|_| QueueError::Ring)? {
                self.backlog |= 1 << index;
            }
            return Ok(None);
        }
        loop {
            let mut available = queue.iter(memory).map_err(|_| QueueError::Ring)?;
            if let Some(descriptors) = available.next() {
                let chain = Chain::collect(descriptors, memory)?;
                self.chains_left -= 1;
                self.charge(chain.readable_len() + chain.writable_len());
                return Ok(Some(chain));
            }
            // The driver may have added a request before it could see that notifications are on.
            let more = queue.enable_notification(memory);
            if !more.map_err(|_| QueueError::Ring)? {
                return Ok(None);
            }
        }
    }

    /// Counts work that takes as long as `bytes` more bytes of the request's buffers.
    pub fn charge(&mut self, bytes: usize) {
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
    }

    /// Returns a request to the driver, of whose writable buffers `written` bytes were written.
    ///
    /// # Errors
    /// The used ring is not in memory.
    pub fn complete(
        &mut self,
        index: usize,
        chain: &Chain,
        written: usize,
    ) -> Result<(), QueueError> {
        self.last = index;
        let Some(queue) = self.queues.get_mut(index) else {
            return Ok(());
        };
        let written = u32::try_from(written).unwrap_or(u32::MAX);
        let added = queue.add_used(self.memory, chain.head(), written);
        added.map_err(|_| QueueError::Ring)?;
        self.used |= 1 << index;
        Ok(())
    }

    /// The queues that have further requests, a bit each.
    pub(super) fn backlog(&self) -> u64 {
        self.backlog
    }

    /// The queue that was accessed last.
    pub(super) fn last(&self) -> usize {
        self.last
    }

    /// The queues for which the driver wants an interrupt now, a bit each.
    pub(super) fn take_interrupts(&mut self) -> Result<u64, QueueError> {
        let mut due = 0;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            if self.used & 1 << index != 0 {
                let needs = queue.needs_notification(self.memory);
                if needs.map_err(|_| QueueError::Ring)? {
                    due |= 1 << index;
                }
            }
        }
        self.used = 0;
        Ok(due)
    }
}
