//! The sockets that debuggers connect to.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

/// An address at which debuggers connect.
///
/// `tcp:HOST:PORT`, `tcp::PORT` or `:PORT` for this machine only, or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ListenAddress {
    /// `tcp:HOST:PORT`.
    Tcp(SocketAddr),
    /// `unix:PATH`.
    Unix(PathBuf),
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err("unix: needs a path".to_owned());
            }
            return Ok(Self::Unix(path.into()));
        }
        let short = text.strip_prefix(':');
        let short = short.filter(|port| port.bytes().all(|byte| byte.is_ascii_digit()));
        let Some(socket) = text.strip_prefix("tcp:").or(short) else {
            return Err("an address has the form tcp:HOST:PORT or unix:PATH".to_owned());
        };
        let socket = match socket.strip_prefix(':').unwrap_or(socket) {
            port if port.bytes().all(|byte| byte.is_ascii_digit()) => format!("127.0.0.1:{port}"),
            _ => socket.to_owned(),
        };
        let found = socket.to_socket_addrs().ok().and_then(|mut all| all.next());
        found
            .map(Self::Tcp)
            .ok_or_else(|| format!("{socket} is not an address of the form HOST:PORT"))
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why no debugger can connect at an address.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Other machines can reach the address.
    #[error("users of other machines can reach {0}, and could do anything to the guest")]
    Remote(IpAddr),
    /// The host refused.
    #[error("cannot listen at {0}")]
    Refused(ListenAddress, #[source] io::Error),
}

impl ListenAddress {
    /// Whether other machines can connect.
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().is_loopback())
    }

    /// Connects to a server as its client. A read or write that takes longer than `limit` fails.
    ///
    /// # Errors
    ///
    /// When there is no server, or the host refuses.
    pub fn connect(&self, limit: Duration) -> io::Result<ClientStream> {
        let limit = Some(limit);
        match self {
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(limit)?;
                stream.set_write_timeout(limit)?;
                Ok(ClientStream::Tcp(stream))
            }
            Self::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(limit)?;
                stream.set_write_timeout(limit)?;
                Ok(ClientStream::Unix(stream))
            }
        }
    }

    /// Starts to listen.
    ///
    /// # Errors
    ///
    /// When other machines could connect and `allow_remote` is not set, or the host refuses.
    pub fn listen(&self, allow_remote: bool) -> Result<Listener, ListenError> {
        let refused = |error| ListenError::Refused(self.clone(), error);
        match self {
            Self::Tcp(address) if self.is_remote() && !allow_remote => {
                Err(ListenError::Remote(address.ip()))
            }
            Self::Tcp(address) => {
                let listener = TcpListener::bind(address).map_err(refused)?;
                listener.set_nonblocking(true).map_err(refused)?;
                Ok(Listener::Tcp(listener))
            }
            Self::Unix(path) => {
                remove_stale(path);
                let listener = UnixListener::bind(path).map_err(refused)?;
                listener.set_nonblocking(true).map_err(refused)?;
                Ok(Listener::Unix(listener, path.clone()))
            }
        }
    }
}

/// Removes the file of a socket whose listener has ended.
fn remove_stale(path: &Path) {
    let is_socket = path
        .symlink_metadata()
        .is_ok_and(|metadata| metadata.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err() {
        // If it cannot be removed, binding fails with the reason.
        let _ = std::fs::remove_file(path);
    }
}

/// A socket that accepts debuggers.
#[derive(Debug)]
#[non_exhaustive]
pub enum Listener {
    /// A TCP socket.
    Tcp(TcpListener),
    /// A Unix socket, with its file, which is removed when the listener is dropped.
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// The address that clients connect to, with the port that the host chose for port 0.
    pub fn address(&self) -> Option<ListenAddress> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok().map(ListenAddress::Tcp),
            Self::Unix(_, path) => Some(ListenAddress::Unix(path.clone())),
        }
    }

    /// Accepts the next client; `None` if no client is waiting.
    pub(crate) fn accept(&self) -> Option<ClientStream> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().ok()?;
                stream.set_nodelay(true).ok()?;
                stream.set_nonblocking(true).ok()?;
                Some(ClientStream::Tcp(stream))
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept().ok()?;
                stream.set_nonblocking(true).ok()?;
                Some(ClientStream::Unix(stream))
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener, _) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The connection between a debugger and its server. On the server's side, reads and writes do not block.
#[derive(Debug)]
#[non_exhaustive]
pub enum ClientStream {
    /// A TCP connection.
    Tcp(TcpStream),
    /// A connection by a Unix socket.
    Unix(UnixStream),
}

impl AsFd for ClientStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Read for ClientStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buffer),
            Self::Unix(stream) => stream.read(buffer),
        }
    }
}

impl Write for ClientStream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(buffer),
            Self::Unix(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_in_every_form() {
        let tcp = |text: &str| Ok(ListenAddress::Tcp(text.parse().unwrap()));
        assert_eq!("tcp:127.0.0.1:1234".parse(), tcp("127.0.0.1:1234"));
        assert_eq!("tcp::1234".parse(), tcp("127.0.0.1:1234"));
        assert_eq!(":1234".parse(), tcp("127.0.0.1:1234"));
        assert_eq!("tcp:[::1]:5".parse(), tcp("[::1]:5"));
        assert_eq!("unix:/x".parse(), Ok(ListenAddress::Unix("/x".into())));
        for bad in ["", "1234", "tcp:", "tcp:1:2:3", "tcp::99999", "unix:"] {
            assert!(bad.parse::<ListenAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn remote_address_is_refused_unless_allowed() {
        let any: ListenAddress = "tcp:0.0.0.0:0".parse().unwrap();
        assert!(matches!(any.listen(false), Err(ListenError::Remote(_))));
        assert!(any.listen(true).is_ok());
        let local: ListenAddress = "tcp::0".parse().unwrap();
        assert!(local.listen(false).is_ok());
    }

    #[test]
    fn listener_removes_its_socket_file_and_replaces_a_stale_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gdb");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "left behind");
        let address = ListenAddress::Unix(path.clone());
        let listener = address.listen(false).unwrap();
        assert!(address.listen(false).is_err(), "in use");
        drop(listener);
        assert!(!path.exists());
    }
}
