use super::*;
use crate::virtio::test_driver::{Driver, MemoryDisk};
use std::io;

const REQUESTS: u64 = 2;
const BLOCK: usize = 2048;
/// Bytes of a response with sense data of the size after reset.
const RESPONSE_LEN: usize = 108;
/// Offset of the device's configuration in BAR 0.
const DEVICE: u64 = 0x2000;

fn driver() -> Driver {
    let disc: Vec<u8> = (0..8_u8).flat_map(|block| [block; BLOCK]).collect();
    started(VirtioCdrom::new(
        Box::new(MemoryDisk::new(disc)),
        "disc.iso",
    ))
}

fn started(device: VirtioCdrom) -> Driver {
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
}

#[test]
fn data_that_does_not_fit_is_an_overrun_and_leaves_the_buffer_unchanged() {
    let mut driver = driver();
    driver.memory_write(0xc_0000, &[0x77; RESPONSE_LEN + BLOCK]);
    let read = [0x28, 0, 0, 0, 0, 3, 0, 0, 1, 0];
    for (cdb, space) in [(&read[..], BLOCK - 1), (&[0x25], 7)] {
        let (response, data) = command(&mut driver, cdb, space);
        assert_eq!(response[10..12], [0, 1], "response OVERRUN");
        assert_eq!(response[4..8], u32::try_from(space).unwrap().to_le_bytes());
        assert_eq!(data, vec![0x77; space]);
    }
}

#[test]
fn read_longer_than_the_sector_limit_is_refused() {
    let disc = MemoryDisk::new(vec![0; 33 << 20]);
    let mut driver = started(VirtioCdrom::new(Box::new(disc), "disc.iso"));
    let read = |blocks: u16| {
        let [high, low] = blocks.to_be_bytes();
        [0x28, 0, 0, 0, 0, 0, 0, high, low, 0]
    };
    // 65536 sectors of 512 bytes, and four less.
    let (response, _) = command(&mut driver, &read(0x4000), BLOCK);
    assert_eq!(sense(&response), (5, 0x24));
    let (response, _) = command(&mut driver, &read(0x3fff), BLOCK);
    assert_eq!(response[10..12], [0, 1], "only the buffer is too short");
}

#[test]
fn request_of_more_buffers_than_the_segment_limit_stops_the_device() {
    const TABLE: u64 = 0x9_0000;
    for (buffers, status) in [(128_u16, 0x0f), (129, 0x4f)] {
        let mut driver = driver();
        let mut table = Vec::new();
        for index in 0..buffers {
            let (len, write): (u32, u16) = if index == 0 { (51, 0) } else { (16, 2) };
            let next = u16::from(index + 1 < buffers);
            table.extend(0xa_0000_u64.to_le_bytes());
            table.extend(len.to_le_bytes());
            table.extend((write | next).to_le_bytes());
            table.extend((index + 1).to_le_bytes());
        }
        driver.memory_write(TABLE, &table);
        let len = u32::try_from(table.len()).unwrap();
        driver.descriptor(REQUESTS, 0, TABLE, len, 4, 0);
        driver.offer(REQUESTS, 0);
        assert_eq!(driver.status(), status, "{buffers} buffers");
    }
}

#[test]
fn last_part_of_a_block_is_filled_with_zeros() {
    let disc = MemoryDisk::new(vec![9; BLOCK + 100]);
    let mut driver = started(VirtioCdrom::new(Box::new(disc), "disc.iso"));
    let (_, data) = command(&mut driver, &[0x25], 8);
    assert_eq!(data[..4], [0, 0, 0, 1], "the last block");
    let cdb = [0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0];
    let (response, data) = command(&mut driver, &cdb, BLOCK);
    assert_eq!(response[..12], [0; 12]);
    assert_eq!((&data[..100], data[100]), (&[9; 100][..], 0));
    assert_eq!(data[BLOCK - 1], 0);
}

#[test]
fn event_status_is_of_the_requested_class() {
    let mut driver = driver();
    let status = |classes| [0x4a, 1, 0, 0, classes, 0, 0, 0, 8, 0];
    let (_, data) = command(&mut driver, &status(0x10), 8);
    assert_eq!(data, [0, 6, 4, 0x10, 0, 2, 0, 0]);
    for classes in [0, 0x6e] {
        let (response, data) = command(&mut driver, &status(classes), 8);
        assert_eq!(data[..4], [0, 2, 0x80, 0x10], "no such event");
        assert_eq!(response[4..8], 4_u32.to_le_bytes());
    }
}

#[test]
fn saved_mode_pages_do_not_exist() {
    let mut driver = driver();
    for cdb in [[0x1a, 0, 0xea, 0, 64, 0], [0x5a, 0, 0xff, 0, 0, 0]] {
        assert_eq!(sense(&command(&mut driver, &cdb, 64).0), (5, 0x39));
    }
}

#[test]
fn driver_sets_the_sizes_of_sense_data_and_commands_until_reset() {
    let mut driver = driver();
    let sizes = |driver: &mut Driver| [20, 24].map(|at| driver.read(DEVICE + at, 4));
    assert_eq!(sizes(&mut driver), [96, 32]);
    driver.write(DEVICE + 20, 18, 4);
    driver.write(DEVICE + 24, 12, 4);
    assert_eq!(sizes(&mut driver), [18, 12]);
    // The LUN, 11 bytes, a command of 12 bytes; the data follows 12 bytes and the sense data.
    let mut request = vec![1, 0, 0, 0, 0, 0, 0, 0];
    request.extend([0; 11]);
    request.extend([0x28, 0, 0, 0, 0, 5, 0, 0, 1, 0, 0, 0]);
    let answer = driver.request(REQUESTS, &request, 30 + BLOCK);
    assert_eq!(answer[..30], [0; 30]);
    assert_eq!(answer[30..], [5; BLOCK]);
    let saved = driver.function().save();
    // Sizes outside of the limits, and accesses of other sizes.
    for (at, value, len) in [
        (20, 253, 4),
        (24, 261, 4),
        (24, 5, 4),
        (20, 0, 2),
        (0, 7, 4),
    ] {
        driver.write(DEVICE + at, value, len);
        assert_eq!(sizes(&mut driver), [18, 12], "{at}: {value}");
    }
    driver.start(0);
    assert_eq!(sizes(&mut driver), [96, 32]);
    driver.function().restore(&saved).unwrap();
    assert_eq!(sizes(&mut driver), [18, 12]);
    for (sense_size, cdb_size) in [(253, 32), (96, 5)] {
        let mut state = saved.clone();
        state.device = VirtioDeviceState::Scsi {
            sense_size,
            cdb_size,
        };
        let refused = driver.function().restore(&state);
        assert_eq!(refused, Err(VirtioStateError::Sizes));
    }
    assert_eq!(sizes(&mut driver), [18, 12]);
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

#[test]
fn failures_of_the_disc_are_counted_without_an_end() {
    let mut drive = CdDrive::new(Box::new(MemoryDisk::new(vec![0; BLOCK])), "disc.iso");
    drive.report(0, &io::ErrorKind::Other.into());
    drive.reported = u32::MAX;
    drive.report(0, &io::ErrorKind::Other.into());
    assert_eq!(drive.reported, u32::MAX);
}
