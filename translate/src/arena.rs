//! Memory for translated code and for the data that it uses.
//!
//! One memfd is mapped twice: executable and read-only in the low 2 GiB, and writable at any
//! address. No address is both writable and executable. The data precede the code in the low 2 GiB,
//! so that code and data refer to each other by 32-bit addresses.

#![expect(
    unsafe_code,
    reason = "memory is mapped, and written through raw pointers"
)]

use crate::layout::DATA_BYTES;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

/// A memory mapping, which is unmapped when the value is dropped.
#[derive(Debug)]
struct CodeMapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: the value owns the memory exclusively.
unsafe impl Send for CodeMapping {}

impl Drop for CodeMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and not used after this.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

/// Maps a file from its start, or anonymous memory if `file` is `None`.
///
/// # Safety
/// With `MAP_FIXED` in `flags`, the caller must own the range at `address`.
unsafe fn map(
    address: *mut u8,
    len: usize,
    protection: i32,
    flags: i32,
    file: Option<&OwnedFd>,
) -> io::Result<CodeMapping> {
    let fd = file.map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: with MAP_FIXED, the caller guarantees that it owns the range; otherwise the kernel
    // chooses a free range.
    let found = unsafe { libc::mmap(address.cast(), len, protection, flags, fd, 0) };
    if found == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let address = NonNull::new(found.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
    Ok(CodeMapping { address, len })
}

/// Code and data of one processor's translator.
#[derive(Debug)]
pub(crate) struct Arena {
    /// The data, followed by the executable mapping of the code.
    _reservation: CodeMapping,
    data: NonNull<u8>,
    /// The writable mapping of the code.
    writable: CodeMapping,
    /// Address of the first byte of the executable mapping.
    code: u64,
    capacity: usize,
    used: usize,
}

// SAFETY: the value owns the memory exclusively.
unsafe impl Send for Arena {}

impl Arena {
    /// Maps an arena for `capacity` bytes of code, rounded up to whole pages.
    pub(crate) fn new(capacity: usize) -> io::Result<Self> {
        let capacity = capacity.clamp(1 << 16, 1 << 30).next_multiple_of(4096);
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses a free range.
        let reservation = unsafe {
            map(
                null_mut(),
                DATA_BYTES + capacity,
                libc::PROT_READ | libc::PROT_WRITE,
                private | libc::MAP_32BIT,
                None,
            )?
        };
        // SAFETY: the name is terminated by a NUL.
        let fd = unsafe { libc::memfd_create(c"hindsight-code".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just created, and nothing else owns it.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        let len = libc::off_t::try_from(capacity).map_err(io::Error::other)?;
        // SAFETY: the call takes a descriptor and a length, and accesses no memory.
        if unsafe { libc::ftruncate(file.as_raw_fd(), len) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let data = reservation.address;
        let at = data.as_ptr().wrapping_add(DATA_BYTES);
        // SAFETY: the range is the second part of the reservation.
        let code = unsafe {
            map(
                at,
                capacity,
                libc::PROT_READ | libc::PROT_EXEC,
                libc::MAP_SHARED | libc::MAP_FIXED,
                Some(&file),
            )?
        };
        // Dropping the reservation unmaps this range, too.
        std::mem::forget(code);
        // SAFETY: without MAP_FIXED the kernel chooses a free range.
        let writable = unsafe {
            map(
                null_mut(),
                capacity,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                Some(&file),
            )?
        };
        Ok(Self {
            _reservation: reservation,
            data,
            writable,
            code: at.expose_provenance() as u64,
            capacity,
            used: 0,
        })
    }

    /// Returns the start of the data.
    pub(crate) fn data(&self) -> NonNull<u8> {
        self.data
    }

    /// Returns the address of the byte at an offset in the data.
    pub(crate) fn data_address(&self, offset: usize) -> u64 {
        debug_assert!(offset < DATA_BYTES);
        (self.data.as_ptr().expose_provenance() + offset) as u64
    }

    /// Returns the address at which [`Arena::add`] places the next code.
    pub(crate) fn next(&self) -> u64 {
        self.code + self.used as u64
    }

    /// Bytes of code that have been added.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Adds code at [`Arena::next`]; returns false if it does not fit.
    pub(crate) fn add(&mut self, code: &[u8]) -> bool {
        if self.used + code.len() > self.capacity {
            return false;
        }
        self.write(self.next(), code);
        self.used += code.len();
        true
    }

    /// Overwrites code that was added before.
    pub(crate) fn write(&mut self, address: u64, code: &[u8]) {
        let offset = usize::try_from(address - self.code).unwrap_or(usize::MAX);
        assert!(offset <= self.capacity && code.len() <= self.capacity - offset);
        // SAFETY: the range is within the writable mapping, as just checked.
        unsafe {
            let to = self.writable.address.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(code.as_ptr(), to, code.len());
        }
    }

    /// Drops all code after the first `keep` bytes.
    pub(crate) fn truncate(&mut self, keep: usize) {
        self.used = self.used.min(keep);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "maps memory")]
    fn code_runs_where_it_was_added_and_follows_changes() {
        let mut arena = Arena::new(1).expect("the host has memory");
        // mov eax, 7; ret
        let at = arena.next();
        assert!(at < 1 << 31);
        assert!(arena.add(&[0xb8, 7, 0, 0, 0, 0xc3]));
        // SAFETY: the code above is a function without arguments.
        let f: extern "sysv64" fn() -> u32 = unsafe {
            std::mem::transmute(std::ptr::with_exposed_provenance::<u8>(
                usize::try_from(at).expect("64-bit host"),
            ))
        };
        assert_eq!(f(), 7);
        arena.write(at + 1, &[9]);
        assert_eq!(f(), 9);
        assert!(!arena.add(&vec![0; 1 << 16]));
        arena.truncate(0);
        assert_eq!((arena.used(), arena.next()), (0, at));
    }
}
