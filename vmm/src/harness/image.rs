//! Guest images under test: the built-in payloads, and files that the user names.
//!
//! The harness reads only the section with the case records from an image. Whether the image can be
//! booted is for the VMM to decide.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, memfd_create};
use thiserror::Error;

use crate::harness::case::{CaseError, PayloadCase, parse_section};
use crate::harness::case_section::{SectionError, read_case_section};
use crate::harness::serial::escape;

/// Why an image cannot be tested.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The file cannot be opened or read.
    #[error("cannot read image {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The host's error.
        #[source]
        source: io::Error,
    },
    /// The path is a directory, a device or a pipe.
    #[error("image {} is not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The ELF section table or a section is malformed.
    #[error("image {name}: {reason}")]
    BadElf {
        /// Name of the image.
        name: String,
        /// What is malformed.
        reason: &'static str,
    },
    /// The case records are malformed.
    #[error("image {name}: {source}")]
    BadCases {
        /// Name of the image.
        name: String,
        /// What is malformed.
        source: CaseError,
    },
    /// The host cannot create a memory file for a built-in image.
    #[error("cannot create a memory file for payload {name}")]
    Memfd {
        /// Name of the payload.
        name: String,
        /// The host's error.
        #[source]
        source: io::Error,
    },
}

/// A guest image, and the cases that it declares.
#[derive(Debug)]
pub struct TestImage {
    /// Name in reports: the payload's, or the file's without its directory.
    pub name: String,
    /// Path by which a child process opens the image.
    pub path: PathBuf,
    /// The cases; `None` if the image as a whole is one case.
    pub cases: Option<Vec<PayloadCase>>,
    /// Keeps the memory file at `path` open.
    _memory: Option<File>,
}

impl TestImage {
    /// Opens an image file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or its section table or its records are malformed.
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

    /// Copies a built-in image to a memory file that child processes inherit.
    ///
    /// # Errors
    ///
    /// The host cannot create a memory file, or the image is malformed.
    pub fn builtin(name: &str, bytes: &[u8]) -> Result<Self, ImageError> {
        let failed = |source| ImageError::Memfd {
            name: name.to_owned(),
            source,
        };
        // Without close-on-exec: /proc/self/fd/N must exist in the child, and in the child's child.
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

fn read_cases(name: &str, file: &File, len: u64) -> Result<Option<Vec<PayloadCase>>, ImageError> {
    let section = read_case_section(file, len).map_err(|source| match source {
        SectionError::Malformed(reason) => ImageError::BadElf {
            name: name.to_owned(),
            reason,
        },
        SectionError::Io(source) => ImageError::Read {
            path: PathBuf::from(name),
            source,
        },
    })?;
    let Some(section) = section else {
        return Ok(None);
    };
    let cases = parse_section(&section).map_err(|source| ImageError::BadCases {
        name: name.to_owned(),
        source,
    })?;
    Ok(Some(cases))
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
        let field = elf[0x28..0x30].try_into().unwrap();
        usize::try_from(u64::from_le_bytes(field)).unwrap()
    }

    #[test]
    fn builtin_image_has_its_cases_and_a_path_to_open() {
        let elf = elf_with_cases(b"case a\ncase b cpl=0,3\n");
        let image = TestImage::builtin("demo", &elf).unwrap();
        assert_eq!(image.cases.as_ref().unwrap().len(), 2);
        assert_eq!(std::fs::read(&image.path).unwrap(), elf);
    }

    #[test]
    fn file_that_is_not_elf64_is_one_case() {
        for bytes in [
            &b""[..],
            b"MZ",
            &[0x7f; 100],
            b"\x7fELF\x01\x01 an ELF32 header of 64 bytes or more, with rubbish in it .....",
        ] {
            assert!(TestImage::builtin("flat", bytes).unwrap().cases.is_none());
        }
    }

    #[test]
    fn elf_without_the_section_is_one_case() {
        let mut elf = elf_with_cases(b"case a");
        let at = elf.windows(10).position(|w| w == b".hindsight").unwrap();
        elf[at] = b'x';
        assert!(TestImage::builtin("other", &elf).unwrap().cases.is_none());
        elf[0x28..0x30].fill(0);
        assert!(
            TestImage::builtin("stripped", &elf)
                .unwrap()
                .cases
                .is_none()
        );
    }

    #[test]
    fn malformed_section_table_is_refused() {
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
            let error = TestImage::builtin("bad", &elf).unwrap_err();
            assert!(
                matches!(error, ImageError::BadElf { .. }),
                "row {row}: {error}"
            );
        }
    }

    #[test]
    fn image_with_malformed_records_is_refused_with_its_name() {
        let error = TestImage::builtin("demo", &elf_with_cases(b"case a cpl=7")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "image demo: case `a`: bad value of `cpl`"
        );
    }

    #[test]
    fn missing_files_and_directories_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            TestImage::open(dir.path()),
            Err(ImageError::NotAFile { .. })
        ));
        let missing = dir.path().join("missing");
        assert!(matches!(
            TestImage::open(&missing),
            Err(ImageError::Read { .. })
        ));
    }

    proptest! {
        #[test]
        fn damaged_elf_is_read_without_panic(at in 0usize..300, value: u8, cut in 0usize..300) {
            let mut elf = elf_with_cases(b"case a cpl=0,3 about=x\n");
            let at = at % elf.len();
            elf[at] = value;
            elf.truncate(elf.len().saturating_sub(cut));
            let _ = TestImage::builtin("fuzz", &elf);
        }
    }
}
