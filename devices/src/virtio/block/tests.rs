use super::*;
use crate::virtio::test_driver::{Driver, MemoryDisk};

const DEVICE: u64 = 0x2000;

fn driver(disk: MemoryDisk) -> Driver {
    let mut driver = Driver::new(Box::new(VirtioDisk::new(Box::new(disk), "disk.img", 1)));
    driver.start(0);
    driver
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

fn numbered() -> MemoryDisk {
    MemoryDisk::new((0..16).flat_map(|n: u8| [n; 512]).collect())
}

#[test]
fn config_has_the_layout_of_the_specification() {
    let mut driver = driver(numbered());
    assert_eq!(driver.read(DEVICE, 4), 16, "capacity in sectors");
    assert_eq!(driver.read(DEVICE + 20, 4), 512, "block size");
    assert_eq!(driver.read(DEVICE + 24, 4), 0x0008_0003, "topology");
    assert_eq!(driver.read(DEVICE + 34, 2), 1, "queues");
    assert_eq!(driver.read(DEVICE + 36, 4), 1 << 22, "sectors of a discard");
    assert_eq!(driver.read(DEVICE + 44, 4), 8, "alignment of a discard");
    assert_eq!(
        driver.read(DEVICE + 48, 4),
        1 << 17,
        "sectors of write zeroes"
    );
    assert_eq!(driver.read(DEVICE + 56, 4), 1, "write zeroes may unmap");
    assert_eq!(driver.read(DEVICE + 60, 4), 0);
}

#[test]
fn sectors_are_read_and_written() {
    let mut driver = driver(numbered());
    let answer = driver.request(0, &header(REQUEST_IN, 3), 1025);
    assert_eq!(
        (answer[0], answer[511], answer[512], answer[1024]),
        (3, 3, 4, 0)
    );
    let mut request = header(REQUEST_OUT, 15);
    request.extend([0xaa; 512]);
    assert_eq!(driver.request(0, &request, 1), [STATUS_OK]);
    assert_eq!(
        driver.request(0, &header(REQUEST_IN, 15), 513)[..2],
        [0xaa; 2]
    );
    assert_eq!(driver.request(0, &header(REQUEST_FLUSH, 0), 1), [STATUS_OK]);
}

#[test]
fn data_of_a_read_is_reported_as_written_memory() {
    let mut driver = driver(numbered());
    driver.writes.lock().unwrap().clear();
    driver.request(0, &header(REQUEST_IN, 1), 513);
    let writes = driver.writes.lock().unwrap().clone();
    assert!(writes.contains(&(0xc_0000, 512)), "{writes:x?}");
    assert!(writes.contains(&(0xc_0200, 1)), "{writes:x?}");
}

#[test]
fn identification_is_the_end_of_the_name() {
    let mut driver = driver(numbered());
    let id = driver.request(0, &header(REQUEST_GET_ID, 0), 21);
    assert_eq!(&id[..9], b"disk.img\0");
    assert_eq!(id[20], STATUS_OK);
}

#[test]
fn request_beyond_the_disk_is_an_error() {
    let mut driver = driver(numbered());
    for sector in [16, 15, u64::MAX, u64::MAX / 512] {
        let answer = driver.request(0, &header(REQUEST_IN, sector), 1025);
        assert_eq!(answer[1024], STATUS_ERROR, "{sector:#x}");
    }
    let odd = driver.request(0, &header(REQUEST_IN, 0), 100);
    assert_eq!(odd[99], STATUS_ERROR, "not whole sectors");
    assert_eq!(driver.request(0, &header(77, 0), 1), [STATUS_UNSUPPORTED]);
}

#[test]
fn discard_and_write_zeroes_take_ranges() {
    let mut driver = driver(numbered());
    let range = |sector: u64, sectors: u32, flags: u32| {
        let mut bytes = sector.to_le_bytes().to_vec();
        bytes.extend(sectors.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes
    };
    let request = |kind, ranges: &[Vec<u8>]| [header(kind, 0), ranges.concat()].concat();
    for range in [range(1, 1, 1), range(3, 2, 0)] {
        let zeroes = request(REQUEST_WRITE_ZEROES, &[range]);
        assert_eq!(driver.request(0, &zeroes, 1), [STATUS_OK]);
    }
    let data = driver.request(0, &header(REQUEST_IN, 0), 6 * 512 + 1);
    let first_bytes: Vec<u8> = data.chunks(512).map(|sector| sector[0]).collect();
    assert_eq!(first_bytes, [0, 0, 2, 0, 0, 5, 0]);
    let rows = [
        (
            request(REQUEST_DISCARD, &[range(0, 1, 1)]),
            STATUS_UNSUPPORTED,
        ),
        (request(REQUEST_DISCARD, &[range(16, 1, 0)]), STATUS_ERROR),
        (
            request(REQUEST_DISCARD, &[range(u64::MAX, 1, 0)]),
            STATUS_ERROR,
        ),
        (
            request(REQUEST_DISCARD, &vec![range(0, 1, 0); 17]),
            STATUS_ERROR,
        ),
        (
            request(REQUEST_WRITE_ZEROES, &vec![range(0, 1, 0); 2]),
            STATUS_ERROR,
        ),
        (request(REQUEST_DISCARD, &[]), STATUS_ERROR),
        (request(REQUEST_DISCARD, &[range(8, 8, 0)]), STATUS_OK),
    ];
    for (request, status) in rows {
        assert_eq!(driver.request(0, &request, 1), [status], "{request:x?}");
    }
}

/// The configuration says how much a request may zero.
#[test]
fn one_request_zeroes_at_most_64_mib() {
    let mut driver = driver(MemoryDisk::new(vec![1; 65 << 20]));
    assert_eq!(driver.read(DEVICE + 48, 4), 64 << 11);
    assert_eq!(driver.read(DEVICE + 52, 4), 1);
    for (sectors, status) in [(64_u32 << 11, STATUS_OK), ((64 << 11) + 1, STATUS_ERROR)] {
        let mut request = header(REQUEST_WRITE_ZEROES, 0);
        request.extend([0; 8]);
        request.extend(sectors.to_le_bytes());
        request.extend([0; 4]);
        assert_eq!(driver.request(0, &request, 1), [status], "{sectors}");
    }
}

#[test]
fn read_only_disk_refuses_writes() {
    let mut driver = driver(MemoryDisk {
        read_only: true,
        ..numbered()
    });
    let mut request = header(REQUEST_OUT, 0);
    request.extend([1; 512]);
    assert_eq!(driver.request(0, &request, 1), [STATUS_ERROR]);
    assert_eq!(driver.read(0x04, 4) & 1 << 5, 1 << 5, "feature read-only");
}

#[test]
fn full_host_disk_is_an_error_in_the_guest() {
    let mut driver = driver(MemoryDisk {
        full: true,
        ..numbered()
    });
    let mut request = header(REQUEST_OUT, 0);
    request.extend([1; 512]);
    for _ in 0..40 {
        assert_eq!(driver.request(0, &request, 1), [STATUS_ERROR]);
    }
}

#[test]
fn request_without_header_or_status_stops_the_device() {
    let mut driver = driver(numbered());
    driver.descriptor(0, 0, 0x8_0000, 8, 0, 0);
    driver.offer(0, 0);
    assert_eq!(driver.status(), 0x4f, "needs reset");
    assert_eq!(driver.used(0), 0);
    driver.start(0);
    driver.descriptor(0, 0, 0x8_0000, 16, 0, 0);
    driver.offer(0, 0);
    assert_eq!(driver.status(), 0x4f);
}

/// A sparse disk of many GiB, all zeros.
struct SparseDisk;

impl BlockBackend for SparseDisk {
    fn len(&self) -> u64 {
        1 << 50
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read(&mut self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Ok(())
    }

    fn write(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&mut self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn write_zeroes(&mut self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn transfer_longer_than_the_limit_is_an_error() {
    const TABLE: u64 = 0x1_8000;
    const HEADER: u64 = 0x1_0000;
    const ANSWER: u64 = 0x1_0100;
    // The data is the same 512 KiB in each buffer: 1 GiB, and a sector more.
    for (kind, flags) in [(REQUEST_IN, 2_u16), (REQUEST_OUT, 0)] {
        let mut driver = Driver::new(Box::new(VirtioDisk::new(Box::new(SparseDisk), "disk", 1)));
        driver.start(0);
        let mut table = Vec::new();
        let mut add = |address: u64, len: u32, flags: u16| {
            let next = u16::try_from(table.len() / 16 + 1).unwrap();
            table.extend(address.to_le_bytes());
            table.extend(len.to_le_bytes());
            table.extend(flags.to_le_bytes());
            table.extend(next.to_le_bytes());
        };
        add(HEADER, 16, 1);
        for _ in 0..2048 {
            add(0x8_0000, 0x8_0000, flags | 1);
        }
        add(0x8_0000, 512, flags | 1);
        add(ANSWER, 1, 2);
        driver.memory_write(TABLE, &table);
        driver.memory_write(HEADER, &header(kind, 0));
        driver.memory_write(ANSWER, &[0xff]);
        let len = u32::try_from(table.len()).unwrap();
        driver.descriptor(0, 0, TABLE, len, 4, 0);
        driver.offer(0, 0);
        assert_eq!(driver.used(0), 1);
        assert_eq!(driver.memory_read(ANSWER, 1), [STATUS_ERROR], "{kind}");
    }
}

#[test]
fn failures_of_a_disk_are_counted_without_an_end() {
    let mut disk = VirtioDisk::new(Box::new(numbered()), "disk.img", 1);
    disk.reported = u32::MAX;
    disk.report(REQUEST_IN, 0, &io::ErrorKind::Other.into());
    assert_eq!(disk.reported, u32::MAX);
}
