//! Guest images under test: the built-in payloads and files a user names, and the section
//! `.hindsight.cases` in them (System V ABI, "Sections").
//!
//! Only what finding that section takes is read from an image; whether the image can be started is
//! for the VMM to say.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, memfd_create};
use thiserror::Error;

use crate::harness::case::{Case, CaseError, parse_section};
use crate::harness::serial::escape;

/// Name of the section that holds the case records.
pub const CASE_SECTION: &[u8] = b".hindsight.cases";
/// Largest case section and largest section name table, in bytes.
const SECTION_BYTES_MAX: u64 = 1 << 20;
/// Most sections an image may have.
const SECTIONS_MAX: u64 = 1 << 16;
const SECTION_HEADER_BYTES: u64 = 64;

/// Why an image cannot be tested.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The file cannot be opened or read.
    #[error("cannot read image {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// The path is a directory, a device or a pipe.
    #[error("image {} is not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The ELF section table points outside the file or is absurd.
    #[error("image {name}: {what}")]
    BadElf {
        /// Name of the image.
        name: String,
        /// What is wrong.
        what: &'static str,
    },
    /// The case records are malformed.
    #[error("image {name}: {source}")]
    BadCases {
        /// Name of the image.
        name: String,
        /// What is wrong.
        source: CaseError,
    },
    /// A built-in image could not be given to the runner.
    #[error("cannot make a memory file for payload {name}")]
    Memfd {
        /// Name of the payload.
        name: String,
        /// What the host said.
        #[source]
        source: io::Error,
    },
}

/// A guest image and the cases it declares.
#[derive(Debug)]
pub struct Image {
    /// Name shown in reports: the payload's, or the file's without its directory.
    pub name: String,
    /// Path by which a child process opens the image.
    pub path: PathBuf,
    /// The cases; `None` when the image as a whole is one case.
    pub cases: Option<Vec<Case>>,
    /// Keeps the memory file behind `path` open.
    _memory: Option<File>,
}

impl Image {
    /// Opens an image file that the user named.
    ///
    /// # Errors
    ///
    /// [`ImageError`] when the file cannot be read, or its section table or records are malformed.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let read = |source| ImageError::Read {
            path: path.to_owned(),
            source,
        };
        // Opening a pipe would wait for its writer.
        if !path.metadata().map_err(read)?.is_file() {
            return Err(ImageError::NotAFile {
                path: path.to_owned(),
            });
        }
        let file = File::open(path).map_err(read)?;
        let len = file.metadata().map_err(read)?.len();
        let stem = path.file_name().unwrap_or(path.as_os_str());
        let name = escape(stem.as_encoded_bytes());
        let cases = read_cases(&name, &file, len)?;
        Ok(Self {
            name,
            path: path.to_owned(),
            cases,
            _memory: None,
        })
    }

    /// Puts a built-in image where child processes can open it: a memory file that they inherit.
    ///
    /// # Errors
    ///
    /// [`ImageError`] when the host gives no memory file or the image is malformed.
    pub fn builtin(name: &str, bytes: &[u8]) -> Result<Self, ImageError> {
        let failed = |source| ImageError::Memfd {
            name: name.to_owned(),
            source,
        };
        // No close-on-exec: /proc/self/fd/N must be there in the child, and in the child's child.
        let fd = memfd_create(name, MemfdFlags::empty()).map_err(|e| failed(e.into()))?;
        let mut file = File::from(fd);
        file.write_all(bytes).map_err(failed)?;
        let cases = read_cases(name, &file, bytes.len() as u64)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Ok(Self {
            name: name.to_owned(),
            path,
            cases,
            _memory: Some(file),
        })
    }
}

fn read_cases(name: &str, file: &File, len: u64) -> Result<Option<Vec<Case>>, ImageError> {
    let found = find_section(file, len).map_err(|source| match source {
        SectionError::Bad(what) => ImageError::BadElf {
            name: name.to_owned(),
            what,
        },
        SectionError::Io(source) => ImageError::Read {
            path: PathBuf::from(name),
            source,
        },
    })?;
    let Some(section) = found else {
        return Ok(None);
    };
    let cases = parse_section(&section).map_err(|source| ImageError::BadCases {
        name: name.to_owned(),
        source,
    })?;
    Ok(Some(cases))
}

#[derive(Debug)]
enum SectionError {
    Bad(&'static str),
    Io(io::Error),
}

/// The fields of an ELF64 section header that matter here.
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

/// The contents of the case section; `None` when the image is no ELF64 or has no such section.
fn find_section(file: &File, len: u64) -> Result<Option<Vec<u8>>, SectionError> {
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
        return Err(SectionError::Bad("unusual size of ELF section headers"));
    }
    let first = section_header(file, len, table, 0)?;
    let count = match u16_at(&header, 0x3c) {
        0 => first.size,
        count => count,
    };
    if count > SECTIONS_MAX {
        return Err(SectionError::Bad("too many ELF sections"));
    }
    let names_index = match u16_at(&header, 0x3e) {
        0 => return Ok(None),
        SHN_XINDEX => u64::from(first.link),
        index => index,
    };
    if names_index >= count {
        return Err(SectionError::Bad("no ELF section name table"));
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
    let offset = offset.ok_or(SectionError::Bad("ELF section table outside the file"))?;
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
        return Err(SectionError::Bad("ELF section without contents"));
    }
    if section.size > SECTION_BYTES_MAX {
        return Err(SectionError::Bad("ELF section of more than 1 MiB"));
    }
    read_at(file, len, section.offset, section.size)
}

/// Reads `count` bytes, at most [`SECTION_BYTES_MAX`], that must lie in the file.
fn read_at(file: &File, len: u64, offset: u64, count: u64) -> Result<Vec<u8>, SectionError> {
    let outside = SectionError::Bad("ELF section table or section outside the file");
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

// The callers read headers of fixed size, so the ranges are always there.
fn u16_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | (u64::from(u32_at(bytes, at + 4)) << 32)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A minimal ELF64 file whose case section holds `records`.
    pub(crate) fn elf_with_cases(records: &[u8]) -> Vec<u8> {
        let names = b"\0.shstrtab\0.hindsight.cases\0";
        let names_at = 64u64;
        let cases_at = names_at + names.len() as u64;
        let table = cases_at + records.len() as u64;
        let mut elf = vec![0u8; 64];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[0x28..0x30].copy_from_slice(&table.to_le_bytes());
        elf[0x3a] = 64;
        elf[0x3c] = 3;
        elf[0x3e] = 1;
        elf.extend_from_slice(names);
        elf.extend_from_slice(records);
        for (name, offset, size) in [
            (0u32, 0u64, 0u64),
            (1, names_at, names.len() as u64),
            (11, cases_at, records.len() as u64),
        ] {
            let mut section = [0u8; 64];
            section[..4].copy_from_slice(&name.to_le_bytes());
            section[4] = 1;
            section[0x18..0x20].copy_from_slice(&offset.to_le_bytes());
            section[0x20..0x28].copy_from_slice(&size.to_le_bytes());
            elf.extend_from_slice(&section);
        }
        elf
    }

    fn table_offset(elf: &[u8]) -> usize {
        usize::try_from(u64_at(elf, 0x28)).unwrap()
    }

    #[test]
    fn builtin_image_has_its_cases_and_a_path_that_opens() {
        let elf = elf_with_cases(b"case a\ncase b cpl=0,3\n");
        let image = Image::builtin("demo", &elf).unwrap();
        assert_eq!(image.cases.as_ref().unwrap().len(), 2);
        assert_eq!(std::fs::read(&image.path).unwrap(), elf);
    }

    #[test]
    fn file_that_is_no_elf64_is_one_case() {
        for bytes in [
            &b""[..],
            b"MZ",
            &[0x7f; 100],
            b"\x7fELF\x01\x01 an ELF32 header of 64 bytes or more, with rubbish in it .....",
        ] {
            assert!(Image::builtin("flat", bytes).unwrap().cases.is_none());
        }
    }

    #[test]
    fn elf_without_the_section_is_one_case() {
        let mut elf = elf_with_cases(b"case a");
        let at = elf.windows(10).position(|w| w == b".hindsight").unwrap();
        elf[at] = b'x';
        assert!(Image::builtin("other", &elf).unwrap().cases.is_none());
        elf[0x28..0x30].fill(0);
        assert!(Image::builtin("stripped", &elf).unwrap().cases.is_none());
    }

    #[test]
    fn malformed_section_tables_are_refused() {
        type Break = fn(&mut Vec<u8>, usize);
        let rows: [(&str, Break); 7] = [
            ("table outside", |elf, _| elf[0x28..0x30].fill(0xff)),
            ("truncated table", |elf, _| elf.truncate(elf.len() - 1)),
            ("entry size", |elf, _| elf[0x3a] = 40),
            ("name table index", |elf, _| elf[0x3e] = 9),
            ("huge section", |elf, t| {
                elf[t + 128 + 0x20..][..8].fill(0xff)
            }),
            ("section outside", |elf, t| {
                elf[t + 128 + 0x18..][..8].fill(0xff)
            }),
            ("no contents", |elf, t| elf[t + 128 + 4] = 8),
        ];
        for (row, change) in rows {
            let mut elf = elf_with_cases(b"case a");
            let table = table_offset(&elf);
            change(&mut elf, table);
            let error = Image::builtin("bad", &elf).unwrap_err();
            assert!(
                matches!(error, ImageError::BadElf { .. }),
                "row {row}: {error}"
            );
        }
    }

    #[test]
    fn image_with_bad_records_is_refused_by_name() {
        let error = Image::builtin("demo", &elf_with_cases(b"case a cpl=7")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "image demo: case `a`: bad value of `cpl`"
        );
    }

    #[test]
    fn paths_that_are_no_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            Image::open(dir.path()),
            Err(ImageError::NotAFile { .. })
        ));
        let missing = dir.path().join("missing");
        assert!(matches!(
            Image::open(&missing),
            Err(ImageError::Read { .. })
        ));
    }

    proptest! {
        #[test]
        fn damaged_elf_never_panics(at in 0usize..300, value: u8, cut in 0usize..300) {
            let mut elf = elf_with_cases(b"case a cpl=0,3 about=x\n");
            let at = at % elf.len();
            elf[at] = value;
            elf.truncate(elf.len().saturating_sub(cut));
            let _ = Image::builtin("fuzz", &elf);
        }
    }
}
