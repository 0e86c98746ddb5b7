//! A driver without a guest, and streams in memory.

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use proptest::prelude::*;

use super::connection::BUFFER_LEN;
use super::packet::{HEADER_LEN, PacketHeader, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM, op};
use super::{CONNECTIONS_MAX, HostStream, RESETS_MAX, Vsock, VsockHost};
use crate::virtio::VirtioDeviceState;
use crate::virtio::test_driver::Driver;

const CID: u64 = 3;
const TRANSMIT_BUFFER: u64 = 0x8_0000;
const RECEIVE_BUFFER: u64 = 0xc_0000;
const RECEIVE_LEN: usize = 0x1000;

#[derive(Default)]
struct Pipe {
    input: VecDeque<u8>,
    input_ends: bool,
    output: Vec<u8>,
    /// Bytes that may still be written.
    space: usize,
    broken: bool,
    shut: Vec<Shutdown>,
    dropped: bool,
}

/// The host's view of a stream.
#[derive(Clone, Default)]
struct Peer(Arc<Mutex<Pipe>>);

impl Peer {
    fn new() -> Self {
        let peer = Self::default();
        peer.pipe().space = usize::MAX;
        peer
    }

    fn pipe(&self) -> MutexGuard<'_, Pipe> {
        self.0.lock().unwrap()
    }

    fn stream(&self) -> Box<dyn HostStream> {
        Box::new(PeerStream(self.clone()))
    }
}

struct PeerStream(Peer);

impl HostStream for PeerStream {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        let mut pipe = self.0.pipe();
        let count = data.len().min(pipe.input.len());
        for (to, from) in data.iter_mut().zip(pipe.input.drain(..count)) {
            *to = from;
        }
        match count {
            0 if pipe.broken => Err(io::ErrorKind::ConnectionReset.into()),
            0 if !pipe.input_ends => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(count),
        }
    }

    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let mut pipe = self.0.pipe();
        if pipe.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let count = data.len().min(pipe.space);
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        pipe.space -= count;
        pipe.output.extend(&data[..count]);
        Ok(count)
    }

    fn shutdown(&mut self, how: Shutdown) {
        self.0.pipe().shut.push(how);
    }
}

impl Drop for PeerStream {
    fn drop(&mut self) {
        self.0.pipe().dropped = true;
    }
}

/// A guest with one receive buffer, and the host's end of its device.
struct Guest {
    driver: Driver,
    host: VsockHost,
    wakes: Arc<AtomicU32>,
    received: u16,
    posted: bool,
    buf_alloc: u32,
    fwd_cnt: u32,
}

impl Guest {
    fn new() -> Self {
        let wakes = Arc::new(AtomicU32::new(0));
        let count = wakes.clone();
        let host = VsockHost::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let mut driver = Driver::new(Box::new(Vsock::new(3, host.clone())));
        driver.start(0);
        Self {
            driver,
            host,
            wakes,
            received: 0,
            posted: false,
            buf_alloc: 1 << 16,
            fwd_cnt: 0,
        }
    }

    fn header(&self, op: u16, host: u32, guest: u32) -> PacketHeader {
        PacketHeader {
            src_cid: CID,
            dst_cid: 2,
            src_port: guest,
            dst_port: host,
            socket_type: TYPE_STREAM,
            op,
            buf_alloc: self.buf_alloc,
            fwd_cnt: self.fwd_cnt,
            ..PacketHeader::default()
        }
    }

    fn send(&mut self, header: PacketHeader, data: &[u8]) {
        let bytes = [&header.to_bytes()[..], data].concat();
        self.driver.memory_write(TRANSMIT_BUFFER, &bytes);
        let len = u32::try_from(bytes.len()).unwrap();
        self.driver.descriptor(1, 0, TRANSMIT_BUFFER, len, 0, 0);
        self.driver.offer(1, 0);
    }

    fn send_op(&mut self, op: u16, host: u32, guest: u32) {
        self.send(self.header(op, host, guest), &[]);
    }

    fn send_data(&mut self, host: u32, guest: u32, data: &[u8]) {
        let len = u32::try_from(data.len()).unwrap();
        let header = self.header(op::RW, host, guest);
        self.send(PacketHeader { len, ..header }, data);
    }

    fn shut(&mut self, host: u32, guest: u32, flags: u32) {
        let header = self.header(op::SHUTDOWN, host, guest);
        self.send(PacketHeader { flags, ..header }, &[]);
    }

    /// Offers a buffer, and returns the packet that the device puts into it.
    fn receive(&mut self) -> Option<(PacketHeader, Vec<u8>)> {
        if !self.posted {
            let len = u32::try_from(RECEIVE_LEN).unwrap();
            self.driver.descriptor(0, 0, RECEIVE_BUFFER, len, 2, 0);
            self.driver.offer(0, 0);
            self.posted = true;
        }
        if self.driver.used(0) == self.received {
            return None;
        }
        self.received = self.driver.used(0);
        self.posted = false;
        let bytes = self.driver.memory_read(RECEIVE_BUFFER, RECEIVE_LEN);
        let header = PacketHeader::from_bytes(bytes.first_chunk().unwrap());
        let data = bytes[HEADER_LEN..][..header.len as usize].to_vec();
        Some((header, data))
    }

    fn receive_op(&mut self) -> Option<u16> {
        self.receive().map(|(header, _)| header.op)
    }

    fn serve(&mut self) {
        self.driver.function().serve_all();
    }

    /// Opens a connection of the guest from port 1000 to port 80.
    fn connect(&mut self) -> Peer {
        self.send_op(op::REQUEST, 80, 1000);
        let requests = self.host.take_requests();
        assert_eq!((requests.len(), requests[0].port), (1, 80));
        let peer = Peer::new();
        self.host.answer(requests[0].id, Some(peer.stream()));
        self.serve();
        assert_eq!(self.receive_op(), Some(op::RESPONSE));
        peer
    }

    /// Reports that the only stream of a guest is ready.
    fn ready(&mut self, hangup: bool) {
        self.host.ready(super::StreamId(1), hangup);
        self.serve();
    }
}

#[test]
fn configuration_has_the_cid() {
    assert_eq!(Guest::new().driver.read(0x2000, 4), 3);
}

#[test]
fn guest_connects_and_both_sides_send() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    guest.send_data(80, 1000, b"question");
    assert_eq!(peer.pipe().output, b"question");
    peer.pipe().input.extend(b"answer");
    guest.ready(false);
    let (header, data) = guest.receive().unwrap();
    assert_eq!((header.op, &data[..]), (op::RW, &b"answer"[..]));
    assert_eq!((header.src_cid, header.dst_cid), (2, CID));
    assert_eq!((header.src_port, header.dst_port), (80, 1000));
    assert_eq!((header.buf_alloc, header.fwd_cnt), (BUFFER_LEN, 8));
}

#[test]
fn packet_may_be_divided_among_descriptors() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    let header = PacketHeader {
        len: 4,
        ..guest.header(op::RW, 80, 1000)
    };
    let bytes = [&header.to_bytes()[..], b"data"].concat();
    guest.driver.memory_write(TRANSMIT_BUFFER, &bytes);
    for (index, (at, len)) in (0_u16..).zip([(0, 20), (20, 25), (45, 3)]) {
        let flags = u16::from(index != 2);
        let address = TRANSMIT_BUFFER + at;
        guest
            .driver
            .descriptor(1, index, address, len, flags, index + 1);
    }
    guest.driver.offer(1, 0);
    assert_eq!(peer.pipe().output, b"data");
}

#[test]
fn port_without_listener_resets_the_connection() {
    let mut guest = Guest::new();
    guest.send_op(op::REQUEST, 81, 1000);
    let request = guest.host.take_requests()[0];
    guest.host.answer(request.id, None);
    guest.serve();
    assert_eq!(guest.receive_op(), Some(op::RST));
}

#[test]
fn packets_of_unknown_connections_are_reset() {
    let mut guest = Guest::new();
    guest.send_data(80, 1000, b"x");
    let (header, _) = guest.receive().unwrap();
    assert_eq!(
        (header.op, header.src_port, header.dst_port),
        (op::RST, 80, 1000)
    );
    let datagram = guest.header(op::REQUEST, 80, 1000);
    guest.send(
        PacketHeader {
            socket_type: 9,
            ..datagram
        },
        &[],
    );
    let (header, _) = guest.receive().unwrap();
    assert_eq!((header.op, header.socket_type), (op::RST, 9));
    guest.send_op(op::RST, 80, 1000);
    assert_eq!(guest.receive(), None, "no RST answers an RST");
}

#[test]
fn packets_of_other_cids_are_dropped() {
    let mut guest = Guest::new();
    let header = guest.header(op::REQUEST, 80, 1000);
    guest.send(
        PacketHeader {
            dst_cid: 7,
            ..header
        },
        &[],
    );
    guest.send(
        PacketHeader {
            src_cid: 7,
            ..header
        },
        &[],
    );
    assert_eq!(guest.host.take_requests(), []);
    assert_eq!(guest.receive(), None);
}

#[test]
fn client_connects_to_a_port_of_the_guest() {
    let mut guest = Guest::new();
    let (peer, id) = (Peer::new(), guest.host.new_id());
    peer.pipe().input.extend(b"early");
    guest.host.connect(id, peer.stream(), 52);
    guest.serve();
    let (request, _) = guest.receive().unwrap();
    assert_eq!((request.op, request.dst_port), (op::REQUEST, 52));
    assert_eq!(guest.receive(), None, "data waits for the guest's answer");
    guest.send_op(op::RESPONSE, request.src_port, 52);
    let line = format!("OK {}\n", request.src_port);
    assert_eq!(peer.pipe().output, line.as_bytes());
    assert_eq!(guest.receive().unwrap().1, b"early");
    guest.send_data(request.src_port, 52, b"hello");
    assert!(peer.pipe().output.ends_with(b"hello"));
}

#[test]
fn client_of_a_closed_port_is_disconnected() {
    let mut guest = Guest::new();
    let (peer, id) = (Peer::new(), guest.host.new_id());
    guest.host.connect(id, peer.stream(), 52);
    guest.serve();
    let (request, _) = guest.receive().unwrap();
    guest.send_op(op::RST, request.src_port, 52);
    assert!(peer.pipe().dropped);
    assert_eq!(peer.pipe().output, b"");
}

#[test]
fn client_that_leaves_before_the_answer_is_reset() {
    let mut guest = Guest::new();
    let (peer, id) = (Peer::new(), guest.host.new_id());
    guest.host.connect(id, peer.stream(), 52);
    guest.serve();
    assert_eq!(guest.receive_op(), Some(op::REQUEST));
    guest.host.ready(id, true);
    guest.serve();
    assert!(peer.pipe().dropped);
    assert_eq!(guest.receive_op(), Some(op::RST));
}

#[test]
fn clients_before_the_driver_and_beyond_the_limit_are_disconnected() {
    let host = VsockHost::new(|| {});
    let mut driver = Driver::new(Box::new(Vsock::new(3, host.clone())));
    let early = Peer::new();
    host.connect(host.new_id(), early.stream(), 1);
    assert!(early.pipe().dropped);
    driver.start(0);
    for _ in 0..CONNECTIONS_MAX {
        host.connect(host.new_id(), Peer::new().stream(), 1);
        driver.function().serve_all();
    }
    let late = Peer::new();
    host.connect(host.new_id(), late.stream(), 1);
    driver.function().serve_all();
    assert!(late.pipe().dropped);
}

#[test]
fn guest_connections_beyond_the_limit_are_reset() {
    let mut guest = Guest::new();
    for port in 0..300 {
        guest.send_op(op::REQUEST, 80, port);
    }
    assert_eq!(guest.host.take_requests().len(), CONNECTIONS_MAX);
    assert_eq!(guest.receive_op(), Some(op::RST));
}

#[test]
fn withdrawn_requests_do_not_accumulate() {
    let mut guest = Guest::new();
    for _ in 0..1000 {
        guest.send_op(op::REQUEST, 80, 1000);
        guest.send_op(op::RST, 80, 1000);
    }
    assert_eq!(guest.host.take_requests(), []);
}

#[test]
fn device_never_sends_more_than_the_guests_credit() {
    let mut guest = Guest::new();
    guest.buf_alloc = 100;
    let peer = guest.connect();
    peer.pipe().input.extend([7; 250]);
    guest.ready(false);
    assert_eq!(guest.receive().unwrap().1.len(), 100);
    assert_eq!(guest.receive_op(), Some(op::CREDIT_REQUEST));
    assert_eq!(guest.receive(), None, "a second request without an answer");
    guest.fwd_cnt = 60;
    guest.send_op(op::CREDIT_UPDATE, 80, 1000);
    assert_eq!(guest.receive().unwrap().1.len(), 60);
    assert_eq!(guest.receive_op(), Some(op::CREDIT_REQUEST));
    guest.fwd_cnt = 160;
    guest.send_op(op::CREDIT_UPDATE, 80, 1000);
    assert_eq!(guest.receive().unwrap().1.len(), 90);
}

#[test]
fn guest_that_never_gives_credit_gets_nothing_and_costs_nothing() {
    let mut guest = Guest::new();
    guest.buf_alloc = 0;
    let peer = guest.connect();
    peer.pipe().input.extend([7; 1000]);
    assert_eq!(guest.receive_op(), Some(op::CREDIT_REQUEST));
    for _ in 0..100 {
        guest.ready(false);
        assert_eq!(guest.receive(), None);
    }
    assert_eq!(peer.pipe().input.len(), 1000, "data stays in the socket");
    // A guest that claims to have consumed more than it got has no credit either.
    (guest.buf_alloc, guest.fwd_cnt) = (50, 1);
    guest.send_op(op::CREDIT_UPDATE, 80, 1000);
    assert_eq!(guest.receive(), None);
}

#[test]
fn guest_beyond_its_credit_is_reset() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    peer.pipe().space = 0;
    let quarter = vec![1; BUFFER_LEN as usize / 4];
    for _ in 0..4 {
        guest.send_data(80, 1000, &quarter);
    }
    assert_eq!(guest.receive(), None);
    guest.send_data(80, 1000, b"x");
    assert_eq!(guest.receive_op(), Some(op::RST));
    assert!(peer.pipe().dropped);
}

#[test]
fn credit_returns_as_the_host_reads() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    peer.pipe().space = 10;
    let half = vec![1; BUFFER_LEN as usize / 2];
    guest.send_data(80, 1000, &half);
    guest.send_data(80, 1000, &half);
    assert_eq!(guest.receive(), None);
    peer.pipe().space = half.len();
    guest.ready(false);
    let (header, _) = guest.receive().unwrap();
    assert_eq!(header.op, op::CREDIT_UPDATE);
    assert_eq!(header.fwd_cnt as usize, half.len() + 10);
    guest.send_op(op::CREDIT_REQUEST, 80, 1000);
    assert_eq!(guest.receive_op(), Some(op::CREDIT_UPDATE));
}

#[test]
fn guest_half_closes_and_still_receives() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    peer.pipe().space = 1;
    guest.send_data(80, 1000, b"ab");
    guest.shut(80, 1000, SHUTDOWN_SEND);
    assert_eq!(peer.pipe().shut, [], "data comes before the end");
    peer.pipe().space = 10;
    guest.ready(false);
    assert_eq!(peer.pipe().output, b"ab");
    assert_eq!(peer.pipe().shut[0], Shutdown::Write);
    peer.pipe().input.extend(b"still");
    guest.ready(false);
    assert_eq!(guest.receive().unwrap().1, b"still");
    guest.send_data(80, 1000, b"x");
    assert_eq!(guest.receive_op(), Some(op::RST), "data after its end");
}

#[test]
fn host_half_closes_and_still_receives() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    peer.pipe().input.extend(b"last");
    peer.pipe().input_ends = true;
    guest.ready(false);
    assert_eq!(guest.receive().unwrap().1, b"last");
    let (header, _) = guest.receive().unwrap();
    assert_eq!((header.op, header.flags), (op::SHUTDOWN, SHUTDOWN_SEND));
    guest.send_data(80, 1000, b"reply");
    assert_eq!(peer.pipe().output, b"reply");
    guest.shut(80, 1000, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    assert_eq!(guest.receive_op(), Some(op::RST));
    assert!(peer.pipe().dropped);
}

#[test]
fn hangup_closes_both_directions_after_the_data() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    peer.pipe().input.extend(b"last");
    peer.pipe().input_ends = true;
    guest.ready(true);
    assert_eq!(guest.receive().unwrap().1, b"last");
    let (header, _) = guest.receive().unwrap();
    let both = SHUTDOWN_SEND | SHUTDOWN_RECEIVE;
    assert_eq!((header.op, header.flags), (op::SHUTDOWN, both));
    guest.send_data(80, 1000, b"late");
    assert_eq!(
        peer.pipe().output,
        b"",
        "data for a closed socket is dropped"
    );
}

#[test]
fn socket_that_fails_resets_the_connection() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    peer.pipe().broken = true;
    guest.ready(false);
    assert_eq!(guest.receive_op(), Some(op::RST));
    assert!(peer.pipe().dropped);
}

#[test]
fn data_of_a_closed_connection_still_reaches_the_host() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    peer.pipe().space = 0;
    guest.send_data(80, 1000, b"data");
    guest.shut(80, 1000, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    assert_eq!(guest.receive_op(), Some(op::RST));
    assert!(!peer.pipe().dropped);
    peer.pipe().space = 4;
    guest.ready(false);
    assert_eq!(peer.pipe().output, b"data");
    assert!(peer.pipe().dropped);
}

#[test]
fn guest_without_receive_buffers_is_not_served_without_bound() {
    let mut guest = Guest::new();
    // The queue has 8 entries, so offer the same buffer again and again.
    for _ in 0..2 * RESETS_MAX {
        guest.send_op(op::SHUTDOWN, 80, 1000);
    }
    let limit = u16::try_from(RESETS_MAX).unwrap();
    assert_eq!(guest.driver.used(1), limit, "packets that were taken");
}

/// What makes the device stop: a descriptor of queue 1 or 0.
fn stops(queue: u64, len: u32, flags: u16, contents: &[u8]) -> bool {
    let mut guest = Guest::new();
    if queue == 0 {
        guest.send_op(op::RW, 80, 1000);
    }
    guest.driver.memory_write(TRANSMIT_BUFFER, contents);
    guest
        .driver
        .descriptor(queue, 0, TRANSMIT_BUFFER, len, flags, 0);
    guest.driver.offer(queue, 0);
    guest.driver.status() == 0x4f
}

#[test]
fn malformed_packets_stop_the_device() {
    let header = |len| {
        PacketHeader {
            len,
            ..Guest::new().header(op::RW, 80, 1000)
        }
        .to_bytes()
    };
    assert!(stops(1, 43, 0, &header(0)), "no header");
    assert!(stops(1, 48, 0, &header(5)), "shorter than its length");
    assert!(stops(1, 48, 0, &header(u32::MAX)), "a length beyond memory");
    assert!(stops(1, 48, 2, &header(0)), "a device-writable packet");
    assert!(stops(0, 43, 2, &[]), "no room for a header");
    assert!(stops(0, 44, 0, &[]), "a device-readable receive buffer");
    assert!(!stops(1, 48, 0, &header(4)));
    assert!(!stops(0, 44, 2, &[]));
}

#[test]
fn receive_buffer_too_short_for_data_stops_the_device() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    peer.pipe().input.extend(b"data");
    guest.driver.descriptor(0, 0, RECEIVE_BUFFER, 44, 2, 0);
    guest.driver.offer(0, 0);
    guest.ready(false);
    assert_eq!(guest.driver.status(), 0x4f);
    assert!(peer.pipe().dropped, "the host's program is told");
}

#[test]
fn restored_device_has_no_connections_and_reports_it() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    let saved = guest.driver.function().save();
    assert_eq!(saved.device, VirtioDeviceState::Socket { running: true });
    let wakes = guest.wakes.load(Ordering::Relaxed);
    guest.driver.function().restore(&saved).unwrap();
    assert!(peer.pipe().dropped);
    assert!(
        guest.wakes.load(Ordering::Relaxed) > wakes,
        "the host serves the device"
    );
    guest.driver.memory_write(RECEIVE_BUFFER, &[0xff; 4]);
    guest.driver.descriptor(2, 0, RECEIVE_BUFFER, 4, 2, 0);
    guest.driver.offer(2, 0);
    assert_eq!(guest.driver.used(2), 1);
    assert_eq!(guest.driver.memory_read(RECEIVE_BUFFER, 4), [0; 4]);
    guest.send_data(80, 1000, b"x");
    assert_eq!(guest.receive_op(), Some(op::RST));
    assert_eq!(guest.driver.function().save().device, saved.device);
}

#[test]
fn reset_closes_all_connections() {
    let mut guest = Guest::new();
    let peer = guest.connect();
    guest.driver.write(0x14, 0, 1);
    assert!(peer.pipe().dropped);
}

#[derive(Clone, Debug)]
enum Step {
    Send(u16, u32, u32, u32, u32, Vec<u8>),
    Receive,
    Answer(bool),
    Client(u32),
    Input(Vec<u8>),
    Space(usize),
    Ready(u64, bool),
    Restore,
}

fn step() -> impl Strategy<Value = Step> {
    let data = || prop::collection::vec(any::<u8>(), 0..40);
    let word = || prop_oneof![0..200_u32, any::<u32>()];
    prop_oneof![
        6 => (0..9_u16, 0..3_u32, 0..3_u32, word(), word(), data())
            .prop_map(|(op, port, flags, alloc, forward, data)| Step::Send(op, port, flags, alloc, forward, data)),
        6 => Just(Step::Receive),
        2 => any::<bool>().prop_map(Step::Answer),
        1 => (0..3_u32).prop_map(Step::Client),
        2 => data().prop_map(Step::Input),
        2 => (0..100_usize).prop_map(Step::Space),
        3 => (0..8_u64, any::<bool>()).prop_map(|(id, hangup)| Step::Ready(id, hangup)),
        1 => Just(Step::Restore),
    ]
}

fn take_step(guest: &mut Guest, peers: &mut Vec<Peer>, step: Step) {
    match step {
        Step::Send(op, port, flags, buf_alloc, fwd_cnt, data) => {
            let header = PacketHeader {
                flags,
                buf_alloc,
                fwd_cnt,
                len: u32::try_from(data.len()).unwrap(),
                ..guest.header(op, 80 + port, 1000)
            };
            guest.send(header, &data);
        }
        Step::Receive => {
            guest.receive();
        }
        Step::Answer(accepts) => {
            for request in guest.host.take_requests() {
                let peer = Peer::default();
                let stream = accepts.then(|| peer.stream());
                peers.push(peer);
                guest.host.answer(request.id, stream);
            }
        }
        Step::Client(port) => {
            let (peer, id) = (Peer::default(), guest.host.new_id());
            guest.host.connect(id, peer.stream(), 80 + port);
            peers.push(peer);
        }
        Step::Input(data) => {
            for peer in peers.iter() {
                peer.pipe().input.extend(&data);
            }
        }
        Step::Space(space) => {
            for peer in peers.iter() {
                peer.pipe().space = space;
            }
        }
        Step::Ready(id, hangup) => {
            guest.host.ready(super::StreamId(id), hangup);
            guest.serve();
        }
        Step::Restore => {
            let saved = guest.driver.function().save();
            guest.driver.function().restore(&saved).unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Well-formed descriptors with any packets never stop the device, and streams never outlive it.
    #[test]
    fn any_packets_leave_a_device_that_works(steps in prop::collection::vec(step(), 1..150)) {
        let (mut guest, mut peers) = (Guest::new(), Vec::new());
        for step in steps {
            take_step(&mut guest, &mut peers, step);
            prop_assert_eq!(guest.driver.status(), 15);
        }
        guest.driver.write(0x14, 0, 1);
        drop(guest);
        for peer in peers {
            prop_assert!(Arc::strong_count(&peer.0) == 1);
        }
    }
}
