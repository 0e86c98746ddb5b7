//! Guest memory: one memfd, mapped in as many regions as the layout has below and above the PCI
//! hole.

pub mod layout;
pub mod page_walk;
mod ram;

pub use ram::GuestRam;

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SeekFrom, ftruncate, memfd_create, seek};
use rustix::io::Errno;
use thiserror::Error;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion, mmap,
};

/// Why guest memory could not be had.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The memfd could not be made or sized.
    #[error("{bytes} bytes of guest memory cannot be reserved{}", if *.huge { " in huge pages" } else { "" })]
    Reserve {
        /// How much was asked for.
        bytes: u64,
        /// Whether huge pages were.
        huge: bool,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
    /// More than there is.
    #[error("{bytes:#x} bytes of guest memory are more than the {host:#x} that this host has")]
    BeyondHost {
        /// How much was asked for.
        bytes: u64,
        /// The host's memory and swap.
        host: u64,
    },
    /// A region is no whole number of huge pages.
    #[error(
        "guest memory at {address:#x} with {bytes:#x} bytes is not a multiple of 0x200000 (a huge \
         page)"
    )]
    NotHugePages {
        /// Guest physical address.
        address: u64,
        /// Its size.
        bytes: u64,
    },
    /// The kernel has not as many huge pages as are asked for.
    #[error(
        "{bytes:#x} bytes of guest memory cannot be had in huge pages: the host has too few free \
         ones (see vm.nr_hugepages)"
    )]
    NoHugePages {
        /// How much was asked for.
        bytes: u64,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
    /// The interpreter cannot use the memory.
    #[error(transparent)]
    Interpreter(#[from] hindsight_interp::MemoryError),
    /// A region could not be mapped.
    #[error("guest memory at {address:#x} cannot be mapped: {reason}")]
    Map {
        /// Guest physical address.
        address: u64,
        /// What was wrong.
        reason: String,
    },
}

/// Calls `each` for every 4-KiB page of guest memory that is not all zero, in order, with its place
/// in the memory file. Untouched memory is not read. Processors must not run.
///
/// # Errors
///
/// When the memory file cannot be read.
pub fn nonzero_pages(memory: &GuestMemoryMmap, mut each: impl FnMut(u64, &[u8])) -> io::Result<()> {
    const PAGE: usize = 4096;
    let Some(file) = memory.iter().find_map(|region| region.file_offset()) else {
        return Ok(());
    };
    let file = file.file();
    let mut buffer = vec![0; 256 * PAGE];
    let mut at = 0;
    loop {
        at = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data / PAGE as u64 * PAGE as u64,
            // No data behind this place.
            Err(Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let hole = seek(file, SeekFrom::Hole(at))?;
        while at < hole {
            let wanted = usize::try_from(hole - at).map_or(buffer.len(), |n| n.min(buffer.len()));
            file.read_exact_at(&mut buffer[..wanted], at)?;
            for page in buffer[..wanted].chunks(PAGE) {
                if page.iter().any(|&byte| byte != 0) {
                    each(at, page);
                }
                at += page.len() as u64;
            }
        }
    }
}

/// The guest-physical address of a place in the memory file.
pub fn address(memory: &GuestMemoryMmap, offset: u64) -> Option<u64> {
    memory.iter().find_map(|region| {
        let within = offset.checked_sub(region.file_offset()?.start())?;
        (within < region.len()).then(|| region.start_addr().0 + within)
    })
}

/// Bytes of one huge page.
pub const HUGE_PAGE: u64 = 2 << 20;

/// Maps memory for `ranges` (first address and bytes of each, ascending, none overlapping), as
/// [`crate::memory::layout::Layout::ram`] gives them.
///
/// # Errors
///
/// When the host has not that much, or no huge pages left where they are asked for.
pub fn allocate(
    ranges: &[(GuestAddress, usize)],
    huge: bool,
) -> Result<GuestMemoryMmap, MemoryError> {
    let bytes = ranges.iter().map(|&(_, len)| len as u64).sum::<u64>();
    if let Some(host) = host_memory().filter(|&host| bytes > host) {
        return Err(MemoryError::BeyondHost { bytes, host });
    }
    if let Some(&(address, len)) = ranges
        .iter()
        .find(|&&(_, len)| huge && !(len as u64).is_multiple_of(HUGE_PAGE))
    {
        return Err(MemoryError::NotHugePages {
            address: address.0,
            bytes: len as u64,
        });
    }
    let flags = if huge {
        MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB
    } else {
        MemfdFlags::CLOEXEC
    };
    let reserve = |source: rustix::io::Errno| MemoryError::Reserve {
        bytes,
        huge,
        source: source.into(),
    };
    let fd = memfd_create("guest-memory", flags).map_err(reserve)?;
    ftruncate(&fd, bytes).map_err(reserve)?;
    let file = Arc::new(std::fs::File::from(fd));
    let mut regions = Vec::new();
    let mut offset = 0;
    for &(address, len) in ranges {
        let map = |reason: String| MemoryError::Map {
            address: address.0,
            reason,
        };
        let from = FileOffset::from_arc(file.clone(), offset);
        let mapping = MmapRegion::build(Some(from), len, PROTECTION, map_flags(huge));
        let mapping = mapping.map_err(|error| match error {
            mmap::MmapRegionError::Mmap(source) if huge => {
                MemoryError::NoHugePages { bytes, source }
            }
            error => map(error.to_string()),
        })?;
        let region = GuestRegionMmap::new(mapping, address)
            .ok_or_else(|| map("it would leave the address space".to_owned()))?;
        regions.push(region);
        offset += len as u64;
    }
    GuestMemoryMmap::from_regions(regions).map_err(|e| MemoryError::Map {
        address: ranges.first().map_or(0, |r| r.0.0),
        reason: e.to_string(),
    })
}

const PROTECTION: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Ordinary pages come when they are touched. Huge pages are reserved when they are mapped: one that
/// is missing later would end the process by SIGBUS.
const fn map_flags(huge: bool) -> i32 {
    if huge {
        libc::MAP_SHARED
    } else {
        libc::MAP_SHARED | libc::MAP_NORESERVE
    }
}

/// Bytes of memory and swap of this host; `None` where it does not say.
fn host_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()
    };
    Some((kib("MemTotal:")? + kib("SwapTotal:").unwrap_or(0)) << 10)
}

/// Guest memory as the interpreter accesses it. It keeps the regions of `memory` mapped.
///
/// # Errors
///
/// When the regions overlap or are not page-aligned.
#[expect(
    unsafe_code,
    reason = "the interpreter reaches guest memory through host pointers"
)]
pub fn for_interpreter(memory: &GuestMemoryMmap) -> Result<hindsight_interp::Memory, MemoryError> {
    let specs: Vec<_> = memory
        .iter()
        .map(|region| hindsight_interp::RegionSpec {
            gpa: region.start_addr().0,
            len: region.len(),
            host: region.as_ptr(),
            writable: true,
        })
        .collect();
    let owner = Box::new(memory.clone());
    // SAFETY: the regions are mapped readable and writable, and stay mapped as long as a clone of
    // `memory` lives; `vm_memory` gives out no references to their bytes.
    Ok(unsafe { hindsight_interp::Memory::new(&specs, owner) }?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{Bytes, GuestMemoryBackend};

    #[test]
    fn ranges_on_both_sides_of_the_hole_are_distinct_memory() {
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
    fn more_than_the_host_has_is_refused() {
        for bytes in [1 << 45, 1 << 62] {
            let error = allocate(&[(GuestAddress(0), bytes)], false).unwrap_err();
            assert!(matches!(error, MemoryError::BeyondHost { .. }), "{error}");
        }
    }

    #[test]
    fn huge_pages_that_are_not_there_are_refused_not_touched() {
        // More than any host keeps as huge pages, less than it has in all.
        let bytes = host_memory().unwrap() & !(HUGE_PAGE - 1);
        let bytes = usize::try_from(bytes).unwrap();
        assert!(allocate(&[(GuestAddress(0), bytes)], true).is_err());
        let error = allocate(&[(GuestAddress(0), 0x10_0000)], true).unwrap_err();
        assert!(matches!(error, MemoryError::NotHugePages { .. }), "{error}");
    }
}
