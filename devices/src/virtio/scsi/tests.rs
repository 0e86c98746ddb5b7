use super::*;
use crate::virtio::test_driver::{Driver, MemoryDisk};

const REQUESTS: u64 = 2;
const BLOCK: usize = 2048;

fn driver() -> Driver {
    let disc: Vec<u8> = (0..8_u8).flat_map(|block| [block; BLOCK]).collect();
    let device = VirtioCdrom::new(Box::new(MemoryDisk::new(disc)), "disc.iso");
    let mut driver = Driver::new(Box::new(device));
    driver.start(0);
    driver
}

/// The response and the data of a command for a LUN.
fn command_for(driver: &mut Driver, lun: [u8; 8], cdb: &[u8], space: usize) -> (Vec<u8>, Vec<u8>) {
    let mut request = lun.to_vec();
    request.extend([0; 11]);
    request.extend(cdb);
    request.resize(51, 0);
    let mut answer = driver.request(REQUESTS, &request, RESPONSE_LEN + space);
    let data = answer.split_off(RESPONSE_LEN);
    (answer, data)
}

fn command(driver: &mut Driver, cdb: &[u8], space: usize) -> (Vec<u8>, Vec<u8>) {
    command_for(driver, [1, 0, 0, 0, 0, 0, 0, 0], cdb, space)
}

/// Sense key and code of a response that refuses a command.
fn sense(response: &[u8]) -> (u8, u8) {
    assert_eq!((response[0], response[10]), (18, 2), "check condition");
    (response[12 + 2], response[12 + 12])
}

#[test]
fn blocks_are_read_by_both_commands() {
    let mut driver = driver();
    let cdb = [0x28, 0, 0, 0, 0, 3, 0, 0, 2, 0];
    let (response, data) = command(&mut driver, &cdb, 2 * BLOCK);
    assert_eq!(response[..12], [0; 12]);
    assert_eq!((data[0], data[BLOCK - 1], data[BLOCK]), (3, 3, 4));
    let cdb = [0xa8, 0, 0, 0, 0, 7, 0, 0, 0, 1, 0, 0];
    assert_eq!(command(&mut driver, &cdb, BLOCK).1, [7; BLOCK]);
}

#[test]
fn residual_counts_the_space_that_a_command_leaves() {
    let mut driver = driver();
    let cdb = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let (response, _) = command(&mut driver, &cdb, BLOCK + 100);
    assert_eq!(response[4..8], 100_u32.to_le_bytes());
    let (response, data) = command(&mut driver, &cdb, 10);
    assert_eq!((&response[4..12], &data[..]), (&[0; 8][..], &[0; 10][..]));
}

#[test]
fn blocks_outside_of_the_disc_and_unknown_commands_are_refused() {
    let mut driver = driver();
    let cdb = [0x28, 0, 0, 0, 0, 7, 0, 0, 2, 0];
    assert_eq!(sense(&command(&mut driver, &cdb, 2 * BLOCK).0), (5, 0x21));
    let cdb = [0x28, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 1, 0];
    assert_eq!(sense(&command(&mut driver, &cdb, BLOCK).0), (5, 0x21));
    assert_eq!(sense(&command(&mut driver, &[0x2a], 0).0), (5, 0x20));
    assert_eq!(sense(&command(&mut driver, &[0x43, 0, 5], 9).0), (5, 0x24));
}

#[test]
fn drive_describes_itself_and_its_disc() {
    let mut driver = driver();
    let (_, data) = command(&mut driver, &[0x12, 0, 0, 0, 36, 0], 36);
    assert_eq!(
        (data[0], data[1], &data[8..16]),
        (5, 0x80, &b"HINDSGHT"[..])
    );
    let (_, data) = command(&mut driver, &[0x25], 8);
    assert_eq!(data, [0, 0, 0, 7, 0, 0, 8, 0]);
    let toc = [0x43, 0, 0, 0, 0, 0, 0, 0, 20, 0];
    let (_, data) = command(&mut driver, &toc, 20);
    let expected = [
        0, 18, 1, 1, 0, 0x14, 1, 0, 0, 0, 0, 0, 0, 0x14, 0xaa, 0, 0, 0, 0, 8,
    ];
    assert_eq!(data, expected);
    let (_, data) = command(&mut driver, &[0x43, 2, 0, 0, 0, 0, 0xaa, 0, 12, 0], 12);
    assert_eq!(data[8..12], [0, 0, 2, 8], "two seconds and 8 frames");
    let (_, data) = command(&mut driver, &[0x1a, 0, 0x2a, 0, 64, 0], 64);
    assert_eq!((data[0], data[4]), (23, 0x2a));
}

#[test]
fn other_targets_do_not_exist() {
    let mut driver = driver();
    for lun in [[1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0x40, 1, 0, 0, 0, 0]] {
        let (response, _) = command_for(&mut driver, lun, &[0], 0);
        assert_eq!(response[11], 3, "{lun:?}");
    }
    let flat = [1, 0, 0x40, 0, 0, 0, 0, 0];
    assert_eq!(command_for(&mut driver, flat, &[0], 0).0, [0; RESPONSE_LEN]);
}

#[test]
fn task_management_succeeds_and_events_are_never_returned() {
    let mut driver = driver();
    assert_eq!(driver.request(0, &[0; 24], 1), [0]);
    driver.descriptor(1, 0, 0x1000, 16, 2, 0);
    driver.offer(1, 0);
    assert_eq!(driver.used(1), 0);
}

#[test]
fn request_without_response_stops_the_device() {
    let mut driver = driver();
    driver.descriptor(REQUESTS, 0, 0x8_0000, 51, 0, 0);
    driver.offer(REQUESTS, 0);
    assert_eq!(driver.status() & 0x40, 0x40);
}
