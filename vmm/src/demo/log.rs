//! Reads the log, the picture and the branch trace that the demo's guest left in its memory.
//!
//! `guest-tests/payloads/src/bin/demo.rs` defines the layouts. All numbers are 64-bit little-endian
//! except the pixels.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MAGIC: u64 = u64::from_le_bytes(*b"HSDEMO01");
/// Capacity of the guest's log.
const RECORDS_MAX: u64 = 1024;
const RECORD_WORDS: usize = 8;
/// Capacity of the guest's branch trace.
const BRANCHES_MAX: u64 = 1 << 14;
/// Longest name, in bytes.
const NAME_MAX: u64 = 64;
/// Maximum number of pixels in a row or column.
const SIDE_MAX: u64 = 256;

/// A record of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DemoRecord {
    /// The guest's TSC when it wrote the record.
    pub tsc: u64,
    /// What the guest recorded.
    pub entry: DemoEntry,
}

/// What the guest recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DemoEntry {
    /// A phase begins.
    Phase {
        /// The phase's name.
        name: String,
        /// The privilege level of its work.
        cpl: u8,
    },
    /// A handler took an exception.
    Exception(CaughtException),
    /// A handler took the timer's interrupt.
    Tick {
        /// Address of the interrupted instruction.
        rip: u64,
        /// Privilege level of the interrupted code.
        cpl: u8,
    },
    /// The guest measured the time of an operation.
    Cost {
        /// Name of the operation.
        name: String,
        /// Ticks of the guest's TSC.
        ticks: u64,
    },
    /// The guest computed a result.
    Result {
        /// Name of the result.
        name: String,
        /// The result's value.
        value: u64,
    },
    /// An entry of the LBR stack, oldest first.
    Branch(TracedBranch),
    /// The fault after these branches.
    Fault {
        /// Vector, 0 to 31.
        vector: u8,
        /// Saved RIP.
        rip: u64,
    },
}

/// A taken branch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TracedBranch {
    /// The branch instruction.
    pub from: u64,
    /// The branch's target.
    pub to: u64,
}

/// An exception as the guest's handler recorded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaughtException {
    /// Vector, 0 to 31.
    pub vector: u8,
    /// Error code; 0 for vectors without one.
    pub error: u64,
    /// Saved RIP.
    pub rip: u64,
    /// Privilege level of the interrupted code.
    pub cpl: u8,
    /// CR2, for #PF.
    pub cr2: u64,
}

/// The picture that the guest drew.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DemoPicture {
    /// Pixels in a row.
    pub width: usize,
    /// Number of rows.
    pub height: usize,
    /// The brightness of each pixel, 0 to 1000 (1000: inside of the set).
    pub pixels: Vec<u16>,
    /// Samples for each pixel.
    pub samples: u64,
}

struct GuestReader<'a>(&'a GuestMemoryMmap);

impl GuestReader<'_> {
    fn bytes(&self, address: u64, len: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        self.0
            .read_slice(&mut bytes, GuestAddress(address))
            .ok()
            .map(|()| bytes)
    }

    fn words<const N: usize>(&self, address: u64) -> Option<[u64; N]> {
        let bytes = self.bytes(address, 8 * N as u64)?;
        let mut words = [0; N];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = bytes
                .iter()
                .rev()
                .fold(0, |word, &b| word << 8 | u64::from(b));
        }
        Some(words)
    }

    /// Reads a name, without characters that are not printable ASCII.
    fn name(&self, address: u64, len: u64) -> Option<String> {
        let bytes = self.bytes(address, len.min(NAME_MAX))?;
        let printable = |b: &u8| b.is_ascii_graphic() || *b == b' ';
        Some(
            bytes
                .into_iter()
                .filter(printable)
                .map(char::from)
                .collect(),
        )
    }

    fn entry(&self, words: [u64; RECORD_WORDS]) -> Option<DemoEntry> {
        let [kind, _, a, b, c, d, e, _] = words;
        let level = |cs: u64| cs.to_le_bytes()[0] & 3;
        Some(match kind {
            1 => DemoEntry::Phase {
                name: self.name(a, b)?,
                cpl: level(c),
            },
            2 => DemoEntry::Exception(CaughtException {
                vector: a.to_le_bytes()[0] & 31,
                error: b,
                rip: c,
                cpl: level(d),
                cr2: e,
            }),
            3 => DemoEntry::Tick {
                rip: a,
                cpl: level(b),
            },
            4 => DemoEntry::Cost {
                name: self.name(a, b)?,
                ticks: c,
            },
            5 => DemoEntry::Result {
                name: self.name(a, b)?,
                value: c,
            },
            6 => DemoEntry::Branch(TracedBranch { from: a, to: b }),
            7 => DemoEntry::Fault {
                vector: a.to_le_bytes()[0] & 31,
                rip: b,
            },
            _ => return None,
        })
    }
}

/// Reads the log at `address`, without malformed records; empty if there is no log.
pub fn read_log(memory: &GuestMemoryMmap, address: u64) -> Vec<DemoRecord> {
    let reader = GuestReader(memory);
    let Some([MAGIC, count]) = reader.words(address) else {
        return Vec::new();
    };
    let size = 8 * RECORD_WORDS as u64;
    let record = |n: u64| {
        let words: [u64; RECORD_WORDS] = reader.words(address.checked_add(16 + n * size)?)?;
        let entry = reader.entry(words)?;
        Some(DemoRecord {
            tsc: words[1],
            entry,
        })
    };
    (0..count.min(RECORDS_MAX)).filter_map(record).collect()
}

/// Reads the branch trace at `address`; empty if there is no trace.
pub fn read_branches(memory: &GuestMemoryMmap, address: u64) -> Vec<TracedBranch> {
    /// Words of a branch: from, to, flags.
    const WORDS: u64 = 3;
    let reader = GuestReader(memory);
    let Some([MAGIC, count]) = reader.words(address) else {
        return Vec::new();
    };
    let branch = |n: u64| {
        let at = address.checked_add(16 + n * 8 * WORDS)?;
        let [from, to] = reader.words(at)?;
        Some(TracedBranch { from, to })
    };
    (0..count.min(BRANCHES_MAX)).map_while(branch).collect()
}

/// Reads the picture at `address`, if there is one.
pub fn read_picture(memory: &GuestMemoryMmap, address: u64) -> Option<DemoPicture> {
    let reader = GuestReader(memory);
    let [magic, width, height, limit, samples] = reader.words(address)?;
    let sides = 1..=SIDE_MAX;
    let good = magic == MAGIC && sides.contains(&width) && sides.contains(&height);
    if !good || samples == 0 || limit == 0 {
        return None;
    }
    let sums = reader.bytes(address.checked_add(40)?, width * height * 4)?;
    let brightest = limit.saturating_mul(samples);
    let pixels = sums.chunks_exact(4).map(|sum| {
        let sum = u64::from(u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]]));
        u16::try_from(sum.saturating_mul(1000) / brightest).map_or(1000, |p| p.min(1000))
    });
    Some(DemoPicture {
        width: usize::try_from(width).ok()?,
        height: usize::try_from(height).ok()?,
        pixels: pixels.collect(),
        samples,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::allocate;

    fn memory(at: u64, words: &[u64]) -> GuestMemoryMmap {
        let memory = allocate(&[(GuestAddress(0), 0x10_0000)], false).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        memory.write_slice(&bytes, GuestAddress(at)).unwrap();
        memory
    }

    #[test]
    fn log_is_read_in_order_without_malformed_records() {
        let mut words = vec![MAGIC, 4];
        words.extend([1, 10, 0x8000, 3, 3, 0, 0, 0]);
        words.extend([99, 11, 0, 0, 0, 0, 0, 0]);
        words.extend([2, 12, 14, 6, 0x1234, 0x2b, 0x5678, 0]);
        words.extend([1, 13, u64::MAX, 3, 0, 0, 0, 0]);
        let memory = memory(0x1000, &words);
        memory.write_slice(b"a\x1bb", GuestAddress(0x8000)).unwrap();
        let caught = CaughtException {
            vector: 14,
            error: 6,
            rip: 0x1234,
            cpl: 3,
            cr2: 0x5678,
        };
        let phase = DemoEntry::Phase {
            name: "ab".to_owned(),
            cpl: 3,
        };
        let expected = [(10, phase), (12, DemoEntry::Exception(caught))];
        let expected = expected.map(|(tsc, entry)| DemoRecord { tsc, entry });
        assert_eq!(read_log(&memory, 0x1000), expected);
    }

    #[test]
    fn malformed_log_is_empty() {
        let memory = memory(0x1000, &[MAGIC, u64::MAX]);
        assert_eq!(read_log(&memory, 0x1000), []);
        assert_eq!(read_log(&memory, 0x2000), [], "no magic");
        assert_eq!(read_log(&memory, u64::MAX - 4), [], "no memory");
    }

    #[test]
    fn branch_trace_is_bounded_by_its_count_and_by_memory() {
        let memory = memory(0x1000, &[MAGIC, 2, 10, 20, 0, 30, 40, 0, 50, 60, 0]);
        let branch = |from, to| TracedBranch { from, to };
        assert_eq!(
            read_branches(&memory, 0x1000),
            [branch(10, 20), branch(30, 40)]
        );
        assert_eq!(read_branches(&memory, 0x2000), [], "no magic");
        let end = 0x10_0000 - 40;
        let words: Vec<u8> = [MAGIC, u64::MAX]
            .iter()
            .flat_map(|w| w.to_le_bytes())
            .collect();
        memory.write_slice(&words, GuestAddress(end)).unwrap();
        assert_eq!(read_branches(&memory, end).len(), 1, "memory ends");
    }

    #[test]
    fn picture_is_scaled_to_its_brightest_possible_pixel() {
        let pixels = 440 | (220 << 32);
        let memory = memory(0x1000, &[MAGIC, 2, 1, 220, 2, pixels]);
        let picture = read_picture(&memory, 0x1000).unwrap();
        assert_eq!((picture.width, picture.height), (2, 1));
        assert_eq!(picture.pixels, [1000, 500]);
    }

    #[test]
    fn malformed_picture_is_refused() {
        for words in [
            [0, 2, 1, 220, 2],
            [MAGIC, 257, 1, 220, 2],
            [MAGIC, 2, 0, 220, 2],
            [MAGIC, 2, 1, 0, 2],
            [MAGIC, 2, 1, 220, 0],
        ] {
            assert_eq!(read_picture(&memory(0x1000, &words), 0x1000), None);
        }
    }
}
