//! Memory of a region: a shared mapping seen twice, and plain guest memory.

#![expect(unsafe_code, reason = "memory is mapped at fixed addresses")]

use anyhow::{Result, bail};
use std::any::Any;
use std::io;
use std::sync::Arc;

/// A mapping, removed when it is dropped.
#[derive(Debug)]
struct Mapping {
    at: *mut u8,
    len: usize,
}

// SAFETY: it holds an address only.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

/// A mapping that is removed with its last owner.
#[derive(Debug)]
pub struct Map(Arc<Mapping>);

impl Map {
    /// Maps `len` bytes: at a linear address if it is not 0, of a file if there is one.
    ///
    /// # Errors
    /// What mmap says.
    pub fn new(at: usize, len: usize, prot: i32, file: Option<(i32, usize)>) -> Result<Self> {
        let fixed = if at == 0 {
            0
        } else {
            libc::MAP_FIXED_NOREPLACE
        };
        let kind = match file {
            // Present from the start: an error code tells whether a page is.
            Some(_) => libc::MAP_SHARED | libc::MAP_POPULATE,
            None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        };
        let (fd, offset) = file.unwrap_or((-1, 0));
        // SAFETY: a fresh mapping that replaces none.
        let p = unsafe {
            let hint = std::ptr::with_exposed_provenance_mut(at);
            libc::mmap(hint, len, prot, kind | fixed, fd, i64::try_from(offset)?)
        };
        if p == libc::MAP_FAILED {
            bail!(
                "cannot map {len:#x} bytes at {at:#x}: {}",
                io::Error::last_os_error()
            );
        }
        Ok(Self(Arc::new(Mapping { at: p.cast(), len })))
    }

    /// Its address.
    pub fn pointer(&self) -> *mut u8 {
        self.0.at
    }

    /// An owner of the mapping, which keeps it as long as it lives.
    pub fn owner(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(self.0.clone())
    }

    /// Its bytes. Nothing else may use them meanwhile.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is ours, readable, writable and initialized; what else maps the
        // same file or runs on it does so only between calls.
        unsafe { std::slice::from_raw_parts_mut(self.0.at, self.0.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

/// A file in memory of `len` bytes; the caller closes it by dropping it.
///
/// # Errors
/// What the kernel says.
pub fn memory_file(len: usize) -> Result<std::fs::File> {
    use std::os::fd::FromRawFd;
    // SAFETY: the name is a C string; the descriptor is new and ours.
    let file = unsafe {
        let fd = libc::memfd_create(c"lockstep".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            bail!("cannot make memory: {}", io::Error::last_os_error());
        }
        std::fs::File::from_raw_fd(fd)
    };
    file.set_len(len as u64)?;
    Ok(file)
}
