//! Sockets between guest and host. VIRTIO 1.2, "Socket Device".
//!
//! Connections are streams. Those of the guest to a port of CID 2, the host, and those of the host's
//! clients to a port of the guest are passed to [`HostStream`]s, which never block. The device reads and
//! writes them while it serves its queues; the host's side serves it when a stream is ready.
//!
//! Connections do not survive a restored state: the driver gets a transport reset event.
//!
//! Deviation: packets with other CIDs than the guest's and the host's are dropped without an answer.

mod connection;
mod host;
mod packet;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Bound::{Excluded, Unbounded};

use self::connection::{Broken, Connection, ConnectionPhase, NextPacket};
use self::host::HostEvents;
pub use self::host::{ConnectRequest, HostStream, StreamId, VsockHost};
use self::packet::{HEADER_LEN, PacketHeader, TYPE_STREAM, op};
use super::chain::Chain;
use super::device::{VirtioDevice, VirtioDeviceState, VirtioKind, VirtioStateError};
use super::queues::{QueueError, VirtQueues};

/// The CID of the host.
const HOST_CID: u64 = 2;
/// Maximum number of connections.
pub const CONNECTIONS_MAX: usize = 256;
/// RST packets that wait for a buffer of the guest. While there are more, no packet of the guest is taken.
const RESETS_MAX: usize = 64;
/// The first port of the host from which clients connect.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// VIRTIO_VSOCK_F_STREAM.
const FEATURE_STREAM: u64 = 1 << 0;
/// VIRTIO_VSOCK_EVENT_TRANSPORT_RESET.
const EVENT_TRANSPORT_RESET: u32 = 0;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;

/// The two ports of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Ports {
    host: u32,
    guest: u32,
}

/// A virtio socket device.
pub struct Vsock {
    cid: u64,
    host: VsockHost,
    connections: BTreeMap<Ports, Connection>,
    /// Connections that the guest has closed and whose data the host has not taken.
    draining: Vec<Connection>,
    /// RST packets for connections that do not exist.
    resets: VecDeque<PacketHeader>,
    /// The connection that sent the last packet.
    last: Ports,
    next_host_port: u32,
    running: bool,
    /// The driver must be told that all connections are lost.
    lost_connections: bool,
    data: Vec<u8>,
}

impl fmt::Debug for Vsock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vsock")
            .field("cid", &self.cid)
            .field("connections", &self.connections.len())
            .finish_non_exhaustive()
    }
}

impl Vsock {
    /// The device of a guest with the context identifier `cid`.
    pub fn new(cid: u32, host: VsockHost) -> Self {
        Self {
            cid: cid.into(),
            host,
            connections: BTreeMap::new(),
            draining: Vec::new(),
            resets: VecDeque::new(),
            last: Ports { host: 0, guest: 0 },
            next_host_port: FIRST_HOST_PORT,
            running: false,
            lost_connections: false,
            data: Vec::new(),
        }
    }

    /// Drops all connections. Whether the driver is ready is `running`.
    fn restart(&mut self, running: bool) {
        self.connections.clear();
        self.draining.clear();
        self.resets.clear();
        self.lost_connections = false;
        self.running = running;
        self.host.restart(running);
    }

    fn is_full(&self) -> bool {
        self.connections.len() + self.draining.len() >= CONNECTIONS_MAX
    }

    /// A header from the host to the guest.
    fn header(&self, ports: Ports) -> PacketHeader {
        PacketHeader {
            src_cid: HOST_CID,
            dst_cid: self.cid,
            src_port: ports.host,
            dst_port: ports.guest,
            socket_type: TYPE_STREAM,
            ..PacketHeader::default()
        }
    }

    /// Ends a connection, and resets it in the guest.
    fn reset_connection(&mut self, ports: Ports) {
        if let Some(connection) = self.connections.remove(&ports) {
            self.host.withdraw(connection.id);
            if connection.is_known_to_guest() {
                let header = self.header(ports);
                self.resets.push_back(PacketHeader {
                    op: op::RST,
                    ..header
                });
            }
        }
    }

    fn ports_of(&self, id: StreamId) -> Option<Ports> {
        let mut connections = self.connections.iter();
        connections.find_map(|(ports, connection)| (connection.id == id).then_some(*ports))
    }

    fn take_host_events(&mut self) {
        let HostEvents {
            clients,
            answers,
            ready,
        } = self.host.take_events();
        for (id, stream, port) in clients {
            if let Some(ports) = self.client_ports(port) {
                let connection = Connection::requested(id, stream);
                self.connections.insert(ports, connection);
            }
        }
        for (id, stream) in answers {
            let Some(ports) = self.ports_of(id) else {
                continue;
            };
            match (self.connections.get_mut(&ports), stream) {
                (Some(connection), Some(stream)) => connection.accept(stream),
                _ => self.reset_connection(ports),
            }
        }
        for (id, hangup) in ready {
            self.wake(id, hangup);
        }
    }

    /// The ports of a new connection to a port of the guest; none if there are too many.
    fn client_ports(&mut self, guest: u32) -> Option<Ports> {
        if self.is_full() {
            return None;
        }
        loop {
            let host = self.next_host_port;
            self.next_host_port = host.checked_add(1).unwrap_or(FIRST_HOST_PORT);
            let ports = Ports { host, guest };
            if !self.connections.contains_key(&ports) {
                return Some(ports);
            }
        }
    }

    fn wake(&mut self, id: StreamId, hangup: bool) {
        if let Some(ports) = self.ports_of(id) {
            let woken = self
                .connections
                .get_mut(&ports)
                .map(|connection| connection.wake(hangup));
            if woken == Some(Err(Broken)) {
                self.reset_connection(ports);
            }
            return;
        }
        self.draining.retain_mut(|connection| {
            connection.id != id || connection.wake(hangup).is_ok() && connection.has_outgoing()
        });
    }

    /// Takes packets of the guest. Returns whether some may be left, because too many resets wait.
    fn receive(&mut self, queues: &mut VirtQueues<'_>) -> Result<bool, QueueError> {
        while self.resets.len() < RESETS_MAX {
            let Some(chain) = queues.pop(TRANSMIT)? else {
                return Ok(false);
            };
            self.receive_packet(queues, &chain)?;
            queues.complete(TRANSMIT, &chain, 0)?;
        }
        Ok(true)
    }

    fn receive_packet(&mut self, queues: &VirtQueues<'_>, chain: &Chain) -> Result<(), QueueError> {
        let mut bytes = [0; HEADER_LEN];
        if chain.read(queues.memory(), 0, &mut bytes)? != HEADER_LEN {
            return Err(QueueError::Request("a packet has no header"));
        }
        let header = PacketHeader::from_bytes(&bytes);
        let len = header.len as usize;
        if len > chain.readable_len() - HEADER_LEN {
            return Err(QueueError::Request(
                "a packet is shorter than its header says",
            ));
        }
        if header.src_cid != self.cid || header.dst_cid != HOST_CID {
            tracing::debug!(
                "virtio-vsock: dropped a packet from CID {} to CID {}",
                header.src_cid,
                header.dst_cid
            );
            return Ok(());
        }
        let ports = Ports {
            host: header.dst_port,
            guest: header.src_port,
        };
        let known = header.socket_type == TYPE_STREAM && self.connections.contains_key(&ports);
        if !known {
            self.receive_unknown(ports, &header);
            return Ok(());
        }
        self.data.clear();
        if header.op == op::RW {
            // More than the guest's credit is an error, so that no more is copied.
            self.data
                .resize(len.min(connection::BUFFER_LEN as usize + 1), 0);
            chain.read(queues.memory(), HEADER_LEN, &mut self.data)?;
        }
        if self.receive_known(ports, &header) == Err(Broken) {
            self.reset_connection(ports);
        }
        Ok(())
    }

    /// Takes a packet of a connection that does not exist.
    fn receive_unknown(&mut self, ports: Ports, header: &PacketHeader) {
        let requests = header.op == op::REQUEST && header.socket_type == TYPE_STREAM;
        if requests && !self.is_full() {
            let id = self.host.new_id();
            let connection = Connection::opening(id, header);
            self.connections.insert(ports, connection);
            let port = ports.host;
            self.host.request(ConnectRequest { id, port });
        } else if header.op != op::RST {
            self.resets.push_back(header.reset());
        }
    }

    /// Takes a packet of an existing connection, whose data is in `data`.
    fn receive_known(&mut self, ports: Ports, header: &PacketHeader) -> Result<(), Broken> {
        let connection = self.connections.get_mut(&ports).ok_or(Broken)?;
        connection.take_credit(header);
        match header.op {
            op::RESPONSE if connection.phase == ConnectionPhase::Requested => {
                connection.accepted_by_guest(&format!("OK {}\n", ports.host))
            }
            op::RST => {
                self.host.withdraw(connection.id);
                self.connections.remove(&ports);
                Ok(())
            }
            op::SHUTDOWN if connection.phase == ConnectionPhase::Established => {
                connection.close(header.flags);
                if connection.is_closed() {
                    self.drain(ports);
                }
                Ok(())
            }
            op::RW => connection.receive(&self.data),
            op::CREDIT_UPDATE => Ok(()),
            op::CREDIT_REQUEST => {
                connection.request_update();
                Ok(())
            }
            _ => Err(Broken),
        }
    }

    /// Confirms that a connection is closed by RST. Its data still goes to the host.
    fn drain(&mut self, ports: Ports) {
        let header = self.header(ports);
        self.resets.push_back(PacketHeader {
            op: op::RST,
            ..header
        });
        if let Some(connection) = self.connections.remove(&ports)
            && connection.has_outgoing()
        {
            self.draining.push(connection);
        }
    }

    /// The next connection with a packet for the guest, in turn.
    fn next_packet(&mut self) -> Option<(Ports, NextPacket)> {
        let mut ports = self.last;
        for _ in 0..self.connections.len() {
            let mut after = self.connections.range((Excluded(ports), Unbounded));
            let next = after.next().or_else(|| self.connections.iter().next());
            ports = *next?.0;
            match self.connections.get_mut(&ports)?.next_packet() {
                Ok(Some(packet)) => return Some((ports, packet)),
                Ok(None) => {}
                Err(Broken) => self.reset_connection(ports),
            }
        }
        None
    }

    /// Sends packets to the guest while it has buffers for them.
    fn send(&mut self, queues: &mut VirtQueues<'_>) -> Result<(), QueueError> {
        loop {
            let next = match self.resets.is_empty() {
                true => self.next_packet(),
                false => None,
            };
            if next.is_none() && self.resets.is_empty() {
                return Ok(());
            }
            let Some(chain) = queues.pop(RECEIVE)? else {
                return Ok(());
            };
            let space = chain.writable_len().checked_sub(HEADER_LEN);
            let space = space.ok_or(QueueError::Request(
                "a receive buffer has no room for a header",
            ))?;
            let written = match (self.resets.pop_front(), next) {
                (Some(header), _) => chain.write(queues.memory(), 0, &header.to_bytes())?,
                (None, Some((ports, packet))) => {
                    self.send_packet(queues, &chain, (ports, packet), space)?
                }
                (None, None) => 0,
            };
            queues.complete(RECEIVE, &chain, written)?;
        }
    }

    /// Writes a packet of a connection to a buffer with `space` bytes for its data.
    fn send_packet(
        &mut self,
        queues: &VirtQueues<'_>,
        chain: &Chain,
        (ports, packet): (Ports, NextPacket),
        space: usize,
    ) -> Result<usize, QueueError> {
        let mut header = self.header(ports);
        let Some(connection) = self.connections.get_mut(&ports) else {
            return Ok(0);
        };
        self.last = ports;
        let mut len = 0;
        if packet.op == op::RW {
            let data = connection.data(space);
            len = chain.write(queues.memory(), HEADER_LEN, data)?;
            if len == 0 {
                return Err(QueueError::Request("a receive buffer has no room for data"));
            }
        }
        connection.send(packet, &mut header, len);
        Ok(len + chain.write(queues.memory(), 0, &header.to_bytes())?)
    }

    /// Reports that a restored state has no connections.
    fn report_lost_connections(&mut self, queues: &mut VirtQueues<'_>) -> Result<(), QueueError> {
        if !self.lost_connections {
            return Ok(());
        }
        let Some(chain) = queues.pop(EVENT)? else {
            return Ok(());
        };
        let event = EVENT_TRANSPORT_RESET.to_le_bytes();
        if chain.writable_len() < event.len() {
            return Err(QueueError::Request("an event buffer has no 4 bytes"));
        }
        let written = chain.write(queues.memory(), 0, &event)?;
        queues.complete(EVENT, &chain, written)?;
        self.lost_connections = false;
        Ok(())
    }
}

impl Vsock {
    fn serve(&mut self, queues: &mut VirtQueues<'_>) -> Result<(), QueueError> {
        self.report_lost_connections(queues)?;
        self.take_host_events();
        loop {
            let may_be_left = self.receive(queues)?;
            self.send(queues)?;
            if !may_be_left || self.resets.len() >= RESETS_MAX {
                return Ok(());
            }
        }
    }
}

impl VirtioDevice for Vsock {
    fn kind(&self) -> VirtioKind {
        VirtioKind::Socket
    }

    fn features(&self) -> u64 {
        FEATURE_STREAM
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![256, 256, 64]
    }

    fn config(&self) -> Vec<u8> {
        self.cid.to_le_bytes().to_vec()
    }

    fn activate(&mut self, _: u64) {
        self.restart(true);
    }

    fn reset(&mut self) {
        self.restart(false);
    }

    fn process(&mut self, queues: &mut VirtQueues<'_>, _: usize) -> Result<(), QueueError> {
        let served = self.serve(queues);
        if served.is_err() {
            // The device stops: its peers are told, and new clients are refused.
            self.restart(false);
        }
        served
    }

    fn save(&self) -> VirtioDeviceState {
        VirtioDeviceState::Socket {
            running: self.running,
        }
    }

    fn restore(&mut self, state: &VirtioDeviceState) -> Result<(), VirtioStateError> {
        let VirtioDeviceState::Socket { running } = *state else {
            return Err(VirtioStateError::OtherDevices);
        };
        self.restart(running);
        self.lost_connections = running;
        // The driver gets the event when the device is served.
        self.host.wake();
        Ok(())
    }
}
