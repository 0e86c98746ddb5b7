//! Random numbers of the host, for RDRAND and RDSEED.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Numbers that one system call fetches: Linux returns up to 256 bytes whole.
const BATCH: usize = 32;

/// Random numbers of the host's kernel, fetched in batches.
///
/// No number is returned twice, and none stays in memory after it was returned.
#[derive(Default)]
pub(super) struct HostRandom {
    batch: [u64; BATCH],
    /// How many numbers at the start of the batch were not returned yet.
    left: usize,
}

impl std::fmt::Debug for HostRandom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // What a guest is about to get does not belong into a log.
        f.debug_struct("HostRandom")
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl HostRandom {
    /// The next 64 bits; `None` if the host has none.
    pub(super) fn next_u64(&mut self) -> Option<u64> {
        self.next_from(|bytes| getrandom(bytes, GetRandomFlags::empty()))
    }

    /// The next 64 bits of the batch, which `fetch` refills when it is empty.
    fn next_from(
        &mut self,
        mut fetch: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    ) -> Option<u64> {
        if self.left == 0 {
            let mut bytes = [0; 8 * BATCH];
            let filled = loop {
                match fetch(&mut bytes) {
                    Err(Errno::INTR) => {}
                    filled => break filled.ok()?,
                }
            };
            let (words, _) = bytes.as_chunks();
            let whole = words.iter().take(filled / 8);
            for (slot, word) in self.batch.iter_mut().zip(whole) {
                *slot = u64::from_le_bytes(*word);
                self.left += 1;
            }
        }
        self.left = self.left.checked_sub(1)?;
        Some(std::mem::take(&mut self.batch[self.left]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source that counts: each batch has other bytes.
    fn counting(calls: &mut u8) -> impl FnMut(&mut [u8]) -> Result<usize, Errno> {
        move |bytes| {
            *calls += 1;
            bytes.fill(*calls);
            Ok(bytes.len())
        }
    }

    #[test]
    fn batch_is_fetched_when_the_last_one_is_used_up() {
        let (mut random, mut calls) = (HostRandom::default(), 0);
        for _ in 0..BATCH {
            let number = random.next_from(counting(&mut calls));
            assert_eq!(number, Some(0x0101_0101_0101_0101));
        }
        let number = random.next_from(counting(&mut calls));
        assert_eq!(number, Some(0x0202_0202_0202_0202));
        assert_eq!(calls, 2);
    }

    #[test]
    fn returned_number_leaves_the_batch() {
        let (mut random, mut calls) = (HostRandom::default(), 0);
        while random.next_from(counting(&mut calls)).is_some() && random.left != 0 {}
        assert_eq!(random.batch, [0; BATCH]);
    }

    #[test]
    fn failing_source_gives_no_number() {
        let mut random = HostRandom::default();
        assert_eq!(random.next_from(|_| Err(Errno::NOSYS)), None);
        assert_eq!(random.next_from(|_| Ok(7)), None);
        assert!(random.next_u64().is_some(), "the host's source works");
    }

    #[test]
    fn interrupted_fetch_is_repeated() {
        let (mut random, mut calls) = (HostRandom::default(), 0);
        let number = random.next_from(|bytes| {
            calls += 1;
            if calls < 3 {
                return Err(Errno::INTR);
            }
            bytes.fill(9);
            Ok(bytes.len())
        });
        assert_eq!(number, Some(0x0909_0909_0909_0909));
    }

    #[test]
    fn numbers_of_the_host_differ() {
        let mut random = HostRandom::default();
        let mut numbers: Vec<_> = (0..4 * BATCH).map(|_| random.next_u64()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 4 * BATCH);
    }
}
