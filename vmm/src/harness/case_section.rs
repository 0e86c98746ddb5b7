//! Reads the section `.hindsight.cases` of an ELF64 file. System V ABI, "Sections".
//!
//! The file is untrusted: every offset is checked against its length, and sizes are bounded.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Name of the section that holds the case records.
pub const CASE_SECTION: &[u8] = b".hindsight.cases";
/// Largest case section, and largest section name table, in bytes.
const SECTION_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of sections an image may have.
const SECTIONS_MAX: u64 = 1 << 16;
const SECTION_HEADER_BYTES: u64 = 64;

/// Why the section cannot be read.
#[derive(Debug)]
pub(super) enum SectionError {
    /// The section table or a section is malformed.
    Malformed(&'static str),
    /// The file cannot be read.
    Io(io::Error),
}

/// The fields of an ELF64 section header that are used here.
#[derive(Clone, Copy)]
struct SectionHeader {
    name: u32,
    kind: u32,
    offset: u64,
    size: u64,
    link: u32,
}

const SHT_NOBITS: u32 = 8;
/// `e_shstrndx` when the index is in section header 0.
const SHN_XINDEX: u64 = 0xffff;

/// Reads the contents of the case section. `len` is the length of the file.
///
/// Returns `None` if the file is not ELF64 or has no such section.
pub(super) fn read_case_section(file: &File, len: u64) -> Result<Option<Vec<u8>>, SectionError> {
    if len < 64 {
        return Ok(None);
    }
    let header = read_at(file, len, 0, 64)?;
    // Magic, ELFCLASS64, ELFDATA2LSB.
    if header[..6] != *b"\x7fELF\x02\x01" {
        return Ok(None);
    }
    let table = u64_at(&header, 0x28);
    if table == 0 {
        return Ok(None);
    }
    if u16_at(&header, 0x3a) != SECTION_HEADER_BYTES {
        return Err(SectionError::Malformed(
            "unusual size of ELF section headers",
        ));
    }
    let first = section_header(file, len, table, 0)?;
    let count = match u16_at(&header, 0x3c) {
        0 => first.size,
        count => count,
    };
    if count > SECTIONS_MAX {
        return Err(SectionError::Malformed("too many ELF sections"));
    }
    let names_index = match u16_at(&header, 0x3e) {
        0 => return Ok(None),
        SHN_XINDEX => u64::from(first.link),
        index => index,
    };
    if names_index >= count {
        return Err(SectionError::Malformed("no ELF section name table"));
    }
    let names = contents(file, len, section_header(file, len, table, names_index)?)?;
    for index in 0..count {
        let section = section_header(file, len, table, index)?;
        let name = usize::try_from(section.name)
            .ok()
            .and_then(|start| names.get(start..));
        let name = name.and_then(|rest| rest.split(|b| *b == 0).next());
        if name == Some(CASE_SECTION) {
            return contents(file, len, section).map(Some);
        }
    }
    Ok(None)
}

fn section_header(
    file: &File,
    len: u64,
    table: u64,
    index: u64,
) -> Result<SectionHeader, SectionError> {
    let offset = table.checked_add(index * SECTION_HEADER_BYTES);
    let offset = offset.ok_or(SectionError::Malformed(
        "ELF section table outside the file",
    ))?;
    let raw = read_at(file, len, offset, SECTION_HEADER_BYTES)?;
    Ok(SectionHeader {
        name: u32_at(&raw, 0),
        kind: u32_at(&raw, 4),
        offset: u64_at(&raw, 0x18),
        size: u64_at(&raw, 0x20),
        link: u32_at(&raw, 0x28),
    })
}

fn contents(file: &File, len: u64, section: SectionHeader) -> Result<Vec<u8>, SectionError> {
    if section.kind == SHT_NOBITS {
        return Err(SectionError::Malformed("ELF section without contents"));
    }
    if section.size > SECTION_BYTES_MAX {
        return Err(SectionError::Malformed("ELF section of more than 1 MiB"));
    }
    read_at(file, len, section.offset, section.size)
}

/// Reads `count` bytes, at most [`SECTION_BYTES_MAX`], which must be within the file.
fn read_at(file: &File, len: u64, offset: u64, count: u64) -> Result<Vec<u8>, SectionError> {
    let outside = SectionError::Malformed("ELF section table or section outside the file");
    match offset.checked_add(count) {
        Some(end) if end <= len => {}
        _ => return Err(outside),
    }
    let Ok(count) = usize::try_from(count) else {
        return Err(outside);
    };
    let mut bytes = vec![0; count];
    file.read_exact_at(&mut bytes, offset)
        .map_err(SectionError::Io)?;
    Ok(bytes)
}

// The callers pass headers of fixed size, so the indices are in bounds.
fn u16_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | (u64::from(u32_at(bytes, at + 4)) << 32)
}
