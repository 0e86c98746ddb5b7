//! A driver for tests: a function with guest memory, and requests of one chain each.

#![expect(
    clippy::cast_possible_truncation,
    reason = "the numbers of the tests are small"
)]

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use super::block::BlockBackend;
use super::{DmaMemory, VirtioDevice, VirtioFunction, WriteReporter};
use crate::pci::MsiSender;

/// Bytes of guest memory.
pub const MEMORY: usize = 1 << 20;
/// The rings of queue N are at N times this.
const RINGS: u64 = 0x4000;
const BUFFERS: u64 = 0x8_0000;
const SIZE: u16 = 8;

/// Writes of devices, as address and length.
pub type Writes = Arc<Mutex<Vec<(u64, u64)>>>;

/// Returns guest memory that begins at address 0, and the log of devices' writes to it.
pub fn memory() -> (DmaMemory, Writes) {
    let (memory, writes, _) = fed_memory();
    (memory, writes)
}

fn fed_memory() -> (DmaMemory, Writes, Arc<Feeder>) {
    let (writes, feeder) = (Writes::default(), Arc::<Feeder>::default());
    let (log, observer) = (writes.clone(), feeder.clone());
    let report = Arc::new(move |address, len| {
        log.lock().unwrap().push((address, len));
        observer.written(address);
    });
    let mapping = MmapRegionBuilder::new_with_bitmap(MEMORY, WriteReporter::new(0, report))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .build()
        .unwrap();
    let region = GuestRegionMmap::new(mapping, GuestAddress(0)).unwrap();
    let memory = GuestMemoryMmap::from_regions(vec![region]).unwrap();
    (memory, writes, feeder)
}

/// What another processor does while a device serves a queue: it adds the first request again for
/// each one that the device returns.
#[derive(Default)]
pub struct Feeder {
    memory: OnceLock<DmaMemory>,
    /// The queue, and how many requests are still added.
    queue: Mutex<Option<(u64, u32)>>,
}

impl Feeder {
    /// Takes a device's write to memory.
    fn written(&self, address: u64) {
        let mut feeding = self.queue.lock().unwrap();
        let Some(memory) = self.memory.get() else {
            return;
        };
        match &mut *feeding {
            Some((queue, left)) if address == *queue * RINGS + 0x2002 && *left != 0 => {
                *left -= 1;
                let at = GuestAddress(*queue * RINGS + 0x1002);
                drop(feeding);
                let index: u16 = memory.read_obj(at).unwrap();
                memory.write_obj(index.wrapping_add(1), at).unwrap();
            }
            _ => {}
        }
    }
}

/// A driver and its device.
pub struct Driver {
    pub memory: DmaMemory,
    pub writes: Writes,
    feeder: Arc<Feeder>,
    function: VirtioFunction,
    /// Requests made, by queue.
    next: [u16; 8],
}

impl Driver {
    pub fn new(device: Box<dyn VirtioDevice>) -> Self {
        let (memory, writes, feeder) = fed_memory();
        let _ = feeder.memory.set(memory.clone());
        let sender = MsiSender::new(|_, _| {});
        let function = VirtioFunction::new(1, 0xc000_0000, device, memory.clone(), sender);
        Self {
            memory,
            writes,
            feeder,
            function,
            next: [0; 8],
        }
    }

    /// Makes another processor add the first request of a queue again for each that the device
    /// returns, `count` times.
    pub fn feed(&mut self, queue: u64, count: u32) {
        *self.feeder.queue.lock().unwrap() = Some((queue, count));
    }

    pub fn function(&mut self) -> &mut VirtioFunction {
        &mut self.function
    }

    pub fn write(&mut self, offset: u64, value: u32, len: usize) {
        self.function
            .bar_write(0, offset, &value.to_le_bytes()[..len]);
    }

    pub fn read(&mut self, offset: u64, len: usize) -> u32 {
        let mut bytes = [0; 4];
        self.function.bar_read(0, offset, &mut bytes[..len]);
        u32::from_le_bytes(bytes)
    }

    pub fn status(&mut self) -> u32 {
        self.read(0x14, 1)
    }

    /// Sets the device up, with these features besides VERSION_1.
    pub fn start(&mut self, features: u32) {
        self.function.config_write(4, &[6, 0]);
        self.write(0x14, 0, 1);
        self.write(0x14, 3, 1);
        for (select, half) in [(0, features), (1, 1)] {
            self.write(0x08, select, 4);
            self.write(0x0c, half, 4);
        }
        self.write(0x14, 11, 1);
        assert_eq!(self.status(), 11, "the device accepts the features");
        for queue in 0..self.read(0x12, 2) {
            let rings = u64::from(queue) * RINGS;
            self.write(0x16, queue, 2);
            self.write(0x18, SIZE.into(), 2);
            for (field, address) in [
                (0x20, rings),
                (0x28, rings + 0x1000),
                (0x30, rings + 0x2000),
            ] {
                self.write(field, address as u32, 4);
                self.write(field + 4, 0, 4);
            }
            self.memory
                .write_obj(0_u16, GuestAddress(rings + 0x1002))
                .unwrap();
            self.write(0x1c, 1, 2);
        }
        self.next = [0; 8];
        self.write(0x14, 15, 1);
    }

    pub fn memory_write(&mut self, address: u64, data: &[u8]) {
        self.memory
            .write_slice(data, GuestAddress(address))
            .unwrap();
    }

    pub fn memory_read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory
            .read_slice(&mut data, GuestAddress(address))
            .unwrap();
        data
    }

    /// Continues where the function's restored state is after one request.
    pub fn rewind(&mut self) {
        self.next[0] = 1;
        for index in [0x1002, 0x2002] {
            self.memory.write_obj(1_u16, GuestAddress(index)).unwrap();
        }
    }

    /// Writes descriptor `index` of a queue.
    pub fn descriptor(
        &mut self,
        queue: u64,
        index: u16,
        address: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let at = queue * RINGS + 16 * u64::from(index);
        let mut bytes = Vec::new();
        bytes.extend(address.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
    }

    /// Offers the chain of a descriptor, and notifies the device.
    pub fn offer(&mut self, queue: u64, head: u16) {
        let rings = queue * RINGS + 0x1000;
        let next = &mut self.next[queue as usize];
        let entry = rings + 4 + 2 * u64::from(*next % SIZE);
        *next = next.wrapping_add(1);
        self.memory.write_obj(head, GuestAddress(entry)).unwrap();
        self.memory
            .write_obj(*next, GuestAddress(rings + 2))
            .unwrap();
        self.write(0x3000 + 4 * queue, 0, 2);
    }

    /// Requests that the device has returned.
    pub fn used(&self, queue: u64) -> u16 {
        self.memory
            .read_obj(GuestAddress(queue * RINGS + 0x2002))
            .unwrap()
    }

    /// Makes a request of one readable and one writable buffer. Returns the writable buffer's
    /// bytes.
    pub fn request(&mut self, queue: u64, readable: &[u8], writable: usize) -> Vec<u8> {
        let before = self.used(queue);
        self.memory
            .write_slice(readable, GuestAddress(BUFFERS))
            .unwrap();
        let answer = BUFFERS + 0x4_0000;
        let first = u16::from(readable.is_empty());
        self.descriptor(queue, 0, BUFFERS, readable.len() as u32, 1, 1);
        self.descriptor(queue, 1, answer, writable as u32, 2, 0);
        self.offer(queue, first);
        assert_eq!(
            self.used(queue),
            before.wrapping_add(1),
            "the device answers at once"
        );
        let mut data = vec![0; writable];
        self.memory
            .read_slice(&mut data, GuestAddress(answer))
            .unwrap();
        data
    }
}

/// A disk in memory.
pub struct MemoryDisk {
    pub data: Vec<u8>,
    pub read_only: bool,
    /// Writes fail as on a host whose disk is full.
    pub full: bool,
}

impl MemoryDisk {
    pub fn new(data: Vec<u8>) -> Self {
        Self {
            data,
            read_only: false,
            full: false,
        }
    }
}

impl BlockBackend for MemoryDisk {
    fn len(&self) -> u64 {
        self.data.len() as u64
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let offset = offset as usize;
        data.copy_from_slice(&self.data[offset..offset + data.len()]);
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        if self.full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let offset = offset as usize;
        self.data[offset..offset + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.write_zeroes(offset, len, true)
    }

    fn write_zeroes(&mut self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        let offset = offset as usize;
        self.data[offset..offset + len as usize].fill(0);
        Ok(())
    }
}
