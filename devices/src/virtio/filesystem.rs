//! A file system of the host. VIRTIO 1.2, "File System Device".
//!
//! The device passes FUSE messages between the driver and a server; it has no DAX window and sends
//! no notifications.

use std::fmt;

use super::chain::Chain;
use super::device::{VirtioDevice, VirtioKind};
use super::memory::DmaMemory;
use super::queues::{QueueError, SLOW_REQUEST, VirtQueues};

/// Bytes of the tag in the configuration.
pub const TAG_LEN: usize = 36;
/// Bytes of the longest request and reply: data of 1 MiB, and headers.
pub const MESSAGE_MAX: usize = (1 << 20) + 0x2000;
/// Bytes of a request's header.
const HEADER_LEN: usize = 40;

/// Operations for which the host may have to wait for its storage.
const SETATTR: u32 = 4;
const FSYNC: u32 = 20;
const FSYNCDIR: u32 = 30;
const FALLOCATE: u32 = 43;
const SYNCFS: u32 = 50;
/// The bit of SETATTR that sets the size.
const SET_SIZE: u32 = 1 << 3;

/// Whether a request may take much longer than its bytes.
fn is_slow(request: &[u8]) -> bool {
    let word = |at: usize| {
        let bytes = request.get(at..at + 4).and_then(|b| b.try_into().ok());
        bytes.map_or(0, u32::from_le_bytes)
    };
    match word(4) {
        SETATTR => word(HEADER_LEN) & SET_SIZE != 0,
        FSYNC | FSYNCDIR | FALLOCATE | SYNCFS => true,
        _ => false,
    }
}

/// Answers FUSE requests.
pub trait FuseServer: Send {
    /// Answers one request; returns the bytes of the reply, 0 for a request without one.
    fn answer(&mut self, request: &[u8], reply: &mut [u8]) -> usize;

    /// Closes all files of the guest, which has reset the device.
    fn reset(&mut self);
}

/// A virtio file system.
pub struct FileSystem {
    tag: String,
    server: Box<dyn FuseServer>,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl fmt::Debug for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileSystem")
            .field("tag", &self.tag)
            .finish_non_exhaustive()
    }
}

impl FileSystem {
    /// The file system that `server` serves. Guests mount it by `tag`, of which only the first 36
    /// bytes count.
    pub fn new(tag: &str, server: Box<dyn FuseServer>) -> Self {
        Self {
            tag: tag.to_owned(),
            server,
            request: Vec::new(),
            reply: Vec::new(),
        }
    }

    fn serve(&mut self, chain: &Chain, memory: &DmaMemory) -> Result<usize, QueueError> {
        let (request_len, reply_len) = (chain.readable_len(), chain.writable_len());
        if request_len < HEADER_LEN {
            return Err(QueueError::Request("a FUSE request has no header"));
        }
        if request_len > MESSAGE_MAX {
            return Err(QueueError::Request("a FUSE request is longer than 1 MiB"));
        }
        self.request.resize(request_len, 0);
        chain.read(memory, 0, &mut self.request)?;
        self.reply.resize(reply_len.min(MESSAGE_MAX), 0);
        let written = self.server.answer(&self.request, &mut self.reply);
        let reply = self.reply.get(..written).unwrap_or_default();
        chain.write(memory, 0, reply)
    }
}

impl VirtioDevice for FileSystem {
    fn kind(&self) -> VirtioKind {
        VirtioKind::FileSystem
    }

    /// A queue for messages of high priority, and one for requests.
    fn queue_sizes(&self) -> Vec<u16> {
        vec![128, 128]
    }

    fn config(&self) -> Vec<u8> {
        let mut config = self.tag.clone().into_bytes();
        config.resize(TAG_LEN, 0);
        config.extend(1_u32.to_le_bytes());
        config
    }

    fn reset(&mut self) {
        self.server.reset();
    }

    fn process(&mut self, queues: &mut VirtQueues<'_>, index: usize) -> Result<(), QueueError> {
        while let Some(chain) = queues.pop(index)? {
            let written = self.serve(&chain, queues.memory())?;
            if is_slow(&self.request) {
                queues.charge(SLOW_REQUEST);
            }
            queues.complete(index, &chain, written)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::test_driver::Driver;

    /// Replies with the request's bytes in reverse.
    struct Reverse;

    impl FuseServer for Reverse {
        fn answer(&mut self, request: &[u8], reply: &mut [u8]) -> usize {
            let count = request.len().min(reply.len());
            for (to, from) in reply.iter_mut().zip(request.iter().rev()) {
                *to = *from;
            }
            count
        }

        fn reset(&mut self) {}
    }

    fn driver() -> Driver {
        let mut driver = Driver::new(Box::new(FileSystem::new("tag", Box::new(Reverse))));
        driver.start(0);
        driver
    }

    #[test]
    fn configuration_has_the_tag_and_one_request_queue() {
        let mut driver = driver();
        assert_eq!(driver.read(0x2000, 4).to_le_bytes(), *b"tag\0");
        assert_eq!(driver.read(0x2000 + 36, 4), 1);
    }

    #[test]
    fn replies_are_those_of_the_server() {
        let mut driver = driver();
        let mut request = vec![1; 40];
        request[39] = 9;
        assert_eq!(driver.request(1, &request, 3), [9, 1, 1]);
    }

    #[test]
    fn request_without_header_stops_the_device() {
        let mut driver = driver();
        driver.descriptor(1, 0, 0x8_0000, 39, 0, 0);
        driver.offer(1, 0);
        assert_eq!(driver.status(), 0x4f);
    }
}
