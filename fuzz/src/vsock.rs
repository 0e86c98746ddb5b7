//! A socket device between a driver and a host that the fuzzer writes.

use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arbitrary::Arbitrary;
use hindsight_devices::pci::MsiSender;
use hindsight_devices::virtio::vsock::{CONNECTIONS_MAX, HostStream, StreamId, Vsock, VsockHost};
use hindsight_devices::virtio::{DmaMemory, VirtioFunction, WriteReporter};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap};

/// Bytes of guest memory, and thereby of all addresses that matter.
const MEMORY: usize = 0x1_0000;
/// The rings of queue N are at N times this.
const RINGS: u64 = 0x1000;
/// Elements of a queue.
const SIZE: u16 = 8;
/// Where packets of the driver are.
const PACKETS: u64 = 0x8000;
/// Maximum number of steps of a run.
const STEPS_MAX: usize = 256;

/// What driver and host do.
#[derive(Clone, Debug, Arbitrary)]
pub enum Step {
    /// Writes a descriptor: queue, index, address, length, flags, next.
    Descriptor(u8, u8, u16, u32, u8, u8),
    /// Offers a descriptor of a queue.
    Offer(u8, u8),
    /// Writes to memory.
    Memory(u16, u64),
    /// Writes a register of the device: BAR, offset, value.
    Register(bool, u16, u32),
    /// Sends a well-formed packet: operation, ports, flags, credit, bytes of data.
    Packet(u8, u8, u8, u32, u32, u8),
    /// Offers a receive buffer of some bytes.
    Receive(u16),
    /// Answers the requests of the guest.
    Answer(bool),
    /// A client connects to a port.
    Client(u8),
    /// A stream is ready, or its other end is closed.
    Ready(u8, bool),
    /// Saves and restores the device.
    Restore,
    /// Sets the device up again.
    Start,
}

/// A stream whose results follow from a counter. It counts how many streams exist.
struct Stream {
    alive: Arc<AtomicUsize>,
    calls: u64,
}

impl Stream {
    fn new(alive: &Arc<AtomicUsize>) -> Box<Self> {
        alive.fetch_add(1, Ordering::Relaxed);
        Box::new(Self {
            alive: alive.clone(),
            calls: 0,
        })
    }

    fn next(&mut self, len: usize) -> io::Result<usize> {
        self.calls += 1;
        match self.calls % 7 {
            3 => Err(io::ErrorKind::WouldBlock.into()),
            5 => Err(io::ErrorKind::Interrupted.into()),
            _ if self.calls > 40 => Err(io::ErrorKind::BrokenPipe.into()),
            part => Ok(len.min(100 * part as usize)),
        }
    }
}

impl HostStream for Stream {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        self.next(data.len())
    }

    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.next(data.len())
    }

    fn shutdown(&mut self, _: Shutdown) {}
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Machine {
    memory: DmaMemory,
    function: VirtioFunction,
    host: VsockHost,
    alive: Arc<AtomicUsize>,
    /// Requests made, by queue.
    next: [u16; 3],
}

fn memory() -> DmaMemory {
    let reporter = WriteReporter::new(0, Arc::new(|_, _| {}));
    let mapping = MmapRegionBuilder::new_with_bitmap(MEMORY, reporter)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .build()
        .expect("memory can be mapped");
    let region = GuestRegionMmap::new(mapping, GuestAddress(0)).expect("the region is valid");
    DmaMemory::from_regions(vec![region]).expect("one region is valid")
}

impl Machine {
    fn new() -> Self {
        let memory = memory();
        let host = VsockHost::new(|| {});
        let device = Box::new(Vsock::new(3, host.clone()));
        let sender = MsiSender::new(|_, _| {});
        let mut this = Self {
            function: VirtioFunction::new(1, 0xc000_0000, device, memory.clone(), sender),
            memory,
            host,
            alive: Arc::default(),
            next: [0; 3],
        };
        this.start();
        this
    }

    fn register(&mut self, offset: u64, value: u32, len: usize) {
        let bytes = value.to_le_bytes();
        self.function.bar_write(0, offset, &bytes[..len]);
    }

    fn start(&mut self) {
        self.function.config_write(4, &[6, 0]);
        for status in [0, 3] {
            self.register(0x14, status, 1);
        }
        for (select, half) in [(0, 0), (1, 1)] {
            self.register(0x08, select, 4);
            self.register(0x0c, half, 4);
        }
        self.register(0x14, 11, 1);
        for queue in 0..3_u16 {
            let rings = u64::from(queue) * RINGS;
            self.register(0x16, queue.into(), 2);
            self.register(0x18, SIZE.into(), 2);
            for (field, offset) in [(0x20, 0), (0x28, 0x400), (0x30, 0x800)] {
                let address = u32::try_from(rings + offset).expect("memory is small");
                self.register(field, address, 4);
                self.register(field + 4, 0, 4);
            }
            let _ = self.memory.write_obj(0_u16, GuestAddress(rings + 0x402));
            self.register(0x1c, 1, 2);
        }
        self.next = [0; 3];
        self.register(0x14, 15, 1);
    }

    fn descriptor(&mut self, queue: u8, index: u8, address: u64, len: u32, flags: u8, next: u8) {
        let queue = u64::from(queue % 3);
        let at = queue * RINGS + 16 * u64::from(u16::from(index) % SIZE);
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(u16::from(flags).to_le_bytes());
        bytes.extend(u16::from(next).to_le_bytes());
        let _ = self.memory.write_slice(&bytes, GuestAddress(at));
    }

    fn offer(&mut self, queue: u8, head: u8) {
        let queue = queue % 3;
        let rings = u64::from(queue) * RINGS;
        let next = &mut self.next[usize::from(queue)];
        let entry = rings + 0x404 + 2 * u64::from(*next % SIZE);
        *next = next.wrapping_add(1);
        let next = *next;
        let head = u16::from(head);
        let _ = self.memory.write_obj(head, GuestAddress(entry));
        let _ = self.memory.write_obj(next, GuestAddress(rings + 0x402));
        self.register(0x3000 + 4 * u64::from(queue), 0, 2);
    }

    fn packet(&mut self, op: u8, ports: u8, flags: u8, buf_alloc: u32, fwd_cnt: u32, len: u8) {
        let mut bytes = Vec::new();
        bytes.extend(3_u64.to_le_bytes());
        bytes.extend(2_u64.to_le_bytes());
        // Clients connect from these ports on.
        let host = if ports & 0x80 == 0 { 80 } else { 1 << 30 };
        bytes.extend(u32::from(ports & 7).to_le_bytes());
        bytes.extend((host + u32::from(ports >> 3 & 7)).to_le_bytes());
        bytes.extend(u32::from(len).to_le_bytes());
        bytes.extend(1_u16.to_le_bytes());
        bytes.extend(u16::from(op % 9).to_le_bytes());
        bytes.extend(u32::from(flags).to_le_bytes());
        bytes.extend(buf_alloc.to_le_bytes());
        bytes.extend(fwd_cnt.to_le_bytes());
        bytes.resize(44 + usize::from(len), 7);
        let _ = self.memory.write_slice(&bytes, GuestAddress(PACKETS));
        self.descriptor(1, 0, PACKETS, 44 + u32::from(len), 0, 0);
        self.offer(1, 0);
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Descriptor(queue, index, address, len, flags, next) => {
                self.descriptor(queue, index, address.into(), len, flags, next);
            }
            Step::Offer(queue, head) => self.offer(queue, head),
            Step::Memory(at, value) => {
                let _ = self.memory.write_obj(value, GuestAddress(at.into()));
            }
            Step::Register(msix, offset, value) => {
                let offset = u64::from(offset) & 0x3ffc;
                let bytes = value.to_le_bytes();
                self.function.bar_write(msix.into(), offset, &bytes);
            }
            Step::Packet(op, ports, flags, buf_alloc, fwd_cnt, len) => {
                self.packet(op, ports, flags, buf_alloc, fwd_cnt, len);
            }
            Step::Receive(len) => {
                self.descriptor(0, 0, PACKETS, len.into(), 2, 0);
                self.offer(0, 0);
            }
            Step::Answer(accepts) => {
                for request in self.host.take_requests() {
                    let stream =
                        accepts.then(|| -> Box<dyn HostStream> { Stream::new(&self.alive) });
                    self.host.answer(request.id, stream);
                }
                self.function.serve_all();
            }
            Step::Client(port) => {
                let (id, stream) = (self.host.new_id(), Stream::new(&self.alive));
                self.host.connect(id, stream, port.into());
                self.function.serve_all();
            }
            Step::Ready(id, hangup) => {
                self.host.ready(StreamId(id.into()), hangup);
                self.function.serve_all();
            }
            Step::Restore => {
                let saved = self.function.save();
                if self.function.restore(&saved).is_ok() {
                    assert_eq!(self.function.save(), saved);
                }
            }
            Step::Start => self.start(),
        }
    }
}

/// Takes the steps, and panics if the device keeps more streams than it may have connections, or any
/// after its reset.
pub fn check(steps: &[Step]) {
    let mut machine = Machine::new();
    for step in steps.iter().take(STEPS_MAX) {
        machine.take(step);
        // A device that has stopped leaves as many streams waiting.
        let alive = machine.alive.load(Ordering::Relaxed);
        assert!(alive <= 3 * CONNECTIONS_MAX, "{alive} streams");
    }
    machine.register(0x14, 0, 1);
    assert_eq!(machine.alive.load(Ordering::Relaxed), 0);
}
