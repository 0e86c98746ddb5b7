//! What a trace needs of an ELF file that a process maps.

use object::LittleEndian;
use object::elf::{FileHeader64, PF_X, PT_LOAD};
use object::read::elf::{FileHeader, ProgramHeader};

use crate::symbols::{Function, FunctionTable};

/// Owner and type of the note that has the build ID.
const BUILD_ID_OWNER: &[u8] = b"GNU";
const BUILD_ID: u32 = 3;
/// Maximum number of segments of a file.
const SEGMENTS_MAX: usize = 64;

/// A segment of code: the address at which it is linked, its offset in the file, and its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodeSegment {
    /// The address at which the segment is linked.
    pub address: u64,
    /// Its offset in the file.
    pub offset: u64,
    /// Its bytes in the file.
    pub size: u64,
}

/// The code of an ELF file.
#[derive(Clone, Debug, Default)]
pub struct ElfCode {
    /// The build ID in hexadecimal; empty if the file has none.
    pub build_id: String,
    /// The segments of code.
    pub segments: Vec<CodeSegment>,
    /// The functions, by the addresses at which the file is linked.
    pub functions: Vec<Function>,
}

impl ElfCode {
    /// The code of a file; `None` if it is no ELF file of 64 bits. The end of the file may be
    /// missing: it then has no functions.
    pub fn of(file: &[u8]) -> Option<Self> {
        let endian = LittleEndian;
        let header = FileHeader64::<LittleEndian>::parse(file).ok()?;
        let segments = header.program_headers(endian, file).ok()?;
        let mut code = Self::default();
        for segment in segments.iter().take(SEGMENTS_MAX) {
            if segment.p_type(endian) == PT_LOAD && segment.p_flags(endian).0 & PF_X.0 != 0 {
                code.segments.push(CodeSegment {
                    address: segment.p_vaddr(endian),
                    offset: segment.p_offset(endian),
                    size: segment.p_filesz(endian),
                });
            }
            let Ok(Some(mut entries)) = segment.notes(endian, file) else {
                continue;
            };
            while let Ok(Some(entry)) = entries.next() {
                if entry.name() == BUILD_ID_OWNER && entry.n_type(endian).0 == BUILD_ID {
                    let bytes = entry.desc().iter().take(64);
                    code.build_id = bytes.map(|byte| format!("{byte:02x}")).collect();
                }
            }
        }
        if let Ok(parsed) = object::File::parse(file) {
            let mut functions = FunctionTable::of(file);
            if functions.is_empty() {
                functions = FunctionTable::dynamic(&parsed);
            }
            code.functions = functions.iter().cloned().collect();
        }
        Some(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_program_has_segments_and_functions() {
        let file = std::fs::read("/proc/self/exe").unwrap();
        let code = ElfCode::of(&file).unwrap();
        assert!(!code.segments.is_empty() && !code.functions.is_empty());
        let cut = ElfCode::of(&file[..4096]).unwrap();
        assert_eq!(cut.segments, code.segments);
        assert_eq!(cut.build_id, code.build_id);
        assert!(cut.functions.is_empty());
    }

    #[test]
    fn other_files_have_no_code() {
        assert!(ElfCode::of(b"#!/bin/sh\n").is_none());
        assert!(ElfCode::of(b"\x7fELF\x02\x01\x01").is_none());
    }
}
