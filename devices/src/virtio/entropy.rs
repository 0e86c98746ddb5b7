//! A source of random numbers. VIRTIO 1.2, "Entropy Device".

use std::fmt;

use super::device::{VirtioDevice, VirtioDeviceState, VirtioKind, VirtioStateError};
use super::queues::{QueueError, VirtQueues};

/// Maximum number of bytes of one answer.
const ANSWER_MAX: usize = 4096;

/// A source of random bytes.
pub trait EntropySource: Send {
    /// Fills `data`.
    fn fill(&mut self, data: &mut [u8]);

    /// The position in a sequence that can be repeated; 0 for other sources.
    fn position(&self) -> u64 {
        0
    }

    /// Continues a sequence at a position.
    fn set_position(&mut self, _position: u64) {}
}

/// The numbers of a seed, the same in every run: SplitMix64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeededEntropy {
    seed: u64,
    position: u64,
}

impl SeededEntropy {
    /// Makes the source of the sequence that follows from `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { seed, position: 0 }
    }
}

impl EntropySource for SeededEntropy {
    fn fill(&mut self, data: &mut [u8]) {
        for chunk in data.chunks_mut(8) {
            self.position = self.position.wrapping_add(1);
            let step = self.position.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut word = self.seed.wrapping_add(step);
            word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            word ^= word >> 31;
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        }
    }

    fn position(&self) -> u64 {
        self.position
    }

    fn set_position(&mut self, position: u64) {
        self.position = position;
    }
}

/// A virtio entropy device.
pub struct Entropy {
    source: Box<dyn EntropySource>,
}

impl fmt::Debug for Entropy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Entropy")
    }
}

impl Entropy {
    /// A device with the numbers of `source`.
    pub fn new(source: Box<dyn EntropySource>) -> Self {
        Self { source }
    }
}

impl VirtioDevice for Entropy {
    fn kind(&self) -> VirtioKind {
        VirtioKind::Entropy
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![8]
    }

    fn process(&mut self, queues: &mut VirtQueues<'_>, index: usize) -> Result<(), QueueError> {
        let mut buffer = [0; ANSWER_MAX];
        while let Some(chain) = queues.pop(index)? {
            let len = chain.writable_len().min(ANSWER_MAX);
            if len == 0 {
                return Err(QueueError::Request("an entropy request has no buffer"));
            }
            self.source.fill(&mut buffer[..len]);
            let written = chain.write(queues.memory(), 0, &buffer[..len])?;
            queues.complete(index, &chain, written)?;
        }
        Ok(())
    }

    fn save(&self) -> VirtioDeviceState {
        VirtioDeviceState::Entropy(self.source.position())
    }

    fn restore(&mut self, state: &VirtioDeviceState) -> Result<(), VirtioStateError> {
        match state {
            VirtioDeviceState::Entropy(position) => {
                self.source.set_position(*position);
                Ok(())
            }
            _ => Err(VirtioStateError::OtherDevices),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::test_driver::Driver;

    #[test]
    fn seed_gives_the_same_numbers_again() {
        let mut driver = Driver::new(Box::new(Entropy::new(Box::new(SeededEntropy::new(7)))));
        driver.start(0);
        let first = driver.request(0, &[], 20);
        let saved = driver.function().save();
        let second = driver.request(0, &[], 20);
        assert_ne!(first, second);
        driver.function().restore(&saved).unwrap();
        driver.rewind();
        assert_eq!(driver.request(0, &[], 20), second);
    }
}
