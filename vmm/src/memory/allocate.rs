//! Maps guest memory.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use thiserror::Error;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion, mmap::MmapRegionError,
};

use super::ByteSize;

/// Bytes of one huge page.
pub const HUGE_PAGE: u64 = 2 << 20;

const PROTECTION: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Why guest memory cannot be provided.
#[derive(Debug, Error)]
pub enum RamError {
    /// The memfd cannot be created or resized.
    #[error(
        "{} of guest memory cannot be reserved{}",
        ByteSize(*.bytes),
        if *.huge { " in huge pages" } else { "" }
    )]
    Reserve {
        /// Requested bytes.
        bytes: u64,
        /// Whether huge pages were requested.
        huge: bool,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The host has less memory than requested.
    #[error(
        "{} of guest memory is more than this host has: {} of memory and swap; use a smaller \
         --memory",
        ByteSize(*.bytes), ByteSize(*.host)
    )]
    BeyondHost {
        /// Requested bytes.
        bytes: u64,
        /// The host's memory and swap.
        host: u64,
    },
    /// A region is not a whole number of huge pages.
    #[error(
        "the {bytes:#x} bytes of guest memory at {address:#x} are not whole huge pages; use a \
         multiple of 2M for --memory"
    )]
    NotHugePages {
        /// Guest physical address.
        address: u64,
        /// The region's size.
        bytes: u64,
    },
    /// The host has too few free huge pages.
    #[error(
        "{} of guest memory does not fit in this host's free huge pages; raise vm.nr_hugepages",
        ByteSize(*.bytes)
    )]
    NoHugePages {
        /// Requested bytes.
        bytes: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The interpreter cannot use the memory.
    #[error(transparent)]
    Interpreter(#[from] hindsight_interp::MemoryError),
    /// A region cannot be mapped.
    #[error("guest memory at {address:#x} cannot be mapped: {reason}")]
    Map {
        /// Guest physical address.
        address: u64,
        /// The reason.
        reason: String,
    },
}

/// Maps memory for `ranges`: first address and size of each, ascending, without overlaps.
///
/// [`crate::memory::layout::Layout::ram`] returns such ranges. The memory is zero.
///
/// # Errors
///
/// The host has less memory, or fewer free huge pages, than requested.
pub fn allocate(ranges: &[(GuestAddress, usize)], huge: bool) -> Result<GuestMemoryMmap, RamError> {
    let bytes = ranges.iter().map(|&(_, len)| len as u64).sum::<u64>();
    if let Some(host) = host_memory().filter(|&host| bytes > host) {
        return Err(RamError::BeyondHost { bytes, host });
    }
    if let Some(&(address, len)) = ranges
        .iter()
        .find(|&&(_, len)| huge && !(len as u64).is_multiple_of(HUGE_PAGE))
    {
        return Err(RamError::NotHugePages {
            address: address.0,
            bytes: len as u64,
        });
    }
    let file = memory_file(bytes, huge)?;
    let mut regions = Vec::new();
    let mut offset = 0;
    for &(address, len) in ranges {
        regions.push(map_region(&file, offset, (address, len), bytes, huge)?);
        offset += len as u64;
    }
    GuestMemoryMmap::from_regions(regions).map_err(|e| RamError::Map {
        address: ranges.first().map_or(0, |r| r.0.0),
        reason: e.to_string(),
    })
}

/// Creates a memfd of `bytes` bytes.
fn memory_file(bytes: u64, huge: bool) -> Result<Arc<File>, RamError> {
    let flags = if huge {
        MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB
    } else {
        MemfdFlags::CLOEXEC
    };
    let flags = flags | MemfdFlags::ALLOW_SEALING;
    let reserve = |source: rustix::io::Errno| RamError::Reserve {
        bytes,
        huge,
        source: source.into(),
    };
    let fd = memfd_create("guest-memory", flags).map_err(reserve)?;
    ftruncate(&fd, bytes).map_err(reserve)?;
    // A smaller file would end the process by SIGBUS at the next access.
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&fd, seals).map_err(reserve)?;
    Ok(Arc::new(File::from(fd)))
}

/// Maps one region. `bytes` is the size of all, for messages.
fn map_region(
    file: &Arc<File>,
    offset: u64,
    (address, len): (GuestAddress, usize),
    bytes: u64,
    huge: bool,
) -> Result<GuestRegionMmap, RamError> {
    let failed = |reason: String| RamError::Map {
        address: address.0,
        reason,
    };
    let from = FileOffset::from_arc(file.clone(), offset);
    let mapping = MmapRegion::build(Some(from), len, PROTECTION, map_flags(huge));
    let mapping = mapping.map_err(|error| match error {
        MmapRegionError::Mmap(source) if huge => RamError::NoHugePages { bytes, source },
        error => failed(error.to_string()),
    })?;
    GuestRegionMmap::new(mapping, address)
        .ok_or_else(|| failed("it exceeds the address space".to_owned()))
}

/// Returns the mmap flags for ordinary or for huge pages.
///
/// Ordinary pages are allocated at their first access. Huge pages are reserved when they are
/// mapped, because one that is missing later would end the process by SIGBUS.
const fn map_flags(huge: bool) -> i32 {
    if huge {
        libc::MAP_SHARED
    } else {
        libc::MAP_SHARED | libc::MAP_NORESERVE
    }
}

/// Bytes of memory and swap of this host; `None` if `/proc/meminfo` does not say.
fn host_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()
    };
    Some((kib("MemTotal:")? + kib("SwapTotal:").unwrap_or(0)) << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{Bytes, GuestMemoryBackend};

    #[test]
    fn ranges_below_and_above_the_hole_are_distinct_memory() {
        let memory = allocate(
            &[
                (GuestAddress(0), 0x10_0000),
                (GuestAddress(1 << 32), 0x2000),
            ],
            false,
        )
        .unwrap();
        memory.write_obj(1_u8, GuestAddress(0)).unwrap();
        memory.write_obj(2_u8, GuestAddress(1 << 32)).unwrap();
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0)).unwrap(), 1);
        assert!(memory.write_obj(3_u8, GuestAddress(0x10_0000)).is_err());
        assert_eq!(memory.last_addr(), GuestAddress((1 << 32) + 0x1fff));
    }

    #[test]
    fn size_of_guest_memory_is_sealed() {
        let file = memory_file(0x10_0000, false).unwrap();
        assert!(file.set_len(0x1000).is_err());
        assert!(file.set_len(0x20_0000).is_err());
        assert_eq!(file.metadata().unwrap().len(), 0x10_0000);
    }

    #[test]
    fn more_memory_than_the_host_has_is_refused() {
        for bytes in [1 << 45, 1 << 62] {
            let error = allocate(&[(GuestAddress(0), bytes)], false).unwrap_err();
            assert!(matches!(error, RamError::BeyondHost { .. }), "{error}");
        }
    }

    #[test]
    fn missing_huge_pages_are_refused_when_memory_is_mapped() {
        // More than any host reserves as huge pages, less than its memory.
        let bytes = host_memory().unwrap() & !(HUGE_PAGE - 1);
        let bytes = usize::try_from(bytes).unwrap();
        assert!(allocate(&[(GuestAddress(0), bytes)], true).is_err());
        let error = allocate(&[(GuestAddress(0), 0x10_0000)], true).unwrap_err();
        assert!(matches!(error, RamError::NotHugePages { .. }), "{error}");
    }
}
