//! The section headers of an ELF image, for protocols that pass them to the guest with its symbols.

use std::ops::Range;

use crate::boot::bytes::{u16_at, u32_at, u64_at};
use crate::boot::placement::{Fit, Placement};
use crate::memory::layout::to_usize;

/// Most sections: an image with more passes none.
const SECTIONS_MAX: usize = 1024;
/// Types of the sections whose contents are loaded: symbols, and strings.
const LOADED: [u32; 2] = [2, 3];
/// The flag of a section that a segment loads.
const ALLOCATED: u64 = 1 << 1;

/// Where a class has its fields: in the file's header and in those of sections.
struct ClassFields {
    /// The offset of the headers, which has as many bytes as an address, then their size, number, and index of names.
    headers: usize,
    sizes: usize,
    /// Of a section: flags, address, offset and size of its contents.
    section: [usize; 4],
    /// Bytes of a section's header.
    len: usize,
    wide: bool,
}

const ELF_32: ClassFields = ClassFields {
    headers: 0x20,
    sizes: 0x2e,
    section: [8, 12, 16, 20],
    len: 40,
    wide: false,
};
const ELF_64: ClassFields = ClassFields {
    headers: 0x28,
    sizes: 0x3a,
    section: [8, 16, 24, 32],
    len: 64,
    wide: true,
};

impl ClassFields {
    fn word(&self, bytes: &[u8], at: usize) -> Option<u64> {
        if self.wide {
            u64_at(bytes, at)
        } else {
            u32_at(bytes, at).map(u64::from)
        }
    }

    /// The file range of a section with symbols or strings that no segment loads.
    fn contents(&self, header: &[u8]) -> Option<Range<usize>> {
        let [flags, _, offset, size] = self.section;
        let loaded = LOADED.contains(&u32_at(header, 4)?);
        let allocated = self.word(header, flags)? & ALLOCATED != 0;
        let start = self.word(header, offset)?;
        let end = start.checked_add(self.word(header, size)?)?;
        (loaded && !allocated).then_some(to_usize(start)..to_usize(end))
    }
}

/// The section headers of an image: how many, the size of each, the index of the one with names, and themselves.
///
/// Symbols and strings that no segment loads are placed in `above`, and their headers have the addresses. Returns
/// `None` if the image has no sections or malformed ones: they are no part of what is executed.
pub(super) fn place_symbols<'a>(
    placement: &mut Placement<'a>,
    image: &'a [u8],
    above: &Range<u64>,
) -> Option<Vec<u8>> {
    let fields = match image.get(4)? {
        1 => ELF_32,
        _ => ELF_64,
    };
    let size = |index: usize| u16_at(image, fields.sizes + 2 * index).map(usize::from);
    let (len, count, names) = (size(0)?, size(1)?, size(2)?);
    if len != fields.len || !(1..=SECTIONS_MAX).contains(&count) {
        return None;
    }
    let start = to_usize(fields.word(image, fields.headers)?);
    let mut headers = image.get(start..start.checked_add(len * count)?)?.to_vec();
    // What is placed is no more than the file, however its sections overlap.
    let mut budget = image.len();
    for header in headers.chunks_exact_mut(len) {
        let contents = fields.contents(header).and_then(|range| image.get(range));
        let Some(contents) = contents.filter(|contents| contents.len() <= budget) else {
            continue;
        };
        // Symbols that do not fit are left out, and so are empty ones.
        let placed = placement.fit("symbols", contents, 16, above.clone(), Fit::Lowest);
        let Ok(address) = placed else { continue };
        budget -= contents.len();
        let at = fields.section[1];
        let address = address.to_le_bytes();
        let width = if fields.wide { 8 } else { 4 };
        header
            .get_mut(at..at + width)?
            .copy_from_slice(&address[..width]);
    }
    let mut all = Vec::new();
    for value in [count, len, names] {
        all.extend(u32::try_from(value).ok()?.to_le_bytes());
    }
    all.extend(headers);
    Some(all)
}
