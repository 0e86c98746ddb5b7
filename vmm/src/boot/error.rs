//! Why an image cannot be booted.

use crate::boot::plan::Protocol;

/// Why an image cannot be booted: one sentence, fit to be shown to the user.
#[derive(Debug, thiserror::Error)]
#[expect(
    missing_docs,
    reason = "the messages describe the variants and their fields"
)]
pub enum BootError {
    #[error("the image is empty")]
    Empty,
    #[error(
        "cannot tell what the image is: it has no multiboot header in its first 0x2000 bytes, no \
         ELF header, and no Linux boot header at 0x202; name --protocol flat or give \
         --load-address to load it as it is"
    )]
    Unrecognised,
    #[error("the image is compressed with {0}: unpack it first")]
    Compressed(&'static str),
    #[error("{option} does not go with the {protocol} protocol; {hint}")]
    NotTaken {
        protocol: Protocol,
        option: &'static str,
        hint: &'static str,
    },
    #[error("{name} is empty")]
    EmptyPart { name: String },
    #[error("{name} has a NUL byte at {at:#x}, where it would end")]
    Nul { name: String, at: usize },
    #[error("there are {count:#x} modules, more than the {max:#x} supported")]
    TooManyModules { count: usize, max: usize },

    #[error(
        "{name} needs {size:#x} bytes at {start:#x}, which is not within the RAM below 3 GiB, \
         that ends at {ram_end:#x}"
    )]
    NotInRam {
        name: String,
        start: u64,
        size: u64,
        ram_end: u64,
    },
    #[error("{name} at {start:#x}-{last:#x} overlaps {other} at {other_start:#x}-{other_last:#x}")]
    Overlap {
        name: String,
        start: u64,
        last: u64,
        other: String,
        other_start: u64,
        other_last: u64,
    },
    #[error("no room for the {size:#x} bytes of {name} in {start:#x}-{last:#x}")]
    NoRoom {
        name: String,
        size: u64,
        start: u64,
        last: u64,
    },
    #[error("cannot write {name} to guest memory at {start:#x}")]
    Write {
        name: String,
        start: u64,
        #[source]
        source: vm_memory::GuestMemoryError,
    },
    #[error("the entry point {entry:#x} is outside of what the image loads")]
    EntryOutside { entry: u64 },
    #[error("the entry point {entry:#x} is not one that real mode reaches: that ends at 0xfffff")]
    EntryReal { entry: u64 },

    #[error("the image is not ELF: it does not start with 7f 45 4c 46")]
    NotElf,
    #[error("the ELF image is malformed")]
    Elf(#[source] object::read::Error),
    #[error("the ELF image's type is {0:#x}, not an executable (0x2, or 0x3 if it is static)")]
    ElfType(u16),
    #[error("the ELF image is for machine {machine:#x}, not for x86 ({expected:#x} in its class)")]
    ElfMachine { machine: u16, expected: u16 },
    #[error("the ELF image is big-endian, and x86 is little-endian")]
    ElfBigEndian,
    #[error("the ELF image asks for an interpreter: only static executables can be booted")]
    ElfInterpreter,
    #[error(
        "the ELF image has relocations to apply ({0:#x} bytes): link it to a fixed address \
         (-no-pie, or -C relocation-model=static)"
    )]
    ElfRelocations(u64),
    #[error("the ELF image has no segments to load")]
    ElfNoSegments,
    #[error("ELF {name} has {file_size:#x} bytes in the file but only {memory_size:#x} in memory")]
    ElfSegmentSizes {
        name: String,
        file_size: u64,
        memory_size: u64,
    },
    #[error("ELF {name} ends at {end:#x} in the file, but the file ends at {file_end:#x}")]
    ElfSegmentTruncated {
        name: String,
        end: u64,
        file_end: u64,
    },
    #[error("the ELF image has no PVH note (Xen, type 0x12) with its 32-bit entry point")]
    PvhNoNote,
    #[error("the ELF image's PVH note has {0:#x} bytes, not the 4 or 8 of an address")]
    PvhNoteSize(usize),
    #[error("the ELF image's PVH entry point {0:#x} is not a 32-bit address")]
    PvhEntry(u64),

    #[error("the image has no multiboot header in its first 0x2000 bytes")]
    MultibootNoHeader,
    #[error("the multiboot header asks for features {0:#x}, which are not supported")]
    MultibootFlags(u32),
    #[error("the multiboot header asks for a graphics mode, and there is no display")]
    MultibootGraphics,
    #[error("the multiboot header at {at:#x} is cut off: the file ends at {file_end:#x}")]
    MultibootTruncated { at: usize, file_end: usize },
    #[error(
        "the multiboot header's addresses contradict each other: {what} ({value:#x}, \
         limit {limit:#x})"
    )]
    MultibootAddresses {
        what: &'static str,
        value: u64,
        limit: u64,
    },

    #[error("the Linux image has no boot header: its boot flag and magic (HdrS) are missing")]
    LinuxNoHeader,
    #[error("the Linux image is cut off: it needs {needed:#x} bytes and has {len:#x}")]
    LinuxTruncated { needed: u64, len: u64 },
    #[error(
        "the Linux image is too old: its boot protocol is {}.{:02}, and the oldest that is supported \
         is 2.10, of Linux 2.6.31",
        .0 >> 8, .0 & 0xff
    )]
    LinuxVersion(u16),
    #[error("the Linux image is a zImage, to be loaded below 1 MiB: only bzImage is supported")]
    LinuxLow,
    #[error("the Linux image's kernel alignment {0:#x} is not a power of two of at least 0x1000")]
    LinuxAlignment(u32),
    #[error("the Linux image wants to be at {0:#x}, which is below 1 MiB")]
    LinuxAddress(u64),
    #[error("the command line has {len:#x} bytes, more than the {max:#x} that this kernel takes")]
    CmdlineTooLong { len: usize, max: u32 },
}
