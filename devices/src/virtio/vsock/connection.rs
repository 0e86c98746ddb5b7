//! One connection: its data in both directions, and their flow control by credit.
//!
//! Each side announces the size of its receive buffer and how many bytes it has consumed; the other
//! never has more than the difference under way. VIRTIO 1.2, "Buffer Space Management".

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;

use super::host::{HostStream, StreamId};
use super::packet::{
    PacketHeader, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM, op,
};

/// Bytes of a connection's receive buffer: data from the guest that the host has not taken.
pub(super) const BUFFER_LEN: u32 = 256 << 10;
/// Bytes that are read from a stream at once.
const READ_LEN: usize = 64 << 10;

/// The connection cannot continue: the guest gets RST.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionPhase {
    /// The guest has requested it, and the host has not answered.
    Opening,
    /// The host has requested it, and the guest has not answered.
    Requested,
    /// Both have accepted it.
    Established,
}

/// A packet that a connection has for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextPacket {
    pub op: u16,
    pub flags: u32,
}

/// A number of bytes in a buffer, whose length is at most [`BUFFER_LEN`].
fn count_of(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(BUFFER_LEN)
}

/// One connection.
pub(super) struct Connection {
    pub id: StreamId,
    pub phase: ConnectionPhase,
    /// None until the host answers.
    stream: Option<Box<dyn HostStream>>,
    /// REQUEST or RESPONSE must be sent.
    handshake: bool,

    /// Data for the guest, of which `sent` bytes were sent.
    incoming: Vec<u8>,
    sent: usize,
    /// A read may succeed.
    readable: bool,
    /// The host sends no more.
    end_of_input: bool,
    /// Bytes sent to the guest, modulo 2^32.
    tx_cnt: u32,
    peer_buf_alloc: u32,
    peer_fwd_cnt: u32,
    /// Credit was requested since there was some.
    credit_requested: bool,

    /// Data for the host that the stream has not taken.
    outgoing: VecDeque<u8>,
    /// A write may succeed.
    writable: bool,
    /// The host receives no more: data of the guest is dropped.
    host_receives_no_more: bool,
    /// Bytes passed to the host or dropped, modulo 2^32.
    fwd_cnt: u32,
    /// `fwd_cnt` as the guest knows it.
    announced: u32,
    /// The guest asked for the credit.
    update_requested: bool,

    /// What the guest closed, as flags of SHUTDOWN.
    guest_closed: u32,
    /// What was reported to the guest as closed.
    reported_closed: u32,
}

impl Connection {
    /// A connection that the guest requests with `header`.
    pub fn opening(id: StreamId, header: &PacketHeader) -> Self {
        let mut this = Self::new(id, ConnectionPhase::Opening, None);
        this.take_credit(header);
        this
    }

    /// A connection of a host's client, of which the guest does not know yet.
    pub fn requested(id: StreamId, stream: Box<dyn HostStream>) -> Self {
        let mut this = Self::new(id, ConnectionPhase::Requested, Some(stream));
        this.handshake = true;
        this
    }

    fn new(id: StreamId, phase: ConnectionPhase, stream: Option<Box<dyn HostStream>>) -> Self {
        Self {
            id,
            phase,
            stream,
            handshake: false,
            incoming: Vec::new(),
            sent: 0,
            readable: true,
            end_of_input: false,
            tx_cnt: 0,
            peer_buf_alloc: 0,
            peer_fwd_cnt: 0,
            credit_requested: false,
            outgoing: VecDeque::new(),
            writable: true,
            host_receives_no_more: false,
            fwd_cnt: 0,
            announced: 0,
            update_requested: false,
            guest_closed: 0,
            reported_closed: 0,
        }
    }

    /// The host accepts the connection that the guest requested.
    pub fn accept(&mut self, stream: Box<dyn HostStream>) {
        self.stream = Some(stream);
        self.phase = ConnectionPhase::Established;
        self.handshake = true;
    }

    /// The guest accepts the connection of a host's client, who reads `line`.
    pub fn accepted_by_guest(&mut self, line: &str) -> Result<(), Broken> {
        self.phase = ConnectionPhase::Established;
        let stream = self.stream.as_mut().ok_or(Broken)?;
        // Nothing was written before, so the socket has room for the line.
        match stream.write(line.as_bytes()) {
            Ok(count) if count == line.len() => Ok(()),
            _ => Err(Broken),
        }
    }

    /// Takes over the credit in a packet of the guest.
    pub fn take_credit(&mut self, header: &PacketHeader) {
        self.peer_buf_alloc = header.buf_alloc;
        self.peer_fwd_cnt = header.fwd_cnt;
        if self.credit() != 0 {
            self.credit_requested = false;
        }
    }

    /// The guest asks how much it may send.
    pub fn request_update(&mut self) {
        self.update_requested = true;
    }

    /// Bytes that the guest accepts.
    fn credit(&self) -> usize {
        let under_way = self.tx_cnt.wrapping_sub(self.peer_fwd_cnt);
        self.peer_buf_alloc.saturating_sub(under_way) as usize
    }

    /// Bytes that the guest may send.
    pub fn space(&self) -> usize {
        (BUFFER_LEN as usize).saturating_sub(self.outgoing.len())
    }

    /// Whether data of the guest has not reached the host.
    pub fn has_outgoing(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Whether the guest knows the connection.
    pub fn is_known_to_guest(&self) -> bool {
        self.phase != ConnectionPhase::Requested || !self.handshake
    }

    /// Takes data of the guest.
    pub fn receive(&mut self, data: &[u8]) -> Result<(), Broken> {
        let closed = self.guest_closed & SHUTDOWN_SEND != 0;
        if self.phase != ConnectionPhase::Established || closed || data.len() > self.space() {
            return Err(Broken);
        }
        self.outgoing.extend(data);
        self.flush();
        Ok(())
    }

    /// The guest closes the directions of `flags`.
    pub fn close(&mut self, flags: u32) {
        self.guest_closed |= flags & SHUTDOWN_BOTH;
        if self.guest_closed & SHUTDOWN_RECEIVE != 0 {
            self.incoming = Vec::new();
            self.sent = 0;
            self.end_of_input = true;
            // The guest needs no report that it gets no more data.
            self.reported_closed |= SHUTDOWN_SEND;
            if let Some(stream) = &mut self.stream {
                stream.shutdown(Shutdown::Read);
            }
        }
        self.flush();
    }

    /// Whether the guest has closed both directions.
    pub fn is_closed(&self) -> bool {
        self.guest_closed == SHUTDOWN_BOTH
    }

    /// The stream may have data or room again; with `hangup` its other end is closed.
    pub fn wake(&mut self, hangup: bool) -> Result<(), Broken> {
        self.readable = true;
        self.writable = true;
        if hangup {
            self.drop_outgoing();
        }
        if hangup && self.phase == ConnectionPhase::Requested {
            return Err(Broken);
        }
        self.flush();
        Ok(())
    }

    fn drop_outgoing(&mut self) {
        self.host_receives_no_more = true;
        self.fwd_cnt = self.fwd_cnt.wrapping_add(count_of(self.outgoing.len()));
        self.outgoing = VecDeque::new();
    }

    /// Passes data to the host as far as it takes it.
    fn flush(&mut self) {
        if self.host_receives_no_more {
            return self.drop_outgoing();
        }
        let Some(stream) = &mut self.stream else {
            return;
        };
        while self.writable && !self.outgoing.is_empty() {
            match stream.write(self.outgoing.as_slices().0) {
                Ok(count) => {
                    let count = count.min(self.outgoing.len());
                    self.outgoing.drain(..count);
                    self.fwd_cnt = self.fwd_cnt.wrapping_add(count_of(count));
                    self.writable = count != 0;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                // Data of the host may still be on its way to the guest.
                Err(_) => return self.drop_outgoing(),
            }
        }
        if self.outgoing.is_empty() && self.guest_closed & SHUTDOWN_SEND != 0 {
            stream.shutdown(Shutdown::Write);
        }
    }

    /// Reads from the stream if there is nothing to send and the guest accepts data.
    fn fill(&mut self) -> Result<(), Broken> {
        if self.sent < self.incoming.len() || !self.readable || self.end_of_input {
            return Ok(());
        }
        let len = self.credit().min(READ_LEN);
        let Some(stream) = self.stream.as_mut().filter(|_| len != 0) else {
            return Ok(());
        };
        self.sent = 0;
        self.incoming.resize(len, 0);
        let read = loop {
            match stream.read(&mut self.incoming) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        self.incoming
            .truncate(read.as_ref().map_or(0, |count| *count));
        match read {
            Ok(0) => self.end_of_input = true,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Err(_) => return Err(Broken),
        }
        if self.incoming.is_empty() {
            self.incoming = Vec::new();
        }
        Ok(())
    }

    /// What must be reported to the guest as closed, as flags of SHUTDOWN.
    fn closed(&self) -> u32 {
        let mut flags = 0;
        if self.end_of_input && self.sent >= self.incoming.len() {
            flags |= SHUTDOWN_SEND;
        }
        if self.host_receives_no_more {
            flags |= SHUTDOWN_RECEIVE;
        }
        flags
    }

    /// Whether the guest knows of less than half of its credit.
    fn owes_credit(&self) -> bool {
        let freed = self.fwd_cnt.wrapping_sub(self.announced);
        freed >= BUFFER_LEN / 2
    }

    /// The next packet for the guest.
    pub fn next_packet(&mut self) -> Result<Option<NextPacket>, Broken> {
        let packet = |op, flags| Ok(Some(NextPacket { op, flags }));
        match self.phase {
            ConnectionPhase::Opening => return Ok(None),
            ConnectionPhase::Requested if self.handshake => return packet(op::REQUEST, 0),
            ConnectionPhase::Requested => return Ok(None),
            ConnectionPhase::Established if self.handshake => return packet(op::RESPONSE, 0),
            ConnectionPhase::Established => {}
        }
        self.fill()?;
        let waiting = self.sent < self.incoming.len();
        if waiting && self.credit() != 0 {
            return packet(op::RW, 0);
        }
        let closed = self.closed();
        if closed & !self.reported_closed != 0 {
            return packet(op::SHUTDOWN, closed);
        }
        if self.update_requested || self.owes_credit() {
            return packet(op::CREDIT_UPDATE, 0);
        }
        let may_send = waiting || self.readable && !self.end_of_input;
        if may_send && self.credit() == 0 && !self.credit_requested {
            return packet(op::CREDIT_REQUEST, 0);
        }
        Ok(None)
    }

    /// The data of an RW packet in a buffer with `space` bytes for it.
    pub fn data(&self, space: usize) -> &[u8] {
        let data = &self.incoming[self.sent..];
        &data[..data.len().min(space).min(self.credit())]
    }

    /// Completes a header, and records that the packet with `len` bytes of data was sent.
    pub fn send(&mut self, packet: NextPacket, header: &mut PacketHeader, len: usize) {
        match packet.op {
            op::REQUEST | op::RESPONSE => self.handshake = false,
            op::SHUTDOWN => self.reported_closed = packet.flags,
            op::CREDIT_REQUEST => self.credit_requested = true,
            _ => {}
        }
        self.sent += len;
        let len = count_of(len);
        self.tx_cnt = self.tx_cnt.wrapping_add(len);
        self.announced = self.fwd_cnt;
        self.update_requested = false;
        *header = PacketHeader {
            len,
            socket_type: TYPE_STREAM,
            op: packet.op,
            flags: packet.flags,
            buf_alloc: BUFFER_LEN,
            fwd_cnt: self.fwd_cnt,
            ..*header
        };
    }
}
