//! A unix socket as the device sees it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use hindsight_devices::virtio::vsock::HostStream;

/// A socket that does not block. The device uses it on any thread that serves it.
#[derive(Debug)]
pub(super) struct SocketStream(
    /// A file, so that only `read` and `write` are called, which every thread may.
    File,
);

impl From<UnixStream> for SocketStream {
    fn from(socket: UnixStream) -> Self {
        Self(OwnedFd::from(socket).into())
    }
}

impl HostStream for SocketStream {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        self.0.read(data)
    }

    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0.write(data)
    }

    fn shutdown(&mut self, how: Shutdown) {
        let how = match how {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        // It fails only if the other end has closed its socket already.
        let _ = rustix::net::shutdown(&self.0, how);
    }
}
