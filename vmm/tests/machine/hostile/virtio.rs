//! A guest that keeps its disk busy: each request writes the index of the available ring, and with it
//! adds the next request, and the sector of that one.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hindsight_cpu::profile::CpuProfile;
use hindsight_devices::virtio::block::{BlockBackend, VirtioDisk};
use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::deterministic::RunStop;
use hindsight_vmm::machine::PreparedMachine;
use hindsight_vmm::vcpu::engine::policy::Engine;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;

use super::super::guest::{
    COUNTERS, EXIT, LONG, RunningGuest, build, engines, long, prepared_with_devices,
};

/// Sectors of the disk: as many as an index of a ring has values.
const SECTORS: u64 = 1 << 16;
const SECTOR: u64 = 512;
/// The configuration registers of the first device, and its BAR 0.
const CONFIG: u64 = 0xe000_8000;
const BAR: u64 = 0xc000_8000;
/// Where the image has the rings and the request.
const DESCRIPTORS: u64 = LONG + 0x1000;
const AVAILABLE: u64 = LONG + 0x2000;
const USED: u64 = LONG + 0x3000;
const REQUEST: u64 = LONG + 0x4000;
const REST: u64 = LONG + 0x5000;
const STATUS: u64 = LONG + 0x6000;
/// Elements of the queue.
const SIZE: u32 = 256;
/// A device that cannot be stopped ends the test nevertheless after this time.
const PATIENCE: Duration = Duration::from_secs(20);

/// A disk whose sector N says that request N + 1 is available, and is of sector N + 1.
struct Feeder {
    /// Requests that are added; then the disk repeats the index.
    count: u64,
    until: Instant,
    reads: Arc<AtomicU64>,
}

impl Feeder {
    fn new(count: u64) -> Self {
        Self {
            count,
            until: Instant::now() + PATIENCE,
            reads: Arc::default(),
        }
    }
}

impl BlockBackend for Feeder {
    fn len(&self) -> u64 {
        SECTORS * SECTOR
    }

    fn read_only(&self) -> bool {
        true
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let reads = self.reads.fetch_add(1, Ordering::Relaxed) + 1;
        let added = reads < self.count && Instant::now() < self.until;
        let sector = offset / SECTOR;
        let index = sector + 1 + u64::from(added);
        data[..2].copy_from_slice(&index.to_le_bytes()[..2]);
        data[2..10].copy_from_slice(&((sector + 1) % SECTORS).to_le_bytes());
        Ok(())
    }

    fn write(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&mut self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn write_zeroes(&mut self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
}

/// A guest that makes the first request and then waits until `count` requests are complete. It exits
/// with how often it looked, in bits 7:0.
fn image(count: u32) -> Vec<u8> {
    let mut image = long(|a| {
        let mut again = a.create_label();
        a.mov(rbx, CONFIG)?;
        a.mov(word_ptr(rbx + 4), 6)?;
        a.mov(rbx, BAR)?;
        for status in [0, 3] {
            a.mov(byte_ptr(rbx + 0x14), status)?;
        }
        // VERSION_1.
        a.mov(dword_ptr(rbx + 8), 1)?;
        a.mov(dword_ptr(rbx + 0xc), 1)?;
        a.mov(byte_ptr(rbx + 0x14), 11)?;
        a.mov(word_ptr(rbx + 0x18), SIZE)?;
        for (field, address) in [(0x20, DESCRIPTORS), (0x28, AVAILABLE), (0x30, USED)] {
            a.mov(dword_ptr(rbx + field), u32::try_from(address).unwrap())?;
        }
        a.mov(word_ptr(rbx + 0x1c), 1)?;
        a.mov(byte_ptr(rbx + 0x14), 15)?;
        a.mov(rsi, USED)?;
        a.mov(rdi, COUNTERS)?;
        a.xor(eax, eax)?;
        a.mov(word_ptr(rbx + 0x3000), 0)?;
        a.set_label(&mut again)?;
        a.inc(eax)?;
        a.inc(qword_ptr(rdi))?;
        a.movzx(ecx, word_ptr(rsi + 2))?;
        a.cmp(ecx, count & 0xffff)?;
        a.jne(again)?;
        a.movzx(eax, al)?;
        a.out(EXIT, eax)
    });
    image.resize(0x7000, 0);
    let descriptors = [
        (REQUEST, 16_u32, 1_u16),
        (AVAILABLE + 2, 2, 3),
        (REQUEST + 8, 8, 3),
        (REST, 502, 3),
        (STATUS, 1, 2),
    ];
    for (index, (address, len, flags)) in (1_u16..).zip(descriptors) {
        let at = usize::try_from(DESCRIPTORS - LONG).unwrap() + 16 * (usize::from(index) - 1);
        let descriptor = &mut image[at..at + 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&len.to_le_bytes());
        descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
        descriptor[14..].copy_from_slice(&index.to_le_bytes());
    }
    // One request is available. It reads sector 0.
    image[usize::try_from(AVAILABLE + 2 - LONG).unwrap()] = 1;
    image
}

/// A machine with that guest and disk.
fn machine_with(engine: Engine, image: &[u8], disk: Feeder) -> PreparedMachine {
    let disk = VirtioDisk::new(Box::new(disk), "feeder", 1);
    let cpu = CpuProfile::default();
    let devices: Vec<Box<dyn hindsight_devices::virtio::VirtioDevice>> = vec![Box::new(disk)];
    prepared_with_devices(cpu, engine, image, (EntryMode::Long, 1), devices)
}

/// Ends all requests only with `PATIENCE`.
const ENDLESS: u64 = u64::MAX;

#[test]
fn time_limit_ends_a_guest_that_keeps_its_disk_busy() {
    // No index is 0 while requests are added, but for an instant every 65536 requests.
    let image = image(0x1_ffff);
    for engine in engines() {
        let machine = build(machine_with(engine, &image, Feeder::new(ENDLESS)));
        let start = Instant::now();
        let outcome = machine.run(Some(Duration::from_secs(1)), || {}).unwrap();
        assert!(matches!(outcome, Outcome::Timeout(_)), "{outcome:?}");
        assert!(start.elapsed() < PATIENCE / 2, "{engine:?}");
    }
}

#[test]
fn guest_that_keeps_its_disk_busy_can_be_paused() {
    let image = image(0x1_ffff);
    for engine in engines() {
        let feeder = Feeder::new(ENDLESS);
        let (reads, start) = (feeder.reads.clone(), Instant::now());
        let guest = RunningGuest::start_machine(build(machine_with(engine, &image, feeder)));
        while reads.load(Ordering::Relaxed) < 10_000 {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(guest.board.pause());
        let before = reads.load(Ordering::Relaxed);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(reads.load(Ordering::Relaxed), before, "the device pauses");
        guest.board.resume();
        while reads.load(Ordering::Relaxed) == before && start.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
        guest.board.run.finish(Outcome::Quit);
        guest.end();
        assert!(start.elapsed() < PATIENCE / 2, "{engine:?}");
    }
}

#[test]
fn requests_beyond_what_is_served_at_a_time_are_complete_in_the_end() {
    const COUNT: u32 = 5000;
    let image = image(COUNT);
    for engine in engines() {
        let machine = build(machine_with(engine, &image, Feeder::new(COUNT.into())));
        let outcome = machine.run(Some(Duration::from_secs(60)), || {}).unwrap();
        assert!(
            matches!(outcome, Outcome::Exit(_)),
            "{engine:?} {outcome:?}"
        );
    }
}

#[test]
fn deterministic_guest_finds_all_requests_complete_wherever_it_was_interrupted() {
    const COUNT: u32 = 5000;
    let image = image(COUNT);
    let machine = || {
        let prepared = machine_with(Engine::Interp, &image, Feeder::new(COUNT.into()));
        let machine = build(prepared.deterministic(1));
        machine.into_deterministic().unwrap()
    };
    let mut whole = machine();
    assert_eq!(whole.run_to(u64::MAX), RunStop::Ended);
    assert!(matches!(whole.take_outcome(), Some(Outcome::Exit(1))));
    let (end, hash) = (whole.icount(), whole.hash());
    let mut stepped = machine();
    let mut saved_with_requests = 0;
    for icount in 1..end {
        assert_eq!(stepped.run_to(icount), RunStop::Reached);
        let saved = stepped.save().unwrap();
        let root = saved.devices.pci_root.as_ref().unwrap();
        saved_with_requests += usize::from(!root.functions[0].backlog.is_empty());
        stepped.restore(&saved).unwrap();
    }
    assert_eq!(stepped.run_to(u64::MAX), RunStop::Ended);
    assert_eq!(saved_with_requests, 1);
    assert_eq!((stepped.icount(), stepped.hash()), (end, hash));
}
