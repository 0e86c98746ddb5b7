//! Where the debugger connects.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

/// An address to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `tcp:HOST:PORT`.
    Tcp(SocketAddr),
    /// `unix:PATH`.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err("unix: needs a path".to_owned());
            }
            return Ok(Self::Unix(path.into()));
        }
        let Some(place) = text.strip_prefix("tcp:") else {
            return Err("neither tcp:HOST:PORT nor unix:PATH".to_owned());
        };
        let place = match place.strip_prefix(':').unwrap_or(place) {
            port if port.bytes().all(|byte| byte.is_ascii_digit()) => format!("127.0.0.1:{port}"),
            _ => place.to_owned(),
        };
        let found = place.to_socket_addrs().ok().and_then(|mut all| all.next());
        found
            .map(Self::Tcp)
            .ok_or_else(|| format!("{place} is no address of the form HOST:PORT"))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why nothing can listen there.
#[derive(Debug, Error)]
pub enum ListenError {
    /// The address can be reached from other machines.
    #[error(
        "{0} can be reached from other machines, whose users could do anything to the guest; \
         give --gdb-allow-remote if that is wanted"
    )]
    Remote(IpAddr),
    /// The host refused.
    #[error("cannot listen at {0}")]
    Refused(Address, #[source] io::Error),
}

impl Address {
    /// Other machines can connect.
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().is_loopback())
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

/// Removes a socket that nobody listens at any more.
fn remove_stale(path: &Path) {
    let is_socket = path
        .symlink_metadata()
        .is_ok_and(|metadata| metadata.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err() {
        // If it cannot be removed, binding says why.
        let _ = std::fs::remove_file(path);
    }
}

/// Accepts debuggers.
#[derive(Debug)]
pub enum Listener {
    /// By TCP.
    Tcp(TcpListener),
    /// By a Unix socket, whose file goes away with it.
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// The address that clients connect to, with the port that was chosen.
    pub fn address(&self) -> Option<Address> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok().map(Address::Tcp),
            Self::Unix(_, path) => Some(Address::Unix(path.clone())),
        }
    }

    /// The client that waits, if one does.
    pub(super) fn accept(&self) -> Option<Client> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().ok()?;
                stream.set_nodelay(true).ok()?;
                stream.set_nonblocking(true).ok()?;
                Some(Client::Tcp(stream))
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept().ok()?;
                stream.set_nonblocking(true).ok()?;
                Some(Client::Unix(stream))
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

/// A debugger that is connected.
#[derive(Debug)]
pub(super) enum Client {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Read for Client {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buffer),
            Self::Unix(stream) => stream.read(buffer),
        }
    }
}

impl Write for Client {
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
    fn addresses() {
        let tcp = |text: &str| Ok(Address::Tcp(text.parse().unwrap()));
        assert_eq!("tcp:127.0.0.1:1234".parse(), tcp("127.0.0.1:1234"));
        assert_eq!("tcp::1234".parse(), tcp("127.0.0.1:1234"));
        assert_eq!("tcp:[::1]:5".parse(), tcp("[::1]:5"));
        assert_eq!("unix:/x".parse(), Ok(Address::Unix("/x".into())));
        for bad in ["", "1234", "tcp:", "tcp:1:2:3", "tcp::99999", "unix:"] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }

    #[test]
    fn other_machines_are_refused_unless_allowed() {
        let any: Address = "tcp:0.0.0.0:0".parse().unwrap();
        assert!(matches!(any.listen(false), Err(ListenError::Remote(_))));
        assert!(any.listen(true).is_ok());
        let local: Address = "tcp::0".parse().unwrap();
        assert!(local.listen(false).is_ok());
    }

    #[test]
    fn socket_file_goes_away_and_a_stale_one_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gdb");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "left behind");
        let address = Address::Unix(path.clone());
        let listener = address.listen(false).unwrap();
        assert!(address.listen(false).is_err(), "in use");
        drop(listener);
        assert!(!path.exists());
    }
}
