//! What a socket device and the host's side of it exchange.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::sync::{Arc, Mutex};

use crate::bus::lock;

/// Maximum number of streams that wait for the device.
const WAITING_MAX: usize = 256;

/// A stream of the host: the other end of a guest's connection. No call blocks: one that would fails
/// with [`io::ErrorKind::WouldBlock`].
pub trait HostStream: Send {
    /// Reads; 0 if the host sends no more.
    ///
    /// # Errors
    /// As those of a socket.
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize>;

    /// Writes; returns how many bytes the stream took.
    ///
    /// # Errors
    /// As those of a socket.
    fn write(&mut self, data: &[u8]) -> io::Result<usize>;

    /// Closes a direction.
    fn shutdown(&mut self, how: Shutdown);
}

/// Identifies a stream between a device and its host; no two streams of a device have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// The guest asks for a connection to a port of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The stream that the host makes.
    pub id: StreamId,
    /// The port.
    pub port: u32,
}

/// What the host did, for the device.
#[derive(Default)]
pub(super) struct HostEvents {
    /// Streams of clients, with the guest's port.
    pub clients: Vec<(StreamId, Box<dyn HostStream>, u32)>,
    /// Answers to requests; none if the port has no listener.
    pub answers: Vec<(StreamId, Option<Box<dyn HostStream>>)>,
    /// Streams that may have data or room again, and whether their other end is closed.
    pub ready: BTreeMap<StreamId, bool>,
}

#[derive(Default)]
struct Exchange {
    /// The driver is ready.
    running: bool,
    last_id: u64,
    requests: Vec<ConnectRequest>,
    events: HostEvents,
}

struct HostShared {
    exchange: Mutex<Exchange>,
    wake: Box<dyn Fn() + Send + Sync>,
}

/// The host's end of a socket device. After each call that adds something, the device must be served.
#[derive(Clone)]
pub struct VsockHost(Arc<HostShared>);

impl fmt::Debug for VsockHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VsockHost")
    }
}

impl VsockHost {
    /// The end of a device that calls `wake` when the host must take requests and serve the device.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(HostShared {
            exchange: Mutex::default(),
            wake: Box::new(wake),
        }))
    }

    /// Returns the identity of a new stream.
    pub fn new_id(&self) -> StreamId {
        let mut exchange = lock(&self.0.exchange);
        exchange.last_id += 1;
        StreamId(exchange.last_id)
    }

    /// Connects a stream to a port of the guest. It is closed if the guest has no driver yet or has not
    /// taken the streams before.
    pub fn connect(&self, id: StreamId, stream: Box<dyn HostStream>, port: u32) {
        let mut exchange = lock(&self.0.exchange);
        if exchange.running && exchange.events.clients.len() < WAITING_MAX {
            exchange.events.clients.push((id, stream, port));
        }
    }

    /// Answers the guest's request `id`, with a stream if the host has one.
    pub fn answer(&self, id: StreamId, stream: Option<Box<dyn HostStream>>) {
        let mut exchange = lock(&self.0.exchange);
        if exchange.running && exchange.events.answers.len() < WAITING_MAX {
            exchange.events.answers.push((id, stream));
        }
    }

    /// Reports that a stream may have data or room again; `hangup` that its other end is closed.
    pub fn ready(&self, id: StreamId, hangup: bool) {
        let mut exchange = lock(&self.0.exchange);
        if exchange.running {
            *exchange.events.ready.entry(id).or_default() |= hangup;
        }
    }

    /// Takes the requests of the guest, each of which needs an answer.
    pub fn take_requests(&self) -> Vec<ConnectRequest> {
        std::mem::take(&mut lock(&self.0.exchange).requests)
    }

    pub(super) fn wake(&self) {
        (self.0.wake)();
    }

    /// Drops all that was exchanged. Whether the driver is ready is `running`.
    pub(super) fn restart(&self, running: bool) {
        let mut exchange = lock(&self.0.exchange);
        exchange.running = running;
        exchange.requests.clear();
        exchange.events = HostEvents::default();
    }

    pub(super) fn request(&self, request: ConnectRequest) {
        lock(&self.0.exchange).requests.push(request);
        self.wake();
    }

    /// Withdraws a request that the host has not taken yet.
    pub(super) fn withdraw(&self, id: StreamId) {
        lock(&self.0.exchange)
            .requests
            .retain(|request| request.id != id);
    }

    pub(super) fn take_events(&self) -> HostEvents {
        std::mem::take(&mut lock(&self.0.exchange).events)
    }
}
