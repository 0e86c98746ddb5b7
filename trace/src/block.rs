//! Blocks: independently compressed parts of the stream of one vCPU.

use xxhash_rust::xxh3::xxh3_64;

/// Length of a block's header in the file.
pub(crate) const HEADER_LEN: usize = 64;
/// The first word of a block.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"HTB1");
/// The vCPU of blocks that have the records of processes.
pub(crate) const PROCESS_LOG: u32 = u32::MAX;
/// Maximum number of records of a block.
pub const RECORDS_MAX: u32 = 1 << 20;
/// Maximum number of bytes of a block before compression.
pub(crate) const RAW_MAX: u32 = 32 << 20;
/// Maximum number of bytes of a block after compression. Data that does not compress grows a
/// little.
pub(crate) const PACKED_MAX: u32 = RAW_MAX + (1 << 20);

/// The header of a block: its position in the file, its size, and the records in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockInfo {
    /// Where the block begins in the file.
    pub offset: u64,
    /// The vCPU.
    pub cpu: u32,
    /// Number of records.
    pub records: u32,
    /// Bytes before compression.
    pub raw_len: u32,
    /// Bytes after compression.
    pub packed_len: u32,
    /// Instructions that the vCPU had retired at the first record.
    pub first_at: u64,
    /// The same at the last record.
    pub last_at: u64,
    /// The clock at `first_at`, in ticks.
    pub ticks: u64,
    /// XXH3 of the compressed bytes.
    pub(crate) hash: u64,
}

impl BlockInfo {
    /// The header as it is in the file.
    pub(crate) fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let words = [
            MAGIC,
            self.cpu,
            self.records,
            self.raw_len,
            self.packed_len,
            0,
        ];
        for (chunk, word) in bytes.chunks_exact_mut(4).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        let longs = [self.first_at, self.last_at, self.ticks, self.hash];
        for (chunk, long) in bytes[24..].chunks_exact_mut(8).zip(longs) {
            chunk.copy_from_slice(&long.to_le_bytes());
        }
        let check = xxh3_64(&bytes[..56]);
        bytes[56..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Decodes the header at `offset`; the error says what is wrong with it.
    pub(crate) fn from_bytes(bytes: &[u8; HEADER_LEN], offset: u64) -> Result<Self, &'static str> {
        let word = |n: usize| {
            let at = n * 4;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |n: usize| u64::from(word(n)) | u64::from(word(n + 1)) << 32;
        if word(0) != MAGIC {
            return Err("it does not begin like a block");
        }
        if xxh3_64(&bytes[..56]) != long(14) {
            return Err("the checksum of its header is wrong");
        }
        let info = Self {
            offset,
            cpu: word(1),
            records: word(2),
            raw_len: word(3),
            packed_len: word(4),
            first_at: long(6),
            last_at: long(8),
            ticks: long(10),
            hash: long(12),
        };
        if info.records > RECORDS_MAX || info.raw_len > RAW_MAX || info.packed_len > PACKED_MAX {
            return Err("it claims an impossible size");
        }
        Ok(info)
    }

    /// Where the next block begins.
    pub(crate) fn end(&self) -> u64 {
        let len = HEADER_LEN as u64 + u64::from(self.packed_len);
        self.offset.saturating_add(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_read_as_it_was_written_and_checked() {
        let info = BlockInfo {
            offset: 0x1000,
            cpu: 3,
            records: 77,
            raw_len: 1000,
            packed_len: 90,
            first_at: 1 << 40,
            last_at: (1 << 40) + 9,
            ticks: 5,
            hash: 6,
        };
        let bytes = info.to_bytes();
        assert_eq!(BlockInfo::from_bytes(&bytes, 0x1000), Ok(info));
        for at in 0..HEADER_LEN {
            let mut damaged = bytes;
            damaged[at] ^= 0x40;
            assert!(BlockInfo::from_bytes(&damaged, 0).is_err(), "byte {at}");
        }
        let large = BlockInfo {
            records: RECORDS_MAX + 1,
            ..info
        };
        assert!(BlockInfo::from_bytes(&large.to_bytes(), 0).is_err());
    }
}
