//! The file `/kernel`, which a client reads by `symbol-file target:/kernel`: the symbols of the Linux
//! kernel that runs in the guest, where it put itself.
//!
//! It is made anew each time it is opened. There is no other file, and none is ever written.

mod elf;
mod kallsyms;

use gdbstub::target::ext::host_io::{
    FsKind, HostIo, HostIoClose, HostIoCloseOps, HostIoErrno, HostIoError, HostIoFstat,
    HostIoFstatOps, HostIoOpen, HostIoOpenFlags, HostIoOpenMode, HostIoOpenOps, HostIoPread,
    HostIoPreadOps, HostIoResult, HostIoSetfs, HostIoSetfsOps, HostIoStat,
};
use hindsight_cpu::state::CpuState;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::gdb::debugger::Debugger;
use crate::gdb::framing::BODY_MAX;
use crate::memory;
use crate::memory::page_walk;
use kallsyms::{DIGITS, Source, Symbol, Tables};

/// The only descriptor.
const FD: u32 = 3;

/// Most bytes in one answer: escaping can double them.
const PIECE_MAX: usize = BODY_MAX / 2 - 64;

/// How far the tables are from the beginning of the kernel at most, in bytes.
const KERNEL_MAX: u64 = 128 << 20;

impl Source for GuestMemoryMmap {
    fn read(&self, at: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read_slice(&mut bytes, GuestAddress(at)).ok()?;
        Some(bytes)
    }
}

/// The places of [`DIGITS`] in memory.
fn candidates(memory: &GuestMemoryMmap) -> Vec<u64> {
    let mut found = Vec::new();
    let (mut text, mut end) = (Vec::new(), 0);
    // A kernel is in the first range of memory, which is first in the memory file too.
    let read = memory::nonzero_pages(memory, |at, page| {
        if at != end {
            text.clear();
        }
        let start = at - text.len() as u64;
        text.extend_from_slice(page);
        let places = text.windows(DIGITS.len()).enumerate();
        let places = places.filter(|(_, window)| *window == DIGITS);
        found.extend(places.map(|(place, _)| start + place as u64));
        text.drain(..text.len() - (DIGITS.len() - 1));
        end = at + page.len() as u64;
    });
    match read {
        Ok(()) => found,
        Err(error) => {
            tracing::debug!(target: "gdb", "memory: {error}");
            Vec::new()
        }
    }
}

/// The symbols of the kernel: of that which is mapped, if one is. What unpacks a kernel leaves
/// copies behind.
fn symbols(memory: &GuestMemoryMmap, state: &CpuState) -> Option<Vec<Symbol>> {
    let mut first = None;
    for digits in candidates(memory) {
        let Some(tables) = Tables::find(memory, digits) else {
            continue;
        };
        let Some(base) = tables.base(memory) else {
            continue;
        };
        let there = page_walk::linear_to_physical(memory, state, base);
        if there.is_some_and(|at| at <= digits && digits - at < KERNEL_MAX) {
            return tables.symbols(memory);
        }
        first = first.or_else(|| tables.symbols(memory));
    }
    first
}

impl Debugger {
    /// The file, as it is now; `None` if there is no kernel, or none with symbols.
    fn kernel_file(&mut self) -> Option<Vec<u8>> {
        let memory = self.board().ram.map.clone();
        let cpu = self.current;
        let state = self.state(cpu).ok()?;
        let symbols = symbols(&memory, state)?;
        Some(elf::file(&symbols))
    }
}

impl HostIo for Debugger {
    fn support_open(&mut self) -> Option<HostIoOpenOps<'_, Self>> {
        Some(self)
    }

    fn support_close(&mut self) -> Option<HostIoCloseOps<'_, Self>> {
        Some(self)
    }

    fn support_pread(&mut self) -> Option<HostIoPreadOps<'_, Self>> {
        Some(self)
    }

    fn support_fstat(&mut self) -> Option<HostIoFstatOps<'_, Self>> {
        Some(self)
    }

    fn support_setfs(&mut self) -> Option<HostIoSetfsOps<'_, Self>> {
        Some(self)
    }
}

impl HostIoOpen for Debugger {
    fn open(
        &mut self,
        name: &[u8],
        flags: HostIoOpenFlags,
        _: HostIoOpenMode,
    ) -> HostIoResult<u32, Self> {
        let writes = HostIoOpenFlags::O_WRONLY | HostIoOpenFlags::O_RDWR;
        if flags.intersects(writes) {
            return Err(HostIoError::Errno(HostIoErrno::EACCES));
        }
        if !matches!(name, b"/kernel" | b"kernel") {
            return Err(HostIoError::Errno(HostIoErrno::ENOENT));
        }
        self.file = self.kernel_file();
        match &self.file {
            Some(_) => Ok(FD),
            None => Err(HostIoError::Errno(HostIoErrno::ENOENT)),
        }
    }
}

impl HostIoClose for Debugger {
    fn close(&mut self, fd: u32) -> HostIoResult<(), Self> {
        match self.file.take() {
            Some(_) if fd == FD => Ok(()),
            _ => Err(HostIoError::Errno(HostIoErrno::EBADF)),
        }
    }
}

impl HostIoPread for Debugger {
    fn pread(
        &mut self,
        fd: u32,
        count: usize,
        offset: u64,
        buffer: &mut [u8],
    ) -> HostIoResult<usize, Self> {
        let Some(file) = self.file.as_deref().filter(|_| fd == FD) else {
            return Err(HostIoError::Errno(HostIoErrno::EBADF));
        };
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let rest = file.get(from..).unwrap_or(&[]);
        let len = rest.len().min(count).min(buffer.len()).min(PIECE_MAX);
        buffer[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }
}

impl HostIoFstat for Debugger {
    fn fstat(&mut self, fd: u32) -> HostIoResult<HostIoStat, Self> {
        let Some(file) = self.file.as_deref().filter(|_| fd == FD) else {
            return Err(HostIoError::Errno(HostIoErrno::EBADF));
        };
        Ok(HostIoStat {
            st_dev: 0,
            st_ino: 0,
            st_mode: HostIoOpenMode::S_IFREG | HostIoOpenMode::S_IRUSR,
            st_nlink: 1,
            st_uid: 0,
            st_gid: 0,
            st_rdev: 0,
            st_size: file.len() as u64,
            st_blksize: 4096,
            st_blocks: file.len().div_ceil(512) as u64,
            st_atime: 0,
            st_mtime: 0,
            st_ctime: 0,
        })
    }
}

impl HostIoSetfs for Debugger {
    fn setfs(&mut self, _: FsKind) -> HostIoResult<(), Self> {
        Ok(())
    }
}
