//! Tests of the flash chip.

use std::sync::Mutex;

use super::*;
use proptest::prelude::*;

type Log = Arc<Mutex<Vec<(u64, Vec<u8>)>>>;

struct LogStore(Log);

impl FlashStore for LogStore {
    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap().push((offset, data.to_vec()));
        Ok(())
    }
}

struct FullStore;

impl FlashStore for FullStore {
    fn write(&mut self, _offset: u64, _data: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }
}

fn chip() -> (Flash, Log) {
    let log = Log::default();
    let contents = vec![0xff; 3 * FLASH_BLOCK];
    let flash = Flash::new(contents, Some(Box::new(LogStore(log.clone())))).unwrap();
    (flash, log)
}

fn read(flash: &mut Flash, offset: u64) -> u8 {
    let mut data = [0];
    flash.read(offset, &mut data);
    data[0]
}

#[test]
fn contents_are_whole_blocks() {
    for size in [0, 1, FLASH_BLOCK - 1, FLASH_BLOCK + 1] {
        let error = Flash::new(vec![0; size], None).unwrap_err();
        assert_eq!(error, FlashError::Size(size));
    }
}

#[test]
fn program_clears_bits_and_erase_sets_those_of_a_block() {
    let (mut flash, log) = chip();
    for (offset, value) in [(0x1fff, 0xf0), (0x1fff, 0x3c), (0x2000, 0)] {
        flash.write(offset, &[0x10]);
        flash.write(offset, &[value]);
        assert_eq!(read(&mut flash, 0), 0x80, "ready");
    }
    flash.write(0, &[0xff]);
    assert_eq!(read(&mut flash, 0x1fff), 0x30);
    flash.write(0x1abc, &[0x20]);
    flash.write(0x1abc, &[0xd0]);
    assert_eq!(read(&mut flash, 0), 0x80);
    flash.write(0, &[0xff]);
    let (erased, programmed) = (read(&mut flash, 0x1fff), read(&mut flash, 0x2000));
    assert_eq!((erased, programmed), (0xff, 0));
    let log = log.lock().unwrap();
    assert_eq!(log[1], (0x1fff, vec![0x30]));
    assert_eq!(log[3], (0x1000, vec![0xff; FLASH_BLOCK]));
    assert_eq!(log.len(), 4);
}

#[test]
fn ovmf_detects_flash_by_the_cleared_status() {
    let (mut flash, _) = chip();
    flash.write(0, &[0x50]);
    assert_eq!(read(&mut flash, 0), 0xff, "the contents");
    flash.write(0, &[0x70]);
    assert_eq!(read(&mut flash, 0), 0);
    flash.write(0, &[0xff]);
    assert_eq!(read(&mut flash, 0), 0xff);
}

#[test]
fn buffer_is_programmed_when_it_is_confirmed() {
    let (mut flash, log) = chip();
    flash.write(0x10, &[0xe8]);
    assert_eq!(read(&mut flash, 0x10), 0x80, "the buffer is free");
    flash.write(0x10, &[4]);
    flash.write(0x10, &[1, 2, 3, 4]);
    flash.write(0x20, &[5, 6]);
    assert!(log.lock().unwrap().is_empty());
    flash.write(0x10, &[0xd0]);
    assert_eq!(read(&mut flash, 0), 0x80);
    flash.write(0, &[0xff]);
    let mut data = [0; 4];
    flash.read(0x10, &mut data);
    assert_eq!(data, [1, 2, 3, 4]);
    assert_eq!(read(&mut flash, 0x20), 5);
    assert_eq!(read(&mut flash, 0x21), 0xff, "one byte too many");
}

#[test]
fn wrong_sequences_set_both_error_bits() {
    let rows: [&[(u64, u8)]; 4] = [
        &[(0, 0x20), (0, 0x10)],
        &[(0, 0x60), (0, 0x2f)],
        &[(0, 0xe8), (0, 0), (0, 1), (0, 0x70)],
        // A buffer of two blocks.
        &[(0, 0xe8), (0, 1), (0xfff, 1), (0x1000, 1), (0, 0xd0)],
    ];
    for row in rows {
        let (mut flash, log) = chip();
        for &(offset, value) in row {
            flash.write(offset, &[value]);
        }
        assert_eq!(read(&mut flash, 0), 0xb0, "{row:x?}");
        assert!(log.lock().unwrap().is_empty(), "{row:x?}");
    }
}

#[test]
fn changes_that_the_store_refuses_are_errors_in_the_guest() {
    let mut flash = Flash::new(vec![0xff; FLASH_BLOCK], Some(Box::new(FullStore))).unwrap();
    flash.write(0, &[0x40]);
    flash.write(0, &[0]);
    assert_eq!(read(&mut flash, 0), 0x90);
    flash.write(0, &[0x50]);
    flash.write(0, &[0x20]);
    flash.write(0, &[0xd0]);
    assert_eq!(read(&mut flash, 0), 0xa0);
}

#[test]
fn query_table_describes_the_chip() {
    let (mut flash, _) = chip();
    flash.write(0x55, &[0x98]);
    let table: Vec<u8> = (0..0x36).map(|at| read(&mut flash, at)).collect();
    assert_eq!(&table[0x10..0x17], b"QRY\x01\0\x31\0");
    assert_eq!(table[0x27], 14, "16 KiB is the next power of two");
    assert_eq!(&table[0x2c..0x31], &[1, 2, 0, 0x10, 0]);
    assert_eq!(&table[0x31..], b"PRI10");
    flash.write(0, &[0x90]);
    assert_eq!([read(&mut flash, 0), read(&mut flash, 1)], [0x89, 0x18]);
    assert_eq!(read(&mut flash, 2), 0);
}

#[test]
fn reset_keeps_the_contents() {
    let (mut flash, _) = chip();
    for value in [0x10, 0x12, 0x70] {
        flash.write(5, &[value]);
    }
    flash.reset();
    assert_eq!(read(&mut flash, 5), 0x12);
}

#[test]
fn states_of_other_chips_are_refused() {
    let (mut flash, _) = chip();
    let good = flash.save();
    let block = vec![1; FLASH_BLOCK];
    let with = |changed| FlashState {
        changed,
        ..good.clone()
    };
    let buffer = FlashMode::Buffer {
        left: usize::MAX,
        bytes: vec![(0, 0)],
    };
    let rows = [
        with(vec![(3, block.clone())]),
        with(vec![(usize::MAX, block.clone())]),
        with(vec![(0, vec![1])]),
        FlashState {
            mode: buffer,
            ..good.clone()
        },
    ];
    for state in rows {
        assert_eq!(flash.restore(&state), Err(FlashError::State), "{state:?}");
    }
    assert_eq!(flash.save(), good);
    flash.restore(&with(vec![(2, block)])).unwrap();
    assert_eq!(
        (read(&mut flash, 0x1fff), read(&mut flash, 0x2000)),
        (0xff, 1)
    );
}

proptest! {
    #[test]
    fn any_accesses_leave_a_state_that_restores(
        accesses in prop::collection::vec((0_u64..0x3010, any::<bool>(), any::<[u8; 4]>(), 1_usize..=4), 0..200),
    ) {
        let (mut flash, _) = chip();
        for (offset, write, mut data, len) in accesses {
            // Commands are likely.
            const COMMANDS: [u8; 8] = [0x10, 0x20, 0xd0, 0xe8, 0x50, 0x70, 0x98, 3];
            if data[0] & 1 == 0 {
                data[0] = COMMANDS[usize::from(data[0] >> 5)];
            }
            if write {
                flash.write(offset, &data[..len]);
            } else {
                flash.read(offset, &mut data[..len]);
            }
        }
        let state = flash.save();
        let (mut other, _) = chip();
        other.restore(&state).unwrap();
        prop_assert_eq!(other.save(), state);
    }
}
