//! Traces as they are written and read back, whole and damaged.

use std::io::{self, Cursor, Write};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use hindsight_cpu::branch::{Branch, BranchClass};
use proptest::prelude::*;

use super::*;
use crate::event::{BranchEvent, DeviceAccess};
use crate::header::TraceSummary;
use crate::reader::TraceReader;
use crate::select::Window;

/// A file in memory that becomes full after `limit` bytes.
#[derive(Clone)]
pub(super) struct SharedFile {
    bytes: Arc<Mutex<Vec<u8>>>,
    limit: usize,
}

impl SharedFile {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            bytes: Arc::default(),
            limit,
        }
    }

    pub(super) fn take(&self) -> Vec<u8> {
        std::mem::take(&mut self.bytes.lock().unwrap())
    }
}

impl Write for SharedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut file = self.bytes.lock().unwrap();
        if file.len() + bytes.len() > self.limit {
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn branch(n: u64, at: u64) -> Branch {
    let class = BranchClass::ALL[usize::try_from(n % 13).unwrap()];
    Branch {
        from: 0xffff_ffff_8100_0000 + n % 97 * 16,
        to: 0x40_0000 + n % 89 * 32,
        at: u32::try_from(at & 0xffff_ffff).unwrap(),
        class,
        cpl: u8::try_from(n % 4).unwrap(),
        to_cpl: u8::try_from(n / 4 % 4).unwrap(),
        mispredicted: n % 31 == 7,
    }
}

const ALL: Selection = Selection {
    kinds: EventKinds::all(),
    cpls: 0xf,
    ranges: Vec::new(),
    processes: Vec::new(),
    window: Window {
        from: None,
        until: None,
        after: 0,
        length: None,
    },
};

pub(super) fn options(selection: Selection, last: Option<u64>) -> WriterOptions {
    WriterOptions {
        selection,
        last,
        flush_often: false,
        when_over: None,
        begin: None,
    }
}

pub(super) fn header(cpus: u32) -> TraceHeader {
    TraceHeader {
        cpus,
        ..TraceHeader::default()
    }
}

/// The bytes of a trace with `count` branches and some events on each of two vCPUs.
fn sample(count: u64, last: Option<u64>) -> (Vec<u8>, TraceSummary) {
    let file = SharedFile::new(usize::MAX);
    let writer =
        TraceWriter::start(Box::new(file.clone()), &header(2), options(ALL, last)).unwrap();
    for cpu in 0..2 {
        let mut tracer = writer.tracer(cpu);
        let mut at = 0xffff_0000;
        for batch in 0..count / 10 {
            let branches: Vec<_> = (0..10)
                .map(|n| {
                    at += 7 + n % 3;
                    branch(batch * 10 + n, at)
                })
                .collect();
            tracer.branches(0, &branches, at + 2, at + 2 + batch / 50 * 1000);
            tracer.event(
                at + 3,
                at + 3 + batch / 50 * 1000,
                events()[(batch % 13) as usize],
            );
            at += 20;
        }
    }
    let summary = writer.finish().unwrap();
    (file.take(), summary)
}

fn events() -> [Event; 13] {
    let (index, value) = (0xc000_0080, u64::MAX);
    let device = |port, write| {
        Event::Device(DeviceAccess {
            port,
            write,
            address: if port { 0x3f8 } else { 0xfee0_00b0 },
            size: 4,
            value: 0x41,
        })
    };
    [
        Event::Delivery {
            vector: 14,
            error_code: Some(6),
            address: Some(0x1000),
        },
        Event::Delivery {
            vector: 32,
            error_code: None,
            address: None,
        },
        Event::MsrRead {
            index,
            value: Some(value),
        },
        Event::MsrRead { index, value: None },
        Event::MsrWrite {
            index,
            value: 3,
            accepted: true,
        },
        Event::MsrWrite {
            index,
            value: 3,
            accepted: false,
        },
        device(true, false),
        device(true, true),
        device(false, false),
        device(false, true),
        Event::ControlRegister {
            number: 3,
            value: 0x1000,
        },
        Event::Access {
            address: 0x7fff_0000,
            size: 8,
            store: true,
        },
        Event::Halt,
    ]
}

#[test]
fn records_are_read_as_they_were_traced() {
    let (bytes, summary) = sample(50_000, None);
    let mut reader = TraceReader::new(Cursor::new(bytes)).unwrap();
    assert_eq!(reader.damage(), None);
    assert_eq!(
        reader.summary().map(|own| own.records),
        Some(summary.records)
    );
    assert_eq!(summary.branches, 100_000);
    let records: Vec<_> = reader.records().collect::<Result<_, _>>().unwrap();
    assert_eq!(records.len() as u64, summary.records);
    assert!(records.is_sorted_by_key(|record| record.ticks));
    for cpu in 0..2 {
        let own: Vec<_> = records.iter().filter(|record| record.cpu == cpu).collect();
        assert!(own.is_sorted_by_key(|record| record.at));
        let branches = own.iter().filter_map(|record| match record.event {
            Event::Branch(branch) => Some(branch),
            _ => None,
        });
        let expected = (0..50_000).map(|n| {
            let b = branch(n, 0);
            BranchEvent {
                from: b.from,
                to: b.to,
                class: b.class,
                cpl: b.cpl,
                to_cpl: b.to_cpl,
                mispredicted: b.mispredicted,
            }
        });
        assert!(branches.eq(expected));
        let others = own
            .iter()
            .filter(|record| !matches!(record.event, Event::Branch(_) | Event::Time { .. }));
        let expected = (0..5000).map(|batch| events()[batch % 13]);
        assert!(others.map(|record| record.event).eq(expected));
    }
}

#[test]
fn range_of_instructions_has_only_its_records() {
    let (bytes, _) = sample(9000, None);
    let mut reader = TraceReader::new(Cursor::new(bytes)).unwrap();
    let range = 0x1_0000_0000..=0x1_0000_0100;
    let all: Vec<_> = reader.records().flatten().collect();
    let part: Vec<_> = reader.records_within(range.clone()).flatten().collect();
    assert!(
        part.iter()
            .eq(all.iter().filter(|record| range.contains(&record.at)))
    );
    assert!(!part.is_empty());
    assert!(reader.into_records().flatten().eq(all), "all, by value");
}

#[test]
fn last_records_are_kept_and_the_others_counted() {
    let (bytes, summary) = sample(100_000, Some(20_000));
    let (_, all) = sample(100_000, None);
    assert!((20_000..30_000).contains(&summary.records), "{summary:?}");
    assert_eq!(summary.records + summary.dropped, all.records);
    let mut reader = TraceReader::new(Cursor::new(bytes)).unwrap();
    let records: Vec<_> = reader.records().collect::<Result<_, _>>().unwrap();
    assert_eq!(records.len() as u64, summary.records);
}

#[test]
fn cut_file_has_all_blocks_before_the_cut() {
    let (bytes, _) = sample(20_000, Some(u64::MAX >> 8));
    let whole = TraceReader::new(Cursor::new(bytes.clone())).unwrap();
    let blocks = whole.blocks().to_vec();
    assert_eq!(blocks.len(), 2);
    let cut = usize::try_from(blocks[1].offset).unwrap() + 100;
    let mut reader = TraceReader::new(Cursor::new(bytes[..cut].to_vec())).unwrap();
    assert!(
        reader.damage().unwrap().contains("is cut off"),
        "{:?}",
        reader.damage()
    );
    assert_eq!(reader.blocks(), &blocks[..1]);
    assert_eq!(
        reader.records().flatten().count(),
        blocks[0].records as usize
    );
    let mut reader = TraceReader::new(Cursor::new(bytes[..bytes.len() - 1].to_vec())).unwrap();
    assert_eq!(reader.damage(), Some("its index is damaged"));
    assert_eq!(reader.records().filter(Result::is_err).count(), 0);
}

#[test]
fn full_disk_ends_the_trace_and_not_the_run() {
    let file = SharedFile::new(4096);
    let writer =
        TraceWriter::start(Box::new(file.clone()), &header(1), options(ALL, None)).unwrap();
    let mut tracer = writer.tracer(0);
    let mut at = 0;
    for n in 0..40_u64 {
        let batch: Vec<_> = (0..8192)
            .map(|k| {
                at += 3;
                branch(n.wrapping_mul(k * k), at)
            })
            .collect();
        tracer.branches(0, &batch, at, at);
    }
    std::thread::sleep(Duration::from_millis(100));
    drop(tracer);
    assert!(writer.finish().is_err());
}

#[test]
fn end_of_the_window_is_reported_once_and_stops_reports() {
    let file = SharedFile::new(usize::MAX);
    let (over, is_over) = mpsc::channel();
    let window = Window {
        length: Some(100),
        ..Window::default()
    };
    let options = WriterOptions {
        selection: Selection { window, ..ALL },
        last: None,
        flush_often: true,
        when_over: Some(Box::new(move || over.send(()).unwrap())),
        begin: None,
    };
    let writer = TraceWriter::start(Box::new(file.clone()), &header(1), options).unwrap();
    let mut tracer = writer.tracer(0);
    let batch: Vec<_> = (1..=8192).map(|n| branch(n, n)).collect();
    tracer.branches(0, &batch, 8192, 8192);
    is_over.recv_timeout(Duration::from_secs(10)).unwrap();
    while !tracer.kinds().is_empty() {
        std::thread::yield_now();
    }
    drop(tracer);
    assert_eq!(writer.finish().unwrap().branches, 100);
}

#[test]
fn segment_bases_make_addresses_linear() {
    let file = SharedFile::new(usize::MAX);
    let writer =
        TraceWriter::start(Box::new(file.clone()), &header(1), options(ALL, None)).unwrap();
    let mut tracer = writer.tracer(0);
    tracer.restart(0x7000);
    let step = |from, to, class| Branch {
        from,
        to,
        class,
        ..branch(0, 1)
    };
    tracer.branches(0x7000, &[step(0x12, 0x20, BranchClass::DirectJump)], 1, 1);
    tracer.branches(0, &[step(0x22, 0x5000, BranchClass::Far)], 1, 1);
    drop(tracer);
    writer.finish().unwrap();
    let mut reader = TraceReader::new(Cursor::new(file.take())).unwrap();
    let ends = reader
        .records()
        .flatten()
        .filter_map(|record| match record.event {
            Event::Branch(branch) => Some((branch.from, branch.to)),
            _ => None,
        });
    assert_eq!(
        ends.collect::<Vec<_>>(),
        [(0x7012, 0x7020), (0x7022, 0x5000)]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn damaged_file_is_read_without_panic_up_to_the_damage(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1_u8..), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let (mut bytes, summary) = sample(500, None);
        for (at, bits) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= bits;
        }
        bytes.truncate(cut.index(bytes.len()) + 1);
        if let Ok(mut reader) = TraceReader::new(Cursor::new(bytes)) {
            prop_assert!(reader.records().flatten().count() as u64 <= summary.records);
        }
    }

    #[test]
    fn block_of_any_bytes_is_decoded_without_panic(
        raw in prop::collection::vec(any::<u8>(), 0..2000),
        records in 0..5000_u32,
    ) {
        use crate::block::BlockInfo;
        let info = BlockInfo { records, ..BlockInfo::default() };
        let mut decoder = crate::decode::BlockDecoder::new(&info, raw);
        let mut decoded = 0;
        while let Ok(Some(_)) = decoder.next() {
            decoded += 1;
        }
        prop_assert!(decoded <= records);
    }
}
