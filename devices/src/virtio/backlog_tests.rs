//! Requests that a guest adds while a device serves its queue: a device serves some of them at a
//! time, and none is lost.

use super::block::VirtioDisk;
use super::console::{ConsolePort, PortInput, VirtioConsole};
use super::entropy::{Entropy, SeededEntropy};
use super::filesystem::{FileSystem, FuseServer};
use super::network::{FrameSink, Network, ReceivedFrames};
use super::queues::{BYTES_MAX, CHAINS_MAX};
use super::scsi::VirtioCdrom;
use super::test_driver::{Driver, MemoryDisk};
use super::vsock::{Vsock, VsockHost};
use super::{VirtioDevice, VirtioStateError};

/// Requests that are added: some more than are served in two calls.
const ADDED: u16 = 2 * CHAINS_MAX + 100;
/// With the first one.
const ALL: u16 = ADDED + 1;

struct Nobody;

impl FrameSink for Nobody {
    fn send(&mut self, _: &[u8]) {}
}

impl FuseServer for Nobody {
    fn answer(&mut self, _: &[u8], _: &mut [u8]) -> usize {
        0
    }

    fn reset(&mut self) {}
}

fn disk() -> Box<dyn VirtioDevice> {
    let disk = MemoryDisk::new(vec![0; 0x1_0000]);
    Box::new(VirtioDisk::new(Box::new(disk), "disk", 1))
}

fn entropy() -> Box<dyn VirtioDevice> {
    Box::new(Entropy::new(Box::new(SeededEntropy::new(1))))
}

fn console(input: &PortInput) -> Box<dyn VirtioDevice> {
    let port = |is_console| ConsolePort {
        name: "port".to_owned(),
        is_console,
        output: Box::new(std::io::sink()),
        input: input.clone(),
    };
    Box::new(VirtioConsole::new(vec![port(true), port(false)]))
}

/// A request of the disk: its kind, and sector 0.
fn disk_request(kind: u8) -> [u8; 16] {
    let mut request = [0; 16];
    request[0] = kind;
    request
}

/// Offers one request of a queue, which another processor adds again [`ADDED`] times.
fn flood(driver: &mut Driver, queue: u64, readable: &[u8], writable: u32) {
    driver.feed(queue, ADDED.into());
    driver.memory_write(0x8_0000, readable);
    let len = u32::try_from(readable.len()).unwrap();
    let flags = if len == 0 { 2 } else { 0 } | u16::from(len != 0 && writable != 0);
    let first = if len == 0 { writable } else { len };
    driver.descriptor(queue, 0, 0x8_0000, first, flags, 1);
    driver.descriptor(queue, 1, 0x9_0000, writable, 2, 0);
    driver.offer(queue, 0);
}

/// Checks that a flood of a queue is served in three parts.
#[track_caller]
fn is_served_in_parts(
    device: Box<dyn VirtioDevice>,
    features: u64,
    (queue, readable, writable): (u64, &[u8], u32),
) {
    let mut driver = Driver::new(device);
    driver.start(u32::try_from(features).unwrap());
    flood(&mut driver, queue, readable, writable);
    assert_eq!(driver.used(queue), CHAINS_MAX, "the first part");
    assert_eq!(driver.read(0x1000, 1), 1, "an interrupt");
    for (used, left, interrupt) in [(2 * CHAINS_MAX, true, 1), (ALL, false, 1), (ALL, false, 0)] {
        driver.function().serve_backlog();
        assert_eq!(driver.used(queue), used);
        assert_eq!(driver.function().has_backlog(), left);
        assert_eq!(driver.read(0x1000, 1), interrupt, "{used} requests");
    }
    assert_eq!(driver.status(), 15);
}

#[test]
fn disk_is_not_kept_busy_for_ever() {
    is_served_in_parts(disk(), 0, (0, &disk_request(8), 21));
}

#[test]
fn network_card_is_not_kept_busy_for_ever() {
    let received = ReceivedFrames::default();
    let device = Network::new([2, 0, 0, 0, 0, 1], Box::new(Nobody), received);
    is_served_in_parts(Box::new(device), 0, (1, &[0; 20], 0));
}

#[test]
fn console_is_not_kept_busy_for_ever() {
    let input = PortInput::default();
    is_served_in_parts(console(&input), 0, (1, b"output", 0));
    // PORT_OPEN of port 1.
    is_served_in_parts(console(&input), 2, (3, &[1, 0, 0, 0, 6, 0, 1, 0], 0));
    input.push(&[7; 0x1_0000]);
    is_served_in_parts(console(&input), 0, (0, &[], 1));
}

#[test]
fn source_of_entropy_is_not_kept_busy_for_ever() {
    is_served_in_parts(entropy(), 0, (0, &[], 16));
}

#[test]
fn cdrom_is_not_kept_busy_for_ever() {
    let cdrom = || {
        let disc = MemoryDisk::new(vec![0; 0x1_0000]);
        Box::new(VirtioCdrom::new(Box::new(disc), "disc"))
    };
    is_served_in_parts(cdrom(), 0, (0, &[0; 24], 5));
    is_served_in_parts(cdrom(), 0, (2, &[1; 51], 108));
}

#[test]
fn file_system_is_not_kept_busy_for_ever() {
    let device = || Box::new(FileSystem::new("tag", Box::new(Nobody)));
    is_served_in_parts(device(), 0, (0, &[0; 40], 0));
    is_served_in_parts(device(), 0, (1, &[0; 40], 16));
}

#[test]
fn socket_device_is_not_kept_busy_for_ever() {
    let device = Vsock::new(3, VsockHost::new(|| {}));
    is_served_in_parts(Box::new(device), 0, (1, &[0; 44], 0));
}

#[test]
fn flushes_count_as_much_as_long_transfers() {
    let mut driver = Driver::new(disk());
    driver.start(0);
    flood(&mut driver, 0, &disk_request(4), 1);
    assert_eq!(usize::from(driver.used(0)), BYTES_MAX / (16 << 20));
    assert!(driver.function().has_backlog());
}

#[test]
fn zeroes_count_as_what_one_request_may_write() {
    let mut driver = Driver::new(disk());
    driver.start(0);
    flood(&mut driver, 0, &disk_request(13), 1);
    assert_eq!(usize::from(driver.used(0)), BYTES_MAX / (64 << 20));
    assert!(driver.function().has_backlog());
}

#[test]
fn requests_that_synchronize_files_count_as_much_as_long_transfers() {
    // FSYNC, SYNCFS, and SETATTR with a size; GETATTR and SETATTR with a mode.
    for (operation, valid, slow) in [
        (20, 0, true),
        (50, 0, true),
        (4, 8, true),
        (3, 0, false),
        (4, 1, false),
    ] {
        let mut driver = Driver::new(Box::new(FileSystem::new("tag", Box::new(Nobody))));
        driver.start(0);
        let mut request = [0; 44];
        (request[4], request[40]) = (operation, valid);
        flood(&mut driver, 1, &request, 16);
        let slow_ones = u16::try_from(BYTES_MAX / (16 << 20)).unwrap();
        let expected = if slow { slow_ones } else { CHAINS_MAX };
        assert_eq!(driver.used(1), expected, "{operation} {valid}");
    }
}

#[test]
fn full_queue_leaves_nothing() {
    let mut driver = Driver::new(entropy());
    driver.start(0);
    driver.feed(0, u32::from(CHAINS_MAX) - 1);
    driver.descriptor(0, 0, 0x9_0000, 16, 2, 0);
    driver.offer(0, 0);
    assert_eq!(driver.used(0), CHAINS_MAX);
    assert!(!driver.function().has_backlog());
    driver.function().serve_backlog();
    assert_eq!(driver.used(0), CHAINS_MAX);
}

#[test]
fn reset_drops_what_is_left() {
    let mut driver = Driver::new(entropy());
    driver.start(0);
    flood(&mut driver, 0, &[], 16);
    assert!(driver.function().has_backlog());
    driver.write(0x14, 0, 1);
    assert!(!driver.function().has_backlog());
    driver.feed(0, 0);
    driver.start(0);
    driver.function().serve_backlog();
    assert!(!driver.function().has_backlog());
}

#[test]
fn what_is_left_waits_while_the_device_is_no_bus_master() {
    let mut driver = Driver::new(entropy());
    driver.start(0);
    flood(&mut driver, 0, &[], 16);
    driver.function().config_write(4, &[2, 0]);
    assert!(!driver.function().has_backlog());
    driver.function().serve_backlog();
    assert_eq!(driver.used(0), CHAINS_MAX);
    driver.function().config_write(4, &[6, 0]);
    assert!(driver.function().has_backlog());
    driver.function().serve_backlog();
    assert_eq!(driver.used(0), 2 * CHAINS_MAX);
}

#[test]
fn saved_state_has_what_is_left() {
    let mut driver = Driver::new(entropy());
    driver.start(0);
    flood(&mut driver, 0, &[], 16);
    let saved = driver.function().save();
    assert_eq!(saved.backlog, [0]);
    driver.write(0x14, 0, 1);
    driver.function().restore(&saved).unwrap();
    assert_eq!(driver.function().save(), saved);
    while driver.function().has_backlog() {
        driver.function().serve_backlog();
    }
    assert_eq!(driver.used(0), ALL);
}

#[test]
fn state_with_a_queue_that_does_not_exist_is_refused() {
    let mut driver = Driver::new(entropy());
    driver.start(0);
    let saved = driver.function().save();
    for backlog in [vec![1], vec![0, 0], vec![u16::MAX]] {
        let mut state = saved.clone();
        state.backlog = backlog;
        let restored = driver.function().restore(&state);
        assert_eq!(restored, Err(VirtioStateError::Queue));
        assert_eq!(driver.function().save(), saved);
    }
}

#[test]
fn queues_of_a_device_are_served_in_turn() {
    let mut driver = Driver::new(console(&PortInput::default()));
    driver.start(0);
    flood(&mut driver, 5, b"output", 0);
    flood(&mut driver, 1, b"output", 0);
    assert_eq!(driver.function().save().backlog, [5, 1]);
    // The other processor now adds requests to queue 1 only.
    driver.function().serve_backlog();
    assert_eq!(driver.function().save().backlog, [1]);
    driver.function().serve_backlog();
    assert_eq!(driver.used(5), CHAINS_MAX + 1);
    assert_eq!(driver.used(1), 2 * CHAINS_MAX);
}

#[test]
fn chain_of_too_many_buffers_stops_the_device() {
    for (buffers, status) in [(4096_u16, 15), (4097, 0x4f)] {
        let mut driver = Driver::new(entropy());
        driver.start(0);
        driver.descriptor(0, 0, 0x4_8000, 16 * u32::from(buffers), 4, 0);
        for index in 0..buffers {
            let flags = 2 | u16::from(index + 1 != buffers);
            driver.descriptor(0x12, index, 0x9_0000, 1, flags, index + 1);
        }
        driver.offer(0, 0);
        assert_eq!(driver.status(), status, "{buffers} buffers");
    }
}
