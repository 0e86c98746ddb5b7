//! The symbols of a Linux kernel, from the tables that it keeps in its own memory for
//! `/proc/kallsyms`. See `scripts/kallsyms.c` and `kernel/kallsyms.c` of Linux.
//!
//! The tables have no header. They are found by one of them, that of the 256 tokens, in which the
//! tokens of the digits are the digits themselves. The others are next to it, in one of two orders:
//!
//! - until Linux 6.3: offsets, base, count, names, markers, since 6.2 (and in long-term kernels) the
//!   numbers of the names in alphabetical order, tokens, indices of tokens;
//! - since Linux 6.4: count, names, markers, tokens, indices of tokens, offsets, base.

use crate::target::PhysicalMemory;

/// The tokens of the digits, with the zero that ends each.
pub(super) const DIGIT_TOKENS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0";

/// Number of names for each marker.
pub(super) const NAMES_PER_MARKER: usize = 256;

/// Maximum number of plausible symbols: a kernel has some hundred thousand.
const SYMBOLS_MAX: usize = 4_000_000;

/// How far before the tokens the names begin at most, in bytes.
const NAMES_BYTES_MAX: u64 = 32 << 20;

/// The longest name that is plausible: Linux allows 511 bytes.
const NAME_BYTES_MAX: usize = 1024;

/// How much work the search for tables may still do. It bounds the search in memory that a guest
/// prepared to make it long.
#[derive(Debug)]
pub struct SearchBudget {
    /// Names to parse.
    names: usize,
    /// Bytes to read and search for names, and bytes of names to make of tokens.
    bytes: u64,
}

impl Default for SearchBudget {
    fn default() -> Self {
        Self {
            names: 50_000_000,
            bytes: 256 << 20,
        }
    }
}

impl SearchBudget {
    /// Minimum cost of a search, in bytes.
    const SEARCH_BYTES: u64 = 1 << 20;

    fn spend(&mut self, bytes: u64) -> Option<()> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(())
    }
}

/// The lowest address that kernels are linked or moved to.
const KERNEL_FIRST: u64 = 0xffff_ffff_8000_0000;

/// A symbol of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSymbol {
    /// The symbol's linear address.
    pub address: u64,
    /// The symbol's type, as the letter that `nm` prints.
    pub kind: u8,
    /// The symbol's name.
    pub name: Vec<u8>,
}

/// Reads `len` bytes of RAM; `None` if not all of them are RAM.
fn read(memory: &dyn PhysicalMemory, gpa: u64, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    memory.read_exact(gpa, &mut bytes).then_some(bytes)
}

fn read_u64(memory: &dyn PhysicalMemory, gpa: u64) -> Option<u64> {
    let bytes = read(memory, gpa, 8)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// Rounds up to a multiple of 8.
const fn align(at: u64) -> u64 {
    (at + 7) & !7
}

/// The tables of one kernel in guest memory.
#[derive(Debug)]
pub struct KallsymsTables {
    tokens: Vec<Vec<u8>>,
    /// The end of the table of the tokens' indices.
    end: u64,
    /// The address of the names.
    names: u64,
    /// The length of the names in bytes.
    len: usize,
    /// The number of symbols.
    count: usize,
}

/// The 256 tokens, the address of their table, and the end of the table of their indices. `digits`
/// is the address of [`DIGIT_TOKENS`].
fn tokens(memory: &dyn PhysicalMemory, digits: u64) -> Option<(Vec<Vec<u8>>, u64, u64)> {
    // Tokens are a few letters each.
    let text = read(memory, digits, 256 * 24)?;
    let later: Vec<&[u8]> = text.split(|&byte| byte == 0).take(256 - 0x30).collect();
    let len: usize = later.iter().map(|token| token.len() + 1).sum();
    let index_at = align(digits + len as u64);
    let raw = read(memory, index_at, 512)?;
    let index = |i: usize| usize::from(u16::from_le_bytes([raw[2 * i], raw[2 * i + 1]]));
    let start = digits.checked_sub(index(0x30) as u64)?;
    let table = read(memory, start, index(0xff) + later.last()?.len() + 1)?;
    let mut found = Vec::with_capacity(256);
    let mut at = 0;
    for i in 0..256 {
        let rest = table.get(at..).filter(|_| index(i) == at)?;
        let len = rest.iter().position(|&byte| byte == 0)?;
        found.push(rest[..len].to_vec());
        at += len + 1;
    }
    Some((found, start, index_at + 512))
}

/// The length of the name at the beginning of `bytes`, and how many bytes encode that length.
fn name_length(bytes: &[u8]) -> Option<(usize, usize)> {
    match *bytes.first()? {
        low @ 0x80.. => {
            let high = usize::from(*bytes.get(1)?);
            Some((usize::from(low & 0x7f) | high << 7, 2))
        }
        len => Some((usize::from(len), 1)),
    }
}

/// Parses `count` names at the beginning of `text`.
///
/// Returns how many bytes they take, and the offset of each name that has a marker.
fn walk(text: &[u8], count: usize, budget: &mut SearchBudget) -> Option<(usize, Vec<u32>)> {
    let mut at = 0;
    let mut markers = Vec::new();
    for i in 0..count {
        if i % NAMES_PER_MARKER == 0 {
            markers.push(u32::try_from(at).ok()?);
        }
        budget.names = budget.names.checked_sub(1)?;
        let (len, head) = name_length(text.get(at..)?)?;
        if len == 0 {
            return None;
        }
        at += len + head;
    }
    (at <= text.len()).then_some((at, markers))
}

/// Returns the length of the `count` names at the beginning of `text`.
///
/// The table of markers must follow, and then the tokens, which begin where `text` ends. `None` if
/// the markers are wrong, or unknown data lies before the tokens.
fn names(text: &[u8], count: usize, budget: &mut SearchBudget) -> Option<usize> {
    let (len, markers) = walk(text, count, budget)?;
    let aligned = |at: usize| at.next_multiple_of(8);
    let found = text.get(aligned(len)..)?.get(..4 * markers.len())?;
    let words = found.chunks_exact(4);
    let same = words
        .zip(&markers)
        .all(|(word, marker)| word == marker.to_le_bytes());
    let end = aligned(aligned(len) + 4 * markers.len());
    // The numbers of the names, where a kernel has them, take three bytes each.
    let fits = [end, aligned(end + 3 * count)].contains(&text.len());
    (same && fits).then_some(len)
}

impl KallsymsTables {
    /// Finds the tables whose tokens of the digits are at guest-physical address `digits`.
    ///
    /// Returns `None` also when `budget` is used up.
    pub fn find(
        memory: &dyn PhysicalMemory,
        digits: u64,
        budget: &mut SearchBudget,
    ) -> Option<Self> {
        let (tokens, start, end) = tokens(memory, digits)?;
        let reach = NAMES_BYTES_MAX.min(start) & !7;
        budget.spend(reach.max(SearchBudget::SEARCH_BYTES))?;
        let text = read(memory, start - reach, usize::try_from(reach).ok()?)?;
        // The count precedes the names, and both are aligned.
        for at in (8..text.len()).step_by(8).rev() {
            let count = u64::from_le_bytes(text[at - 8..at].try_into().ok()?);
            let count = usize::try_from(count).ok()?;
            if !(1..=SYMBOLS_MAX).contains(&count) {
                continue;
            }
            if let Some(len) = names(&text[at..], count, budget) {
                return Some(Self {
                    tokens,
                    end,
                    names: start - reach + at as u64,
                    len,
                    count,
                });
            }
        }
        None
    }

    /// The offsets of the symbols, and the base to which they are relative.
    fn offsets(&self, memory: &dyn PhysicalMemory) -> Option<(Vec<i32>, u64)> {
        let len = 4 * self.count;
        let size = align(len as u64);
        let before = self.names.checked_sub(16)?;
        let rows = [
            (before.checked_sub(size)?, before),
            (self.end, self.end + size),
        ];
        let (at, base) = rows.into_iter().find_map(|(at, base_at)| {
            let base = read_u64(memory, base_at)?;
            (base >= KERNEL_FIRST && base % 4096 == 0).then_some((at, base))
        })?;
        let raw = read(memory, at, len)?;
        let words = raw.chunks_exact(4).map(|word| word.try_into());
        let offsets = words.map(|word| word.map(i32::from_le_bytes));
        Some((offsets.collect::<Result<_, _>>().ok()?, base))
    }

    /// The linear address to which the offsets of the symbols are relative.
    pub fn base(&self, memory: &dyn PhysicalMemory) -> Option<u64> {
        self.offsets(memory).map(|(_, base)| base)
    }

    /// Decodes a name from its codes. The letter of the symbol's type precedes the name.
    fn unpack(&self, codes: &[u8], budget: &mut SearchBudget) -> Option<Vec<u8>> {
        let mut whole = Vec::new();
        for &code in codes {
            whole.extend_from_slice(self.tokens.get(usize::from(code))?);
            if whole.len() > NAME_BYTES_MAX {
                return None;
            }
        }
        budget.spend(whole.len() as u64)?;
        Some(whole)
    }

    /// All symbols, in the order of the tables; `None` also when `budget` is used up.
    pub fn symbols(
        &self,
        memory: &dyn PhysicalMemory,
        budget: &mut SearchBudget,
    ) -> Option<Vec<KernelSymbol>> {
        let (offsets, base) = self.offsets(memory)?;
        // Where some offsets are negative, these are relative, and the others are absolute
        // addresses.
        let absolute = offsets.iter().any(|&offset| offset < 0);
        let names = read(memory, self.names, self.len)?;
        let mut at = 0;
        let mut symbols = Vec::with_capacity(self.count);
        for offset in offsets {
            let (len, head) = name_length(names.get(at..)?)?;
            let codes = names.get(at + head..at + head + len)?;
            at += head + len;
            let whole = self.unpack(codes, budget)?;
            let (&kind, name) = whole.split_first()?;
            let address = match offset {
                0.. if absolute => u64::from(offset.unsigned_abs()),
                0.. => base.wrapping_add(u64::from(offset.unsigned_abs())),
                _ => base
                    .wrapping_add(u64::from(offset.unsigned_abs()))
                    .wrapping_sub(1),
            };
            symbols.push(KernelSymbol {
                address,
                kind,
                name: name.to_vec(),
            });
        }
        Some(symbols)
    }
}
