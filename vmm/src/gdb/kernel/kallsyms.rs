//! The symbols of a Linux kernel, from the tables that it keeps in its own memory for
//! `/proc/kallsyms`. See `scripts/kallsyms.c` and `kernel/kallsyms.c` of Linux.
//!
//! The tables have no header. What they have is a table of 256 tokens, of which those of the digits
//! are the digits themselves; all others lie next to it, in one of two debug:
//!
//! - until Linux 6.3: offsets, base, count, names, markers, since 6.2 (and in long-term kernels) the
//!   numbers of the names in order of the alphabet, tokens, indices of tokens;
//! - since Linux 6.4: count, names, markers, tokens, indices of tokens, offsets, base.

/// Tokens of the digits, with the zero that ends each.
pub(super) const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0";

/// Names that one marker stands for.
const PER_MARKER: usize = 256;

/// Most symbols that are believed: a kernel has some hundred thousand.
const SYMBOLS_MAX: usize = 4_000_000;

/// How far the names begin before the tokens at most, in bytes.
const REACH: u64 = 32 << 20;

/// Names that are looked at to find the first one: a guest may have made up its memory.
const LOOKS_MAX: usize = 50_000_000;

/// Where kernels are linked to, and moved to.
const KERNEL_FIRST: u64 = 0xffff_ffff_8000_0000;

/// One symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Symbol {
    pub(super) address: u64,
    /// What `nm` calls it.
    pub(super) kind: u8,
    pub(super) name: Vec<u8>,
}

/// Reads memory; `None` if not all of it is there.
pub(super) trait Source {
    fn read(&self, at: u64, len: usize) -> Option<Vec<u8>>;

    fn u64(&self, at: u64) -> Option<u64> {
        Some(u64::from_le_bytes(self.read(at, 8)?.try_into().ok()?))
    }
}

const fn align(at: u64) -> u64 {
    (at + 7) & !7
}

/// The tables, found.
#[derive(Debug)]
pub(super) struct Tables {
    tokens: Vec<Vec<u8>>,
    /// Behind the indices of the tokens.
    end: u64,
    names: u64,
    /// Bytes of the names.
    len: usize,
    count: usize,
}

/// The 256 tokens, where the table begins, and where that of the indices ends. `digits` is the
/// place of [`DIGITS`].
fn tokens(source: &impl Source, digits: u64) -> Option<(Vec<Vec<u8>>, u64, u64)> {
    // Tokens are some letters each.
    let text = source.read(digits, 256 * 24)?;
    let later: Vec<&[u8]> = text.split(|&byte| byte == 0).take(256 - 0x30).collect();
    let len: usize = later.iter().map(|token| token.len() + 1).sum();
    let index_at = align(digits + len as u64);
    let raw = source.read(index_at, 512)?;
    let index = |i: usize| usize::from(u16::from_le_bytes([raw[2 * i], raw[2 * i + 1]]));
    let start = digits.checked_sub(index(0x30) as u64)?;
    let table = source.read(start, index(0xff) + later.last()?.len() + 1)?;
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

/// The length of a name that begins `bytes`, and how many bytes say so.
fn name_length(bytes: &[u8]) -> Option<(usize, usize)> {
    match *bytes.first()? {
        low @ 0x80.. => {
            let high = usize::from(*bytes.get(1)?);
            Some((usize::from(low & 0x7f) | high << 7, 2))
        }
        len => Some((usize::from(len), 1)),
    }
}

/// Goes through `count` names at the beginning of `text`: the bytes that they take, and where each
/// one is that has a marker. Each name is one of `looks`.
fn walk(text: &[u8], count: usize, looks: &mut usize) -> Option<(usize, Vec<u32>)> {
    let mut at = 0;
    let mut markers = Vec::new();
    for i in 0..count {
        if i % PER_MARKER == 0 {
            markers.push(u32::try_from(at).ok()?);
        }
        *looks = looks.checked_sub(1)?;
        let (len, head) = name_length(text.get(at..)?)?;
        if len == 0 {
            return None;
        }
        at += len + head;
    }
    (at <= text.len()).then_some((at, markers))
}

/// The bytes of the `count` names at the beginning of `text`, if the markers follow, and then what
/// there may be up to the tokens, which are behind `text`.
fn names(text: &[u8], count: usize, looks: &mut usize) -> Option<usize> {
    let (len, markers) = walk(text, count, looks)?;
    let aligned = |at: usize| at.next_multiple_of(8);
    let found = text.get(aligned(len)..)?.get(..4 * markers.len())?;
    let words = found.chunks_exact(4);
    let same = words
        .zip(&markers)
        .all(|(word, marker)| word == marker.to_le_bytes());
    let end = aligned(aligned(len) + 4 * markers.len());
    // The numbers of the names take three bytes each.
    let fits = [end, aligned(end + 3 * count)].contains(&text.len());
    (same && fits).then_some(len)
}

impl Tables {
    /// The tables whose tokens of the digits are at `digits`.
    pub(super) fn find(source: &impl Source, digits: u64) -> Option<Self> {
        let (tokens, start, end) = tokens(source, digits)?;
        let reach = REACH.min(start) & !7;
        let text = source.read(start - reach, usize::try_from(reach).ok()?)?;
        let mut looks = LOOKS_MAX;
        // The count is in front of the names, and both are aligned.
        for at in (8..text.len()).step_by(8).rev() {
            let count = u64::from_le_bytes(text[at - 8..at].try_into().ok()?);
            let count = usize::try_from(count).ok()?;
            if !(1..=SYMBOLS_MAX).contains(&count) {
                continue;
            }
            if let Some(len) = names(&text[at..], count, &mut looks) {
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

    /// The offsets, with the base that they count from.
    fn offsets(&self, source: &impl Source) -> Option<(Vec<i32>, u64)> {
        let len = 4 * self.count;
        let size = align(len as u64);
        let before = self.names.checked_sub(16)?;
        let rows = [
            (before.checked_sub(size)?, before),
            (self.end, self.end + size),
        ];
        let (at, base) = rows.into_iter().find_map(|(at, base_at)| {
            let base = source.u64(base_at)?;
            (base >= KERNEL_FIRST && base % 4096 == 0).then_some((at, base))
        })?;
        let raw = source.read(at, len)?;
        let words = raw.chunks_exact(4).map(|word| word.try_into());
        let offsets = words.map(|word| word.map(i32::from_le_bytes));
        Some((offsets.collect::<Result<_, _>>().ok()?, base))
    }

    /// The address that the offsets count from.
    pub(super) fn base(&self, source: &impl Source) -> Option<u64> {
        self.offsets(source).map(|(_, base)| base)
    }

    /// All symbols.
    pub(super) fn symbols(&self, source: &impl Source) -> Option<Vec<Symbol>> {
        let (offsets, base) = self.offsets(source)?;
        // Where some are negative, these count down from the base, and the others are absolute.
        let absolute = offsets.iter().any(|&offset| offset < 0);
        let names = source.read(self.names, self.len)?;
        let mut at = 0;
        let mut symbols = Vec::with_capacity(self.count);
        for offset in offsets {
            let (len, head) = name_length(names.get(at..)?)?;
            let codes = names.get(at + head..at + head + len)?;
            at += head + len;
            let whole: Vec<u8> = codes
                .iter()
                .flat_map(|&code| self.tokens[usize::from(code)].iter().copied())
                .collect();
            let (&kind, name) = whole.split_first()?;
            let address = match offset {
                0.. if absolute => u64::from(offset.unsigned_abs()),
                0.. => base.wrapping_add(u64::from(offset.unsigned_abs())),
                _ => base.wrapping_add(u64::from(offset.unsigned_abs())) - 1,
            };
            symbols.push(Symbol {
                address,
                kind,
                name: name.to_vec(),
            });
        }
        Some(symbols)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Memory(Vec<u8>);

    impl Source for Memory {
        fn read(&self, at: u64, len: usize) -> Option<Vec<u8>> {
            let at = usize::try_from(at).ok()?;
            self.0.get(at..at + len).map(<[u8]>::to_vec)
        }
    }

    const BASE: u64 = 0xffff_ffff_8100_0000;

    fn pad(bytes: &mut Vec<u8>) {
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }

    /// What `scripts/kallsyms.c` makes of these, without compression but for one token; `late` in the
    /// order of Linux 6.4, or with `numbers` of the names.
    fn image(symbols: &[(u64, &str)], late: bool, numbers: bool) -> Vec<u8> {
        let mut image = vec![0xcc; 4096];
        let mut offsets = Vec::new();
        for (address, _) in symbols {
            let offset = match address.checked_sub(BASE) {
                Some(offset) => -1 - i32::try_from(offset).unwrap(),
                None => i32::try_from(*address).unwrap(),
            };
            offsets.extend(offset.to_le_bytes());
        }
        pad(&mut offsets);
        offsets.extend(BASE.to_le_bytes());
        if !late {
            image.extend(&offsets);
        }
        image.extend(u32::try_from(symbols.len()).unwrap().to_le_bytes());
        pad(&mut image);
        let (names, mut markers) = (image.len(), Vec::new());
        for (i, (_, name)) in symbols.iter().enumerate() {
            if i % PER_MARKER == 0 {
                markers.extend(u32::try_from(image.len() - names).unwrap().to_le_bytes());
            }
            let codes = name.replace("init", "\x01");
            let len = codes.len();
            if len < 0x80 {
                image.push(u8::try_from(len).unwrap());
            } else {
                image.push(u8::try_from(len & 0x7f | 0x80).unwrap());
                image.push(u8::try_from(len >> 7).unwrap());
            }
            image.extend(codes.bytes());
        }
        pad(&mut image);
        image.extend(markers);
        pad(&mut image);
        if numbers {
            image.extend(vec![0x77; 3 * symbols.len()]);
            pad(&mut image);
        }
        let mut indices = Vec::new();
        let start = image.len();
        for code in 0..=255_u8 {
            indices.extend(u16::try_from(image.len() - start).unwrap().to_le_bytes());
            match code {
                1 => image.extend(b"init"),
                b' '..=b'~' => image.push(code),
                _ => image.extend(b"xx"),
            }
            image.push(0);
        }
        pad(&mut image);
        image.extend(indices);
        if late {
            image.extend(&offsets);
        }
        image.resize(image.len() + 0x2000, 0xcc);
        image
    }

    fn symbols_of(image: Vec<u8>) -> Option<Vec<Symbol>> {
        let digits = image.windows(DIGITS.len()).position(|w| w == DIGITS)?;
        let memory = Memory(image);
        Tables::find(&memory, digits as u64)?.symbols(&memory)
    }

    #[test]
    fn symbols_are_read_in_each_order_of_the_tables() {
        let long = format!("T{}", "x".repeat(200));
        let mut all = vec![(0x1000, "Apercpu"), (BASE, "Tinit_all"), (BASE + 9, &*long)];
        let many: Vec<_> = (0..700)
            .map(|i| (BASE + 16 + i, format!("t_{i}")))
            .collect();
        all.extend(many.iter().map(|(address, name)| (*address, &**name)));
        for (late, numbers) in [(false, false), (false, true), (true, false)] {
            let found = symbols_of(image(&all, late, numbers)).unwrap();
            assert_eq!(found.len(), all.len());
            for (symbol, (address, name)) in found.iter().zip(&all) {
                assert_eq!(symbol.address, *address);
                assert_eq!(
                    [&[symbol.kind][..], &*symbol.name].concat(),
                    name.as_bytes()
                );
            }
        }
    }

    #[test]
    fn what_only_looks_like_tables_is_refused() {
        let good = image(&[(BASE, "Tinit_all"), (BASE + 4, "Tmore")], false, true);
        assert!(symbols_of(good.clone()).is_some());
        for at in (0..good.len()).step_by(3) {
            // Whatever comes of it, it comes to an end.
            let mut bad = good.clone();
            bad[at] ^= 0xff;
            symbols_of(bad);
        }
        assert_eq!(symbols_of([&[0; 4096], DIGITS, &[0; 9000]].concat()), None);
        assert_eq!(symbols_of(DIGITS.to_vec()), None);
    }
}
