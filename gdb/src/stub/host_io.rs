//! The files of [`crate::client_file`], of which a client has one open at a time.

use gdbstub::target::ext::host_io::{
    FsKind, HostIo, HostIoClose, HostIoCloseOps, HostIoErrno, HostIoError, HostIoFstat,
    HostIoFstatOps, HostIoOpen, HostIoOpenFlags, HostIoOpenMode, HostIoOpenOps, HostIoPread,
    HostIoPreadOps, HostIoResult, HostIoSetfs, HostIoSetfsOps, HostIoStat,
};

use crate::client_file::ClientFile;
use crate::debugger::Debugger;
use crate::framing::BODY_MAX;

/// The only file descriptor.
const FD: u32 = 3;

/// Maximum number of bytes in one reply: escaping can double them.
const READ_MAX: usize = BODY_MAX / 2 - 64;

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

/// Returns the open file with this descriptor.
fn open_file(debugger: &Debugger, fd: u32) -> HostIoResult<&ClientFile, Debugger> {
    let file = debugger.open_file.as_ref().filter(|_| fd == FD);
    file.ok_or(HostIoError::Errno(HostIoErrno::EBADF))
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
        self.open_file = ClientFile::open(self, name).ok().flatten();
        match &self.open_file {
            Some(_) => Ok(FD),
            None => Err(HostIoError::Errno(HostIoErrno::ENOENT)),
        }
    }
}

impl HostIoClose for Debugger {
    fn close(&mut self, fd: u32) -> HostIoResult<(), Self> {
        match self.open_file.take() {
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
        let file = open_file(self, fd)?;
        let len = count.min(buffer.len()).min(READ_MAX);
        Ok(file.read(self.target.memory(), offset, &mut buffer[..len]))
    }
}

impl HostIoFstat for Debugger {
    fn fstat(&mut self, fd: u32) -> HostIoResult<HostIoStat, Self> {
        let file = open_file(self, fd)?;
        Ok(HostIoStat {
            st_dev: 0,
            st_ino: 0,
            st_mode: HostIoOpenMode::S_IFREG | HostIoOpenMode::S_IRUSR,
            st_nlink: 1,
            st_uid: 0,
            st_gid: 0,
            st_rdev: 0,
            st_size: file.len(),
            st_blksize: 4096,
            st_blocks: file.len().div_ceil(512),
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
