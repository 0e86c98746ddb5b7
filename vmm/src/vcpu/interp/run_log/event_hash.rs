//! The event hash of a deterministic vCPU.
//!
//! The hash is a chain: each link is the digest of the digest before and of one event. So it can be
//! saved between any two events.

use hindsight_devices::clock::Ticks;
use xxhash_rust::xxh3::xxh3_128;

/// An event that is added to the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum LoggedEvent {
    PortRead,
    PortWrite,
    MmioRead,
    MmioWrite,
    Rdmsr,
    Wrmsr,
    Interrupt,
    Nmi,
    Boundary,
    Random,
    Input,
    Smi,
}

/// Words in a [`LoggedEvent::Boundary`]: the general registers, RFLAGS, CR3, and the path hash.
pub(super) const BOUNDARY_WORDS: usize = 19;

/// Maximum number of bytes of an event's data in one link of the chain.
const DATA_MAX: usize = BOUNDARY_WORDS * 8;

/// Bytes of a digest, and of the head of a link.
const DIGEST: usize = 16;
const HEAD: usize = 32;

/// A chain of digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EventHash(u128);

impl EventHash {
    /// The chain with this digest, low half first.
    pub(super) fn from_halves(halves: [u64; 2]) -> Self {
        let [low, high] = halves.map(u128::from);
        Self(high << 64 | low)
    }

    /// The digest, low half first.
    pub(super) fn halves(self) -> [u64; 2] {
        let half = |half: u128| u64::try_from(half).unwrap_or(0);
        [half(self.0 & u128::from(u64::MAX)), half(self.0 >> 64)]
    }

    /// The digest of all events so far.
    pub(super) const fn digest(self) -> u128 {
        self.0
    }

    /// Adds an event with the instruction count of its vCPU, its time, its operand (an address, an
    /// MSR, a vector or a number) and its data.
    pub(super) fn add(
        &mut self,
        event: LoggedEvent,
        (retired, now): (u64, Ticks),
        operand: u64,
        data: &[u8],
    ) {
        let mut head = [0; HEAD];
        head[0] = event as u8;
        head[1..8].copy_from_slice(&data.len().to_le_bytes()[..7]);
        head[8..16].copy_from_slice(&retired.to_le_bytes());
        head[16..24].copy_from_slice(&now.to_le_bytes());
        head[24..].copy_from_slice(&operand.to_le_bytes());
        let mut chunks = data.chunks(DATA_MAX);
        self.link(&head, chunks.next().unwrap_or_default());
        chunks.for_each(|chunk| self.link(&[0; HEAD], chunk));
    }

    fn link(&mut self, head: &[u8; HEAD], data: &[u8]) {
        let mut bytes = [0; DIGEST + HEAD + DATA_MAX];
        let end = DIGEST + HEAD + data.len();
        bytes[..DIGEST].copy_from_slice(&self.0.to_le_bytes());
        bytes[DIGEST..DIGEST + HEAD].copy_from_slice(head);
        bytes[DIGEST + HEAD..end].copy_from_slice(data);
        self.0 = xxh3_128(&bytes[..end]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_hash_depends_on_count_time_operand_and_data() {
        let digest = |retired, now, operand, data: &[u8]| {
            let mut hash = EventHash::default();
            hash.add(LoggedEvent::PortWrite, (retired, now), operand, data);
            hash
        };
        let base = digest(1, 2, 3, &[4]);
        assert_eq!(base, digest(1, 2, 3, &[4]));
        for other in [
            digest(9, 2, 3, &[4]),
            digest(1, 9, 3, &[4]),
            digest(1, 2, 9, &[4]),
            digest(1, 2, 3, &[9]),
            digest(1, 2, 3, &[4, 0]),
        ] {
            assert_ne!(base, other);
        }
        let long = |last| digest(1, 2, 3, &[&[0; 3 * DATA_MAX][..], &[last]].concat());
        assert_ne!(long(1), long(2));
        assert_eq!(EventHash::from_halves(base.halves()), base);
    }
}
