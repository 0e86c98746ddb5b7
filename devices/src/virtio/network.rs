//! A network card. VIRTIO 1.2, "Network Device".
//!
//! Without offloads: every frame is complete and has its checksums.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};

use super::device::{VirtioDevice, VirtioKind};
use super::queues::{QueueError, VirtQueues};
use crate::bus::lock;

/// Bytes of the header before each frame.
const HEADER_LEN: usize = 12;
/// The longest frame.
pub const FRAME_MAX: usize = 65_535;
/// Maximum number of received frames that wait for the guest; further ones are dropped, as a
/// network may.
const WAITING_MAX: usize = 256;

const FEATURE_MAC: u64 = 1 << 5;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

/// Takes the frames that the guest sends.
pub trait FrameSink: Send {
    /// Sends a frame, or drops it.
    fn send(&mut self, frame: &[u8]);
}

/// Frames for the guest.
#[derive(Clone, Debug, Default)]
pub struct ReceivedFrames(Arc<Mutex<VecDeque<Vec<u8>>>>);

impl ReceivedFrames {
    /// Adds a frame, which is dropped if too many wait. The device must be served afterwards.
    pub fn push(&self, frame: &[u8]) {
        let mut waiting = lock(&self.0);
        if waiting.len() < WAITING_MAX && frame.len() <= FRAME_MAX {
            waiting.push_back(frame.to_vec());
        }
    }

    fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }

    fn take(&self) -> Option<Vec<u8>> {
        lock(&self.0).pop_front()
    }
}

/// A virtio network card.
pub struct Network {
    mac: [u8; 6],
    sink: Box<dyn FrameSink>,
    received: ReceivedFrames,
    frame: Vec<u8>,
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network")
            .field("mac", &self.mac)
            .finish_non_exhaustive()
    }
}

impl Network {
    /// A card that sends to `sink`, and receives what is pushed to `received`.
    pub fn new(mac: [u8; 6], sink: Box<dyn FrameSink>, received: ReceivedFrames) -> Self {
        Self {
            mac,
            sink,
            received,
            frame: Vec::new(),
        }
    }

    fn transmit(&mut self, queues: &mut VirtQueues<'_>) -> Result<(), QueueError> {
        while let Some(chain) = queues.pop(TRANSMIT)? {
            let len = chain.readable_len().checked_sub(HEADER_LEN);
            let len = len.ok_or(QueueError::Request("a frame has no header"))?;
            if len > FRAME_MAX {
                return Err(QueueError::Request("a frame is longer than 65535 bytes"));
            }
            self.frame.resize(len, 0);
            chain.read(queues.memory(), HEADER_LEN, &mut self.frame)?;
            self.sink.send(&self.frame);
            queues.complete(TRANSMIT, &chain, 0)?;
        }
        Ok(())
    }

    fn receive(&mut self, queues: &mut VirtQueues<'_>) -> Result<(), QueueError> {
        while !self.received.is_empty() {
            let Some(chain) = queues.pop(RECEIVE)? else {
                return Ok(());
            };
            let Some(frame) = self.received.take() else {
                return Ok(());
            };
            // The last two bytes are the number of buffers.
            let mut header = [0; HEADER_LEN];
            header[10] = 1;
            let fits = chain.writable_len() >= HEADER_LEN + frame.len();
            let written = if fits {
                chain.write(queues.memory(), 0, &header)?
                    + chain.write(queues.memory(), HEADER_LEN, &frame)?
            } else {
                // A frame that is too long for the driver's buffers is lost.
                0
            };
            queues.complete(RECEIVE, &chain, written)?;
        }
        Ok(())
    }
}

impl VirtioDevice for Network {
    fn kind(&self) -> VirtioKind {
        VirtioKind::Network
    }

    fn features(&self) -> u64 {
        FEATURE_MAC
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![256, 256]
    }

    fn config(&self) -> Vec<u8> {
        let mut config = self.mac.to_vec();
        // VIRTIO_NET_S_LINK_UP, for a driver that negotiated the status field.
        config.extend([1, 0]);
        config
    }

    fn process(&mut self, queues: &mut VirtQueues<'_>, index: usize) -> Result<(), QueueError> {
        if index == TRANSMIT {
            self.transmit(queues)
        } else {
            self.receive(queues)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::test_driver::Driver;

    #[derive(Clone, Default)]
    struct Sent(Arc<Mutex<Vec<Vec<u8>>>>);

    impl FrameSink for Sent {
        fn send(&mut self, frame: &[u8]) {
            self.0.lock().unwrap().push(frame.to_vec());
        }
    }

    fn driver() -> (Driver, Sent, ReceivedFrames) {
        let (sent, received) = (Sent::default(), ReceivedFrames::default());
        let device = Network::new([2, 0, 0, 0, 0, 1], Box::new(sent.clone()), received.clone());
        let mut driver = Driver::new(Box::new(device));
        driver.start(1 << 5);
        (driver, sent, received)
    }

    #[test]
    fn sent_frame_has_no_header() {
        let (mut driver, sent, _) = driver();
        driver.request(1, &[&[0; 12][..], b"frame"].concat(), 0);
        assert_eq!(*sent.0.lock().unwrap(), [b"frame"]);
        assert_eq!(driver.read(0x2000, 4), 2, "the address");
    }

    #[test]
    fn received_frame_waits_for_a_buffer_and_has_a_header() {
        let (mut driver, _, received) = driver();
        received.push(b"frame");
        let buffer = driver.request(0, &[], 32);
        assert_eq!(buffer[..17], *b"\0\0\0\0\0\0\0\0\0\0\x01\0frame");
    }

    #[test]
    fn frames_beyond_the_limit_are_dropped() {
        let (mut driver, _, received) = driver();
        for _ in 0..2 * WAITING_MAX {
            received.push(b"x");
        }
        assert_eq!(lock(&received.0).len(), WAITING_MAX);
        received.push(&vec![0; FRAME_MAX + 1]);
        driver.request(0, &[], 12);
        assert_eq!(
            lock(&received.0).len(),
            WAITING_MAX - 1,
            "too long for the buffer"
        );
    }

    #[test]
    fn frame_without_header_stops_the_device() {
        let (mut driver, _, _) = driver();
        driver.descriptor(1, 0, 0x8_0000, 11, 0, 0);
        driver.offer(1, 0);
        assert_eq!(driver.status(), 0x4f);
    }
}
