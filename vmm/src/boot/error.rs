//! Why an image cannot be booted.

use std::fmt;

use crate::boot::request::Protocol;
use crate::memory::ByteSize;
use crate::memory::layout::{EXTENDED_START, FIRMWARE_MAX, FIRMWARE_MIN, PCI_HOLE_START};

/// Why an image cannot be booted, in one sentence for the user.
#[derive(Debug, thiserror::Error)]
#[expect(
    missing_docs,
    reason = "the messages describe the variants and their fields"
)]
pub enum BootError {
    #[error("the image is empty")]
    Empty,
    #[error(
        "the image's format is unknown: it has no multiboot header in its first 8 KiB, no ELF \
         header, and no Linux boot header at 0x202; use --protocol flat or --load-address to load \
         it as a flat image"
    )]
    Unrecognised,
    #[error("the image is compressed with {0}: decompress it first")]
    Compressed(&'static str),
    #[error("{option} cannot be used with the {protocol} protocol; {hint}")]
    NotTaken {
        protocol: Protocol,
        option: &'static str,
        hint: &'static str,
    },
    #[error(
        "the firmware image has {size:#x} bytes: it must be whole 4-KiB pages, {} to {} KiB; \
         to boot a kernel, give it as <IMAGE> without --firmware",
        ByteSize(FIRMWARE_MIN),
        FIRMWARE_MAX >> 10
    )]
    FirmwareSize { size: usize },
    #[error("{name} is empty")]
    EmptyPart { name: String },
    #[error("{name} contains a NUL byte at offset {at:#x}, which would end it")]
    Nul { name: String, at: usize },
    #[error("{count} modules are too many: at most {max} are supported")]
    TooManyModules { count: usize, max: usize },

    #[error(
        "{name} does not fit in guest memory: it needs {} at {start:#x}{hint}",
        ByteSize(*.size)
    )]
    NotInRam {
        name: String,
        start: u64,
        size: u64,
        hint: MemoryHint,
    },
    #[error(
        "{name} does not fit in guest memory: it needs {} from {} on{hint}",
        ByteSize(*.size),
        Address(*.start)
    )]
    DoesNotFit {
        name: String,
        size: u64,
        start: u64,
        hint: MemoryHint,
    },
    #[error(
        "{name} does not fit: it needs {} of free memory within {start:#x}-{last:#x}",
        ByteSize(*.size)
    )]
    Occupied {
        name: String,
        size: u64,
        start: u64,
        last: u64,
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
    #[error("{name} cannot be written to guest memory at {start:#x}")]
    Write {
        name: String,
        start: u64,
        #[source]
        source: vm_memory::GuestMemoryError,
    },
    #[error("the entry point {entry:#x} is outside of the loaded image")]
    EntryOutside { entry: u64 },
    #[error(
        "the entry point {entry:#x} cannot be reached in real mode, which ends at 0xfffff; use \
         --mode protected or --mode long"
    )]
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
    #[error("the ELF image requests an interpreter: only static executables can be booted")]
    ElfInterpreter,
    #[error(
        "the ELF image has relocations ({0:#x} bytes), which are not applied: link it to a fixed \
         address (-no-pie, or -C relocation-model=static)"
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

    #[error("the image has no multiboot header in its first 8 KiB")]
    MultibootNoHeader,
    #[error("the multiboot header requires features {0:#x}, which are not supported")]
    MultibootFlags(u32),
    #[error("the image has no multiboot 2 header in its first 32 KiB")]
    Multiboot2NoHeader,
    #[error("the multiboot 2 header is for architecture {0}; only i386, 0, is supported")]
    Multiboot2Architecture(u32),
    #[error("the multiboot 2 header requires tag {0}, which is not supported")]
    Multiboot2Tag(u16),
    #[error("the multiboot 2 header's tag {0} is too short")]
    Multiboot2ShortTag(u16),
    #[error("the multiboot 2 header requires information of type {0}, which is unknown")]
    Multiboot2Information(u32),
    #[error("the multiboot 2 header requires a screen: --display adds one")]
    Multiboot2Display,
    #[error("the multiboot 2 header has addresses, and no tag with the entry point")]
    Multiboot2Entry,
    #[error("the multiboot header requires a graphics mode, and there is no display")]
    MultibootGraphics,
    #[error("the multiboot header at {at:#x} is truncated: the file ends at {file_end:#x}")]
    MultibootTruncated { at: usize, file_end: usize },
    #[error(
        "the multiboot header's addresses contradict each other: {contradiction} ({value:#x}, \
         limit {limit:#x})"
    )]
    MultibootAddresses {
        contradiction: &'static str,
        value: u64,
        limit: u64,
    },

    #[error("the Linux image has no boot header: its boot flag or its magic (HdrS) is missing")]
    LinuxNoHeader,
    #[error("the Linux image is truncated: it needs {needed:#x} bytes and has {len:#x}")]
    LinuxTruncated { needed: u64, len: u64 },
    #[error(
        "the Linux image is too old: its boot protocol is {}.{:02}, and the oldest that is \
         supported is 2.10, of Linux 2.6.31",
        .0 >> 8, .0 & 0xff
    )]
    LinuxVersion(u16),
    #[error("the Linux image is a zImage, to be loaded below 1 MiB: only bzImage is supported")]
    LinuxLow,
    #[error("the Linux image's kernel alignment {0:#x} is not a power of two of at least 0x1000")]
    LinuxAlignment(u32),
    #[error("the Linux image requires address {0:#x}, which is below 1 MiB")]
    LinuxAddress(u64),
    #[error("the command line has {len} bytes, more than the {max} that this kernel accepts")]
    CmdlineTooLong { len: usize, max: u32 },
}

/// How a user can make room for a part: the end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryHint(Option<u64>);

impl MemoryHint {
    /// The hint to provide RAM up to `end`. `None`: no amount of RAM suffices.
    pub(super) fn to_reach(end: Option<u64>) -> Self {
        let end = end.filter(|&end| end <= PCI_HOLE_START);
        Self(end.map(|end| end.max(EXTENDED_START).next_power_of_two()))
    }
}

impl fmt::Display for MemoryHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(memory) if memory >> 30 != 0 => {
                write!(f, "; use --memory {}G or more", memory >> 30)
            }
            Some(memory) => write!(f, "; use --memory {}M or more", memory >> 20),
            None => f.write_str(", and only RAM below 3 GiB is used"),
        }
    }
}

/// An address in a message: a size if it is a whole number of MiB, otherwise in hex.
struct Address(u64);

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_multiple_of(1 << 20) {
            ByteSize(self.0).fmt(f)
        } else {
            write!(f, "{:#x}", self.0)
        }
    }
}
