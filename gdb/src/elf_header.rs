//! The header of the ELF files that this crate makes.

use object::elf::{
    ELFCLASS64, ELFDATA2LSB, ELFMAG, EM_X86_64, EV_CURRENT, FileFlags, FileHeader64, FileType,
    Ident, OsAbi, SymbolSection,
};
use object::{LittleEndian as LE, U16, U32, U64};

/// Returns the header of an x86-64 file without segments and sections.
pub(crate) fn elf_header(file_type: FileType) -> FileHeader64<LE> {
    let zero = || U16::new(LE, 0);
    FileHeader64 {
        e_ident: Ident {
            magic: ELFMAG,
            class: ELFCLASS64,
            data: ELFDATA2LSB,
            version: EV_CURRENT,
            os_abi: OsAbi(0),
            abi_version: 0,
            padding: [0; 7],
        },
        e_type: U16::new(LE, file_type),
        e_machine: U16::new(LE, EM_X86_64),
        e_version: U32::new(LE, EV_CURRENT.0.into()),
        e_entry: U64::new(LE, 0),
        e_phoff: U64::new(LE, 0),
        e_shoff: U64::new(LE, 0),
        e_flags: U32::new(LE, FileFlags(0)),
        e_ehsize: U16::new(
            LE,
            u16::try_from(size_of::<FileHeader64<LE>>()).unwrap_or(0),
        ),
        e_phentsize: zero(),
        e_phnum: zero(),
        e_shentsize: zero(),
        e_shnum: zero(),
        e_shstrndx: U16::new(LE, SymbolSection(0)),
    }
}
