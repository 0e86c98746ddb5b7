//! What the demo's guest left in its memory: a log, a picture and a branch trace. The layouts are those of
//! `guest-tests/payloads/src/bin/demo.rs`; all numbers are 64-bit little-endian unless said
//! otherwise.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MAGIC: u64 = u64::from_le_bytes(*b"HSDEMO01");
/// Records the guest has room for.
const RECORDS_MAX: u64 = 1024;
const RECORD_WORDS: usize = 8;
/// Branches the guest has room for.
const BRANCHES_MAX: u64 = 1 << 14;
/// Longest name, in bytes.
const NAME_MAX: u64 = 64;
/// Most pixels of a side.
const SIDE_MAX: u64 = 256;

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The guest's TSC when it was written.
    pub tsc: u64,
    /// What it tells.
    pub entry: Entry,
}

/// What a record tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A phase begins.
    Phase {
        /// Its name.
        name: String,
        /// The privilege level of its work.
        cpl: u8,
    },
    /// An exception was caught.
    Exception(Caught),
    /// The timer's interrupt was taken.
    Tick {
        /// What was interrupted.
        rip: u64,
        /// Its level.
        cpl: u8,
    },
    /// Something took time.
    Cost {
        /// Its name.
        name: String,
        /// Ticks of the guest's TSC.
        ticks: u64,
    },
    /// Something was computed.
    Result {
        /// Its name.
        name: String,
        /// Its value.
        value: u64,
    },
    /// An entry of the LBR stack; they come oldest first.
    Branch(Branch),
    /// What the branches before it led to.
    Fault {
        /// Vector, 0 to 31.
        vector: u8,
        /// Saved RIP.
        rip: u64,
    },
}

/// A taken branch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Branch {
    /// The branch instruction.
    pub from: u64,
    /// Its target.
    pub to: u64,
}

/// An exception as the guest's handler saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caught {
    /// Vector, 0 to 31.
    pub vector: u8,
    /// Error code; 0 for vectors without one.
    pub error: u64,
    /// Saved RIP.
    pub rip: u64,
    /// Level of the interrupted code.
    pub cpl: u8,
    /// CR2; means something for #PF only.
    pub cr2: u64,
}

/// The picture the guest drew.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Picture {
    /// Pixels of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Each pixel's brightness, 0 to 1000 (1000: inside of the set).
    pub pixels: Vec<u16>,
    /// Samples of each pixel.
    pub samples: u64,
}

struct Reader<'a>(&'a GuestMemoryMmap);

impl Reader<'_> {
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

    /// A name; what is not printable ASCII is left out.
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

    fn entry(&self, words: [u64; RECORD_WORDS]) -> Option<Entry> {
        let [kind, _, a, b, c, d, e, _] = words;
        let level = |cs: u64| cs.to_le_bytes()[0] & 3;
        Some(match kind {
            1 => Entry::Phase {
                name: self.name(a, b)?,
                cpl: level(c),
            },
            2 => Entry::Exception(Caught {
                vector: a.to_le_bytes()[0] & 31,
                error: b,
                rip: c,
                cpl: level(d),
                cr2: e,
            }),
            3 => Entry::Tick {
                rip: a,
                cpl: level(b),
            },
            4 => Entry::Cost {
                name: self.name(a, b)?,
                ticks: c,
            },
            5 => Entry::Result {
                name: self.name(a, b)?,
                value: c,
            },
            6 => Entry::Branch(Branch { from: a, to: b }),
            7 => Entry::Fault {
                vector: a.to_le_bytes()[0] & 31,
                rip: b,
            },
            _ => return None,
        })
    }
}

/// Reads the log at `address`; empty if there is none. Records that make no sense are left out.
pub fn read_log(memory: &GuestMemoryMmap, address: u64) -> Vec<Record> {
    let reader = Reader(memory);
    let Some([MAGIC, count]) = reader.words(address) else {
        return Vec::new();
    };
    let size = 8 * RECORD_WORDS as u64;
    let record = |n: u64| {
        let words: [u64; RECORD_WORDS] = reader.words(address.checked_add(16 + n * size)?)?;
        let entry = reader.entry(words)?;
        Some(Record {
            tsc: words[1],
            entry,
        })
    };
    (0..count.min(RECORDS_MAX)).filter_map(record).collect()
}

/// Reads the branch trace at `address`; empty if there is none.
pub fn read_branches(memory: &GuestMemoryMmap, address: u64) -> Vec<Branch> {
    /// From, to, flags.
    const WORDS: u64 = 3;
    let reader = Reader(memory);
    let Some([MAGIC, count]) = reader.words(address) else {
        return Vec::new();
    };
    let branch = |n: u64| {
        let at = address.checked_add(16 + n * 8 * WORDS)?;
        let [from, to] = reader.words(at)?;
        Some(Branch { from, to })
    };
    (0..count.min(BRANCHES_MAX)).map_while(branch).collect()
}

/// Reads the picture at `address`, if there is one.
pub fn read_picture(memory: &GuestMemoryMmap, address: u64) -> Option<Picture> {
    let reader = Reader(memory);
    let [magic, width, height, limit, samples] = reader.words(address)?;
    let sides = 1..=SIDE_MAX;
    let good = magic == MAGIC && sides.contains(&width) && sides.contains(&height);
    if !good || samples == 0 || limit == 0 {
        return None;
    }
    let sums = reader.bytes(address.checked_add(40)?, width * height * 4)?;
    let most = limit.saturating_mul(samples);
    let pixels = sums.chunks_exact(4).map(|sum| {
        let sum = u64::from(u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]]));
        u16::try_from(sum.saturating_mul(1000) / most).map_or(1000, |p| p.min(1000))
    });
    Some(Picture {
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
    fn log_gives_its_records_in_order_and_skips_senseless_ones() {
        let mut words = vec![MAGIC, 4];
        words.extend([1, 10, 0x8000, 3, 3, 0, 0, 0]);
        words.extend([99, 11, 0, 0, 0, 0, 0, 0]);
        words.extend([2, 12, 14, 6, 0x1234, 0x2b, 0x5678, 0]);
        words.extend([1, 13, u64::MAX, 3, 0, 0, 0, 0]);
        let memory = memory(0x1000, &words);
        memory.write_slice(b"a\x1bb", GuestAddress(0x8000)).unwrap();
        let caught = Caught {
            vector: 14,
            error: 6,
            rip: 0x1234,
            cpl: 3,
            cr2: 0x5678,
        };
        let phase = Entry::Phase {
            name: "ab".to_owned(),
            cpl: 3,
        };
        let expected = [(10, phase), (12, Entry::Exception(caught))];
        let expected = expected.map(|(tsc, entry)| Record { tsc, entry });
        assert_eq!(read_log(&memory, 0x1000), expected);
    }

    #[test]
    fn absurd_logs_are_bounded_or_empty() {
        let memory = memory(0x1000, &[MAGIC, u64::MAX]);
        assert_eq!(read_log(&memory, 0x1000), []);
        assert_eq!(read_log(&memory, 0x2000), [], "no magic");
        assert_eq!(read_log(&memory, u64::MAX - 4), [], "no memory");
    }

    #[test]
    fn branch_trace_gives_as_many_records_as_it_says_and_memory_has() {
        let memory = memory(0x1000, &[MAGIC, 2, 10, 20, 0, 30, 40, 0, 50, 60, 0]);
        let branch = |from, to| Branch { from, to };
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
    fn absurd_pictures_are_refused() {
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
