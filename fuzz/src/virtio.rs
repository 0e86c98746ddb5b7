//! A virtio device between a driver and a host that the fuzzer writes: each device but the sockets.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use arbitrary::Arbitrary;
use hindsight_devices::pci::MsiSender;
use hindsight_devices::virtio::block::{BlockBackend, VirtioDisk};
use hindsight_devices::virtio::console::{ConsolePort, PortInput, VirtioConsole};
use hindsight_devices::virtio::entropy::{Entropy, SeededEntropy};
use hindsight_devices::virtio::filesystem::{FileSystem, FuseServer, MESSAGE_MAX};
use hindsight_devices::virtio::network::{FRAME_MAX, FrameSink, Network, ReceivedFrames};
use hindsight_devices::virtio::overlay::Overlay;
use hindsight_devices::virtio::queues::CHAINS_MAX;
use hindsight_devices::virtio::scsi::VirtioCdrom;
use hindsight_devices::virtio::{DmaMemory, VirtioDevice, VirtioFunction, WriteReporter};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap};

/// Bytes of guest memory, and thereby of all addresses that matter.
const MEMORY: usize = 0x1_0000;
/// The rings of queue N are at N times this.
const RINGS: u64 = 0x1000;
/// The available and the used ring of a queue.
const AVAILABLE: u64 = 0x400;
const USED: u64 = 0x800;
/// Elements of a queue.
const SIZE: u16 = 8;
/// Where the readable and the writable buffer of a request are, and the bytes of each.
const READABLE: u64 = 0x8000;
const WRITABLE: u64 = 0xc000;
const BUFFER_LEN: u16 = 0x4000;
/// Queues that a step can name: those of a console with two ports.
const QUEUES: u8 = 6;
/// Bytes of the disks.
const DISK_LEN: usize = 0x1_0000;
/// Maximum number of steps of a run, and of requests that another processor adds in it.
const STEPS_MAX: usize = 256;
const ADDED_MAX: u32 = 8192;
/// DEVICE_NEEDS_RESET.
const NEEDS_RESET: u8 = 0x40;

/// What driver and host do.
#[derive(Clone, Debug, Arbitrary)]
pub enum Step {
    /// Writes a descriptor: queue, index, address, length, flags, next.
    Descriptor(u8, u8, u16, u32, u8, u8),
    /// Offers a descriptor of a queue.
    Offer(u8, u8),
    /// Writes to memory.
    Memory(u16, u64),
    /// Writes a register: BAR, offset, value, and 1, 2, 4 or 8 bytes.
    Register(bool, u16, u64, u8),
    /// Writes one of the common registers: index of 4 bytes, value, size.
    Common(u8, u32, u8),
    /// Reads registers of a BAR.
    Read(bool, u16, u8),
    /// Writes to the configuration space: offset, value, size.
    Config(u8, u32, u8),
    /// Reads the configuration space.
    ConfigRead(u8, u8),
    /// Makes a request of a readable and a writable buffer.
    Request(u8, Vec<u8>, u16),
    /// Makes a request of the disk: queue, kind, sector, bytes.
    Disk(u8, u8, u8, u16),
    /// Makes a request of the CD-ROM drive: command, bytes.
    Command([u8; 12], u16),
    /// Sends a control message of the console: port, event, value.
    Control(u8, u8, u8),
    /// The host has input of so many bytes for the guest.
    Input(u16),
    /// The host's input ends, or its terminal has another size.
    Close(bool),
    /// From now on another processor adds a request to a queue for each that the device returns.
    Feed(u8, u16),
    /// The device serves what it has left.
    Backlog,
    /// Saves and restores the device.
    Restore,
    /// Sets the device up again, with event indices, and with several ports of a console.
    Start(bool, bool),
}

/// A disk of zeroes.
struct Disk(Vec<u8>);

impl Disk {
    fn part(&mut self, offset: u64, len: u64) -> &mut [u8] {
        let offset = usize::try_from(offset).expect("the offset is on the disk");
        let len = usize::try_from(len).expect("the length is on the disk");
        &mut self.0[offset..offset + len]
    }
}

impl BlockBackend for Disk {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.copy_from_slice(self.part(offset, data.len() as u64));
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.part(offset, data.len() as u64).copy_from_slice(data);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.part(offset, len).fill(0);
        Ok(())
    }

    fn write_zeroes(&mut self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        self.discard(offset, len)
    }
}

/// A host that takes everything, and checks how long it is.
struct Host;

impl FrameSink for Host {
    fn send(&mut self, frame: &[u8]) {
        assert!(frame.len() <= FRAME_MAX);
    }
}

impl FuseServer for Host {
    fn answer(&mut self, request: &[u8], reply: &mut [u8]) -> usize {
        assert!((40..=MESSAGE_MAX).contains(&request.len()));
        assert!(reply.len() <= MESSAGE_MAX);
        // A wrong server may claim to have written more than there is room for.
        reply.fill(request[0]);
        usize::from(request[1]) * 16
    }

    fn reset(&mut self) {}
}

impl Write for Host {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::BrokenPipe.into())
    }
}

/// Another processor, which adds requests while the device serves.
#[derive(Default)]
struct Feeder {
    memory: Mutex<Option<DmaMemory>>,
    queue: AtomicU32,
    left: AtomicU32,
}

impl Feeder {
    fn set_memory(&self, memory: Option<DmaMemory>) {
        *self.memory.lock().expect("no thread panics") = memory;
    }

    /// Takes the device's write to memory.
    fn written(&self, address: u64) {
        let rings = u64::from(self.queue.load(Ordering::Relaxed)) * RINGS;
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 || address != rings + USED + 2 {
            return;
        }
        let memory = self.memory.lock().expect("no thread panics").clone();
        if let Some(memory) = memory {
            self.left.store(left - 1, Ordering::Relaxed);
            let at = GuestAddress(rings + AVAILABLE + 2);
            let index: u16 = memory.read_obj(at).unwrap_or(0);
            let _ = memory.write_obj(index.wrapping_add(1), at);
        }
    }
}

fn memory() -> (DmaMemory, Arc<Feeder>) {
    let feeder = Arc::<Feeder>::default();
    let observer = feeder.clone();
    let reporter = WriteReporter::new(0, Arc::new(move |address, _| observer.written(address)));
    let mapping = MmapRegionBuilder::new_with_bitmap(MEMORY, reporter)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .build()
        .expect("memory can be mapped");
    let region = GuestRegionMmap::new(mapping, GuestAddress(0)).expect("the region is valid");
    let memory = DmaMemory::from_regions(vec![region]).expect("one region is valid");
    feeder.set_memory(Some(memory.clone()));
    (memory, feeder)
}

struct Machine {
    memory: DmaMemory,
    feeder: Arc<Feeder>,
    /// Requests that another processor may still add.
    added_left: u32,
    function: VirtioFunction,
    frames: ReceivedFrames,
    input: PortInput,
    /// Requests made, by queue.
    next: [u16; QUEUES as usize],
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The memory owns itself through its reporter.
        self.feeder.set_memory(None);
    }
}

impl Machine {
    fn new(device: u8) -> Self {
        let (memory, feeder) = memory();
        let (frames, input) = (ReceivedFrames::default(), PortInput::default());
        let disk = || Box::new(Disk(vec![0; DISK_LEN]));
        let port = |is_console| ConsolePort {
            name: "port".to_owned(),
            is_console,
            output: Box::new(Host),
            input: input.clone(),
        };
        let device: Box<dyn VirtioDevice> = match device % 7 {
            0 => Box::new(VirtioDisk::new(disk(), "disk", 2)),
            1 => Box::new(Network::new([2; 6], Box::new(Host), frames.clone())),
            2 => Box::new(VirtioConsole::new(vec![port(true), port(false)])),
            3 => Box::new(Entropy::new(Box::new(SeededEntropy::new(3)))),
            4 => Box::new(VirtioCdrom::new(disk(), "disc")),
            5 => Box::new(FileSystem::new("tag", Box::new(Host))),
            _ => {
                let overlay = Overlay::new(disk(), 0x4000);
                Box::new(VirtioDisk::new(Box::new(overlay), "overlay", 1))
            }
        };
        let sender = MsiSender::new(|_, _| {});
        let mut this = Self {
            function: VirtioFunction::new(1, 0xc000_0000, device, memory.clone(), sender),
            memory,
            feeder,
            added_left: ADDED_MAX,
            frames,
            input,
            next: [0; QUEUES as usize],
        };
        this.start(false, true);
        this
    }

    fn register(&mut self, offset: u64, value: u32, len: usize) {
        let bytes = value.to_le_bytes();
        self.function.bar_write(0, offset, &bytes[..len]);
    }

    fn start(&mut self, events: bool, ports: bool) {
        self.function.config_write(4, &[6, 0]);
        for status in [0, 3] {
            self.register(0x14, status, 1);
        }
        let features = u32::from(events) << 29 | u32::from(ports) << 1;
        for (select, half) in [(0, features), (1, 1)] {
            self.register(0x08, select, 4);
            self.register(0x0c, half, 4);
        }
        self.register(0x14, 11, 1);
        for queue in 0..u16::from(QUEUES) {
            let rings = u64::from(queue) * RINGS;
            self.register(0x16, queue.into(), 2);
            self.register(0x18, SIZE.into(), 2);
            for (field, offset) in [(0x20, 0), (0x28, AVAILABLE), (0x30, USED)] {
                let address = u32::try_from(rings + offset).expect("memory is small");
                self.register(field, address, 4);
                self.register(field + 4, 0, 4);
            }
            let _ = self
                .memory
                .write_obj(0_u16, GuestAddress(rings + AVAILABLE + 2));
            self.register(0x1c, 1, 2);
        }
        self.next = [0; QUEUES as usize];
        self.register(0x14, 15, 1);
    }

    fn descriptor(
        &mut self,
        queue: u8,
        index: u8,
        (address, len): (u64, u32),
        flags: u8,
        next: u8,
    ) {
        let queue = u64::from(queue % QUEUES);
        let at = queue * RINGS + 16 * u64::from(u16::from(index) % SIZE);
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(u16::from(flags).to_le_bytes());
        bytes.extend(u16::from(next).to_le_bytes());
        let _ = self.memory.write_slice(&bytes, GuestAddress(at));
    }

    /// Offers a chain. The device takes no more requests than it may at a time.
    fn offer(&mut self, queue: u8, head: u8) {
        let queue = queue % QUEUES;
        let rings = u64::from(queue) * RINGS;
        let next = &mut self.next[usize::from(queue)];
        let entry = rings + AVAILABLE + 4 + 2 * u64::from(*next % SIZE);
        *next = next.wrapping_add(1);
        let next = *next;
        let head = u16::from(head);
        let _ = self.memory.write_obj(head, GuestAddress(entry));
        let _ = self
            .memory
            .write_obj(next, GuestAddress(rings + AVAILABLE + 2));
        let before = self.returned();
        self.register(0x3000 + 4 * u64::from(queue), 0, 2);
        let served = self.returned().into_iter().zip(before);
        let served: u32 = served
            .map(|(now, then)| u32::from(now.wrapping_sub(then)))
            .sum();
        assert!(served <= CHAINS_MAX.into(), "{served} requests at a time");
    }

    /// Requests that the device has returned, by queue.
    fn returned(&self) -> Vec<u16> {
        let queues = self.function.save().queues;
        queues.iter().map(|queue| queue.next_used).collect()
    }

    fn request(&mut self, queue: u8, readable: &[u8], writable: u16) {
        let len = readable.len().min(BUFFER_LEN.into());
        let _ = self
            .memory
            .write_slice(&readable[..len], GuestAddress(READABLE));
        let len = u32::try_from(len).expect("the buffer is small");
        let writable = u32::from(writable % BUFFER_LEN);
        let more = u8::from(writable != 0);
        self.descriptor(queue, 0, (READABLE, len), more, 1);
        self.descriptor(queue, 1, (WRITABLE, writable), 2, 0);
        self.offer(queue, u8::from(len == 0));
    }

    /// Takes a step: these are the driver's accesses to memory and registers.
    fn take(&mut self, step: &Step) {
        match *step {
            Step::Descriptor(queue, index, address, len, flags, next) => {
                self.descriptor(queue, index, (address.into(), len), flags, next);
            }
            Step::Offer(queue, head) => self.offer(queue, head),
            Step::Memory(at, value) => {
                let _ = self.memory.write_obj(value, GuestAddress(at.into()));
            }
            Step::Register(msix, offset, value, size) => {
                let offset = u64::from(offset) & 0x3fff;
                let bytes = value.to_le_bytes();
                let bytes = &bytes[..1 << (size % 4)];
                self.function.bar_write(msix.into(), offset, bytes);
            }
            Step::Common(index, value, size) => {
                self.register(4 * u64::from(index % 14), value, 1 << (size % 3));
            }
            Step::Read(msix, offset, size) => {
                let offset = u64::from(offset) & 0x3fff;
                let mut data = [0; 8];
                let data = &mut data[..1 << (size % 4)];
                self.function.bar_read(msix.into(), offset, data);
            }
            Step::Config(offset, value, size) => {
                let bytes = value.to_le_bytes();
                self.function
                    .config_write(offset.into(), &bytes[..1 << (size % 3)]);
            }
            Step::ConfigRead(offset, size) => {
                let mut data = [0; 4];
                self.function
                    .config_read(offset.into(), &mut data[..1 << (size % 3)]);
            }
            _ => self.take_request(step),
        }
    }

    /// Takes a step of the driver's requests, of the host, or of the whole machine.
    fn take_request(&mut self, step: &Step) {
        match *step {
            Step::Request(queue, ref readable, writable) => self.request(queue, readable, writable),
            Step::Disk(queue, kind, sector, len) => {
                let kind = [0, 1, 4, 8, 11, 13][usize::from(kind % 6)];
                let mut bytes = vec![kind, 0, 0, 0, 0, 0, 0, 0, sector, 0, 0, 0, 0, 0, 0, 0];
                bytes.resize(16 + usize::from(len % BUFFER_LEN), sector);
                self.request(queue % 2, &bytes, if kind == 0 { len } else { 1 });
            }
            Step::Command(command, writable) => {
                let mut bytes = vec![1, 0, 0x40, 0, 0, 0, 0, 0];
                bytes.resize(19, 0);
                bytes.extend(command);
                bytes.resize(51, 0);
                self.request(2, &bytes, writable);
            }
            Step::Control(port, event, value) => {
                self.request(3, &[port % 3, 0, 0, 0, event % 8, 0, value % 2, 0], 0);
            }
            Step::Input(len) => {
                let data = vec![7; len.into()];
                self.frames.push(&data);
                self.input.push(&data);
                self.function.serve_all();
            }
            Step::Close(ends) => {
                if ends {
                    self.input.close();
                } else {
                    self.input.set_size(25, 80);
                }
                self.function.serve_all();
            }
            Step::Feed(queue, count) => {
                let count = u32::from(count).min(self.added_left);
                self.added_left -= count;
                let queue = (queue % QUEUES).into();
                self.feeder.queue.store(queue, Ordering::Relaxed);
                self.feeder.left.store(count, Ordering::Relaxed);
            }
            Step::Backlog => self.function.serve_backlog(),
            Step::Restore => {
                let saved = self.function.save();
                self.function
                    .restore(&saved)
                    .expect("a state that was saved is valid");
                assert_eq!(self.function.save(), saved);
            }
            Step::Start(events, ports) => self.start(events, ports),
            _ => {}
        }
    }

    /// Each request that the device has taken is returned, unless the device has stopped.
    fn check(&self) {
        let saved = self.function.save();
        if saved.common.status.bits() & NEEDS_RESET != 0 {
            return;
        }
        for queue in &saved.queues {
            assert_eq!(queue.next_avail, queue.next_used, "{queue:?}");
        }
    }
}

/// Takes the steps with one of the devices, and panics if it takes too many requests at a time, or
/// loses one.
pub fn check(device: u8, steps: &[Step]) {
    let mut machine = Machine::new(device);
    for step in steps.iter().take(STEPS_MAX) {
        machine.take(step);
        machine.check();
    }
}
