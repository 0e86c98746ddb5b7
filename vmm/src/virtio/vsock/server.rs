//! The thread that accepts clients, connects the guest to sockets, and serves the device when one of
//! them is ready.
//!
//! All sockets are in one epoll instance. Those of connections are edge-triggered: the device itself
//! remembers what it could not read or write yet.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hindsight_devices::virtio::vsock::{ConnectRequest, StreamId, Vsock, VsockHost};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use thiserror::Error;

use super::spec::VsockSpec;
use super::stream::SocketStream;

/// Maximum number of clients that have not written their line yet. A further one replaces the first.
const HANDSHAKES_MAX: usize = 32;
/// Maximum number of bytes of the line, `CONNECT <port>\n`.
const LINE_MAX: usize = 32;
/// Events that are taken at once.
const EVENTS_MAX: usize = 64;
/// The pause after a client could not be accepted, such as without descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// What the data of an event says besides the number of a stream.
const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// Why there are no sockets.
#[derive(Debug, Error)]
pub enum VsockError {
    /// The path is too long for the sockets of ports.
    #[error(
        "the path {0:?} is longer than 96 bytes: choose a shorter one, to which ports can be added"
    )]
    PathLength(PathBuf),
    /// A descriptor cannot be made.
    #[error("the descriptors of the sockets cannot be made")]
    Descriptor(#[source] io::Error),
}

/// The host's end of a device whose socket does not exist yet.
#[derive(Debug)]
pub struct VsockLink {
    host: VsockHost,
    wake: Arc<OwnedFd>,
    socket: PathBuf,
}

/// Makes the device of these sockets, and the host's end of it.
///
/// # Errors
///
/// The path is too long, or the process has no descriptor left.
pub fn open(spec: &VsockSpec) -> Result<(Vsock, VsockLink), VsockError> {
    if !spec.path_fits() {
        return Err(VsockError::PathLength(spec.socket.clone()));
    }
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let wake = Arc::new(wake.map_err(|error| VsockError::Descriptor(error.into()))?);
    let waker = wake.clone();
    let host = VsockHost::new(move || {
        // It fails only if the thread is already to wake.
        let _ = rustix::io::write(&waker, &1_u64.to_ne_bytes());
    });
    let link = VsockLink {
        host: host.clone(),
        wake,
        socket: spec.socket.clone(),
    };
    Ok((Vsock::new(spec.cid, host), link))
}

impl VsockLink {
    /// The path of the socket for clients.
    pub fn path(&self) -> &Path {
        &self.socket
    }

    /// Makes the server of the clients of `listener`, whose calls do not block.
    ///
    /// # Errors
    ///
    /// The process has no descriptor left.
    pub fn server(self, listener: &UnixListener) -> Result<VsockServer, VsockError> {
        let listener = listener.try_clone().map_err(VsockError::Descriptor)?;
        let failed = |error: rustix::io::Errno| VsockError::Descriptor(error.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let add = |fd, data| epoll::add(&epoll, fd, EventData::new_u64(data), EventFlags::IN);
        add(listener.as_fd(), LISTENER).map_err(failed)?;
        add(self.wake.as_fd(), WAKE).map_err(failed)?;
        Ok(VsockServer {
            link: self,
            listener,
            epoll,
            handshakes: BTreeMap::new(),
            warned: false,
        })
    }
}

/// A client that has not written its whole line.
#[derive(Debug)]
struct Handshake {
    socket: UnixStream,
    line: Vec<u8>,
}

/// What a client's line asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandshakeProgress {
    /// The line has no end yet.
    Incomplete,
    /// A connection to this port.
    Port(u32),
    /// Nothing: the client is disconnected.
    Refused,
}

/// The port in `CONNECT <port>`.
fn parse_line(line: &[u8]) -> Option<u32> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let command = words.next()?;
    let port = words.next()?.parse().ok()?;
    (command.eq_ignore_ascii_case("CONNECT") && words.next().is_none()).then_some(port)
}

impl Handshake {
    /// Reads the line, and nothing after it.
    fn advance(&mut self) -> HandshakeProgress {
        let mut byte = [0];
        loop {
            match self.socket.read(&mut byte) {
                Ok(1) if byte == *b"\n" => {
                    let port = parse_line(&self.line);
                    return port.map_or(HandshakeProgress::Refused, HandshakeProgress::Port);
                }
                Ok(1) if self.line.len() < LINE_MAX => self.line.extend(byte),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return HandshakeProgress::Incomplete;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return HandshakeProgress::Refused,
            }
        }
    }
}

/// Serves the sockets of a guest.
#[derive(Debug)]
pub struct VsockServer {
    link: VsockLink,
    listener: UnixListener,
    epoll: OwnedFd,
    handshakes: BTreeMap<u64, Handshake>,
    /// A lost client was reported.
    warned: bool,
}

impl VsockServer {
    /// Serves the sockets for ever. `serve` makes the device process its queues.
    pub fn run(mut self, serve: impl Fn()) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, spare, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("--vsock: the sockets are no longer served: {error}");
                    return;
                }
            }
            for event in events.drain(..) {
                self.take_event(event.data.u64(), event.flags);
            }
            serve();
        }
    }

    fn take_event(&mut self, data: u64, flags: EventFlags) {
        match data {
            LISTENER => self.accept(),
            WAKE => {
                let _ = rustix::io::read(&self.link.wake, &mut [0; 8]);
                for request in self.link.host.take_requests() {
                    self.answer(request);
                }
            }
            id => {
                let closed = flags.intersects(EventFlags::HUP | EventFlags::ERR);
                let shakes = self.handshakes.contains_key(&id);
                if shakes {
                    self.shake(id);
                }
                // The edge of a client that closed behind its line does not come again.
                if !shakes || closed && !self.handshakes.contains_key(&id) {
                    self.link.host.ready(StreamId(id), closed);
                }
            }
        }
    }

    /// Reports the edges of a socket as events with the number of its stream.
    fn watch(&self, id: StreamId, socket: &UnixStream) -> io::Result<()> {
        let edges = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, socket, EventData::new_u64(id.0), edges)?;
        Ok(())
    }

    fn accept(&mut self) {
        match self.accept_client() {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                if !std::mem::replace(&mut self.warned, true) {
                    tracing::warn!("--vsock: a client is lost: {error}");
                }
                thread::sleep(PAUSE);
            }
        }
    }

    fn accept_client(&mut self) -> io::Result<()> {
        let (socket, _) = self.listener.accept()?;
        socket.set_nonblocking(true)?;
        let id = self.link.host.new_id();
        self.watch(id, &socket)?;
        if self.handshakes.len() >= HANDSHAKES_MAX {
            self.handshakes.pop_first();
        }
        let line = Vec::new();
        self.handshakes.insert(id.0, Handshake { socket, line });
        Ok(())
    }

    fn shake(&mut self, id: u64) {
        let Some(handshake) = self.handshakes.get_mut(&id) else {
            return;
        };
        let progress = handshake.advance();
        if progress == HandshakeProgress::Incomplete {
            return;
        }
        if let (Some(Handshake { socket, .. }), HandshakeProgress::Port(port)) =
            (self.handshakes.remove(&id), progress)
        {
            let stream = Box::new(SocketStream::from(socket));
            self.link.host.connect(StreamId(id), stream, port);
        }
    }

    /// Connects the guest to the socket of a port, if that listens.
    fn answer(&self, request: ConnectRequest) {
        let ConnectRequest { id, port } = request;
        let path = port_path(&self.link.socket, port);
        let socket = connect(&path).and_then(|socket| {
            self.watch(id, &socket)?;
            Ok(socket)
        });
        match socket {
            Ok(socket) => {
                let stream = Box::new(SocketStream::from(socket));
                self.link.host.answer(id, Some(stream));
            }
            Err(error) => {
                tracing::debug!("--vsock: {}: {error}", path.display());
                self.link.host.answer(id, None);
            }
        }
    }
}

/// The socket of a port of the host.
fn port_path(socket: &Path, port: u32) -> PathBuf {
    let mut path = OsString::from(socket);
    path.push(format!("_{port}"));
    path.into()
}

/// Connects to a socket without waiting: one whose queue of clients is full refuses.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_clients_are_read_exactly() {
        let rows: [(&[u8], HandshakeProgress, &[u8]); 7] = [
            (b"CONNECT 52\nrest", HandshakeProgress::Port(52), b"rest"),
            (
                b"connect 4294967295\n",
                HandshakeProgress::Port(u32::MAX),
                b"",
            ),
            (b"CONNECT 52", HandshakeProgress::Incomplete, b""),
            (b"CONNECT 4294967296\n", HandshakeProgress::Refused, b""),
            (b"CONNECT 1 2\nx", HandshakeProgress::Refused, b"x"),
            (b"\xff\n", HandshakeProgress::Refused, b""),
            (&[b'x'; 33], HandshakeProgress::Refused, b""),
        ];
        for (input, progress, rest) in rows {
            use std::io::Write;
            let (mut client, socket) = UnixStream::pair().unwrap();
            socket.set_nonblocking(true).unwrap();
            client.write_all(input).unwrap();
            let line = Vec::new();
            let mut handshake = Handshake { socket, line };
            assert_eq!(handshake.advance(), progress, "{input:?}");
            let mut left = Vec::new();
            drop(client);
            handshake.socket.read_to_end(&mut left).unwrap();
            assert_eq!(left, rest, "{input:?}");
        }
    }

    #[test]
    fn port_follows_the_path() {
        assert_eq!(port_path(Path::new("/a/s"), 52), Path::new("/a/s_52"));
    }

    #[test]
    fn absent_and_crowded_listeners_refuse_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        assert!(connect(&path).is_err());
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        let clients: Vec<_> = (0..8).map(|_| connect(&path)).collect();
        assert!(clients.first().is_some_and(Result::is_ok));
        assert!(clients.last().is_some_and(Result::is_err));
    }
}
