//! Mapped memory: parts of a region at fixed addresses, and guest RAM.

#![expect(unsafe_code, reason = "memory is mapped at fixed addresses")]

use anyhow::{Result, bail};
use std::any::Any;
use std::io;
use std::sync::Arc;

/// A mapping that is removed when its last owner is dropped.
#[derive(Debug)]
pub(crate) struct Mapping(Arc<MmapRegion>);

/// What `mmap` returned; dropping it unmaps it.
#[derive(Debug)]
struct MmapRegion {
    address: *mut u8,
    len: usize,
}

// SAFETY: it holds an address and uses the memory behind it only to unmap it.
unsafe impl Send for MmapRegion {}
// SAFETY: as for `Send`.
unsafe impl Sync for MmapRegion {}

impl Mapping {
    /// Maps `len` bytes: at `address` if it is not 0, of a file and from an offset if they are
    /// given.
    ///
    /// # Errors
    /// If mmap fails, also because something else is mapped at `address`.
    pub(crate) fn new(
        address: usize,
        len: usize,
        prot: i32,
        file: Option<(i32, usize)>,
    ) -> Result<Self> {
        let fixed = if address == 0 {
            0
        } else {
            libc::MAP_FIXED_NOREPLACE
        };
        let kind = match file {
            // Pages are present from the start, because the error code of #PF says whether they
            // are.
            Some(_) => libc::MAP_SHARED | libc::MAP_POPULATE,
            None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        };
        let (fd, offset) = file.unwrap_or((-1, 0));
        // SAFETY: MAP_FIXED_NOREPLACE never replaces a mapping, so no memory that is in use
        // changes.
        let mapped = unsafe {
            let hint = std::ptr::with_exposed_provenance_mut(address);
            libc::mmap(hint, len, prot, kind | fixed, fd, i64::try_from(offset)?)
        };
        if mapped == libc::MAP_FAILED {
            bail!(
                "cannot map {len:#x} bytes at {address:#x}: {}",
                io::Error::last_os_error()
            );
        }
        Ok(Self(Arc::new(MmapRegion {
            address: mapped.cast(),
            len,
        })))
    }

    /// An owner of the mapping, which keeps it mapped as long as it lives.
    pub(crate) fn owner(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(Arc::clone(&self.0))
    }

    /// The address of the first byte.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.0.address
    }

    /// The mapped bytes.
    ///
    /// # Safety
    /// The mapping is readable. While the slice lives, nothing writes the memory: neither through
    /// another mapping of the same file, nor code that runs on it.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: `new` mapped `len` bytes, which the kernel zeroed; the caller excludes other
        // writers.
        unsafe { std::slice::from_raw_parts(self.0.address, self.0.len) }
    }

    /// The mapped bytes, for writing.
    ///
    /// # Safety
    /// The mapping is readable and writable. While the slice lives, nothing else uses the memory:
    /// neither through another mapping of the same file, nor code that runs on it.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `new` mapped `len` bytes, which the kernel zeroed; the caller excludes all other
        // uses.
        unsafe { std::slice::from_raw_parts_mut(self.0.address, self.0.len) }
    }
}

impl Drop for MmapRegion {
    fn drop(&mut self) {
        // SAFETY: `Mapping::new` mapped these bytes, and who keeps a pointer to them keeps an owner.
        unsafe { libc::munmap(self.address.cast(), self.len) };
    }
}

/// RAM of a guest, which the guest uses only while it runs.
///
/// A caller that passes [`SharedRam::pointer`] to an engine does so in an unsafe block, and promises there
/// that the engine uses the memory only in calls that borrow the RAM's owner mutably.
#[derive(Debug)]
pub(crate) struct SharedRam(Mapping);

impl SharedRam {
    /// Maps `len` zeroed bytes.
    ///
    /// # Errors
    /// If mmap fails.
    pub(crate) fn new(len: usize) -> Result<Self> {
        Mapping::new(0, len, libc::PROT_READ | libc::PROT_WRITE, None).map(Self)
    }

    /// The address of the first byte, for an engine.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.0.pointer()
    }

    /// An owner of the memory, for an engine that keeps the pointer.
    pub(crate) fn owner(&self) -> Box<dyn Any + Send + Sync> {
        self.0.owner()
    }

    /// The guest's memory.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is private, readable and writable; by the type's contract no engine
        // runs now.
        unsafe { self.0.bytes() }
    }

    /// The guest's memory, for writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`.
        unsafe { self.0.bytes_mut() }
    }
}

/// Makes a file of `len` bytes in memory; dropping it closes it.
///
/// # Errors
/// If the kernel refuses.
pub(crate) fn memory_file(len: usize) -> Result<std::fs::File> {
    use std::os::fd::FromRawFd;
    // SAFETY: the name is a C string; the descriptor is new, and the file takes it over.
    let file = unsafe {
        let fd = libc::memfd_create(c"lockstep".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            bail!(
                "cannot make a file in memory: {}",
                io::Error::last_os_error()
            );
        }
        std::fs::File::from_raw_fd(fd)
    };
    file.set_len(len as u64)?;
    Ok(file)
}
