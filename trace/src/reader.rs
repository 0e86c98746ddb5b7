//! Reads trace files: complete ones by their index, others by their blocks. The bytes are untrusted.

mod index;

use std::collections::VecDeque;
use std::io::{Read, Seek, SeekFrom};
use std::ops::RangeInclusive;

use xxhash_rust::xxh3::xxh3_64;

use crate::block::{BlockInfo, HEADER_LEN, PROCESS_LOG};
use crate::decode::BlockDecoder;
use crate::error::TraceError;
use crate::event::{Event, Record};
use crate::header::{self, TraceHeader, TraceSummary};
use crate::process::ProcessRecord;
use crate::process_log;

/// A trace file that is open for reading.
#[derive(Debug)]
pub struct TraceReader<R> {
    input: R,
    header: TraceHeader,
    blocks: Vec<BlockInfo>,
    summary: Option<TraceSummary>,
    damage: Option<String>,
}

impl<R: Read + Seek> TraceReader<R> {
    /// Reads the header and the index. Without an intact index, reads the headers of all blocks, up to
    /// the first one that is damaged or cut off: see [`TraceReader::damage`].
    ///
    /// # Errors
    ///
    /// When the file cannot be read, is no trace, or is of a newer format.
    pub fn new(mut input: R) -> Result<Self, TraceError> {
        let (header, begin) = header::read(&mut input)?;
        let len = input.seek(SeekFrom::End(0))?;
        let (blocks, summary, damage) = match index::read(&mut input, begin, len)? {
            Some((blocks, summary)) => (blocks, Some(summary), None),
            None => {
                let (blocks, problem) = index::scan(&mut input, begin, len)?;
                (blocks, None, Some(problem))
            }
        };
        Ok(Self {
            input,
            header,
            blocks,
            summary,
            damage,
        })
    }

    /// What was run, and how it was traced.
    pub const fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// The summary at the end of the file; `None` if the end is missing.
    pub const fn summary(&self) -> Option<&TraceSummary> {
        self.summary.as_ref()
    }

    /// Why the trace is not complete, in one line.
    pub fn damage(&self) -> Option<&str> {
        self.damage.as_deref()
    }

    /// The blocks, in the order of the file.
    pub fn blocks(&self) -> &[BlockInfo] {
        &self.blocks
    }

    /// All records, ordered by the machine's clock.
    pub fn records(&mut self) -> Records<'_, R> {
        self.records_within(0..=u64::MAX)
    }

    /// The records at these counts of retired instructions, ordered by the machine's clock.
    pub fn records_within(&mut self, range: RangeInclusive<u64>) -> Records<'_, R> {
        let streams = self.streams(&range);
        Records {
            reader: self,
            streams,
            range,
        }
    }

    /// All records, ordered by the machine's clock, in an iterator that owns the reader.
    pub fn into_records(self) -> IntoRecords<R> {
        let range = 0..=u64::MAX;
        IntoRecords {
            streams: self.streams(&range),
            reader: self,
            range,
        }
    }

    /// The blocks with records at these counts of retired instructions, by vCPU.
    fn streams(&self, range: &RangeInclusive<u64>) -> Vec<BlockStream> {
        let mut streams: Vec<BlockStream> = Vec::new();
        let in_range = |block: &&BlockInfo| {
            let overlaps = block.last_at >= *range.start() && block.first_at <= *range.end();
            overlaps && block.cpu != PROCESS_LOG
        };
        for block in self.blocks.iter().filter(in_range) {
            let index = streams.iter().position(|stream| stream.cpu == block.cpu);
            let index = index.unwrap_or_else(|| {
                streams.push(BlockStream {
                    cpu: block.cpu,
                    ..BlockStream::default()
                });
                streams.len() - 1
            });
            streams[index].blocks.push_back(*block);
        }
        streams
    }

    /// What the guest's kernel ran in the whole run, in the order of the machine's clock.
    /// `skipped` is called for each block that is damaged.
    pub fn processes(&mut self, skipped: &mut dyn FnMut(&TraceError)) -> Vec<ProcessRecord> {
        let blocks = self.blocks.iter().filter(|block| block.cpu == PROCESS_LOG);
        let blocks: Vec<_> = blocks.copied().collect();
        let mut records = Vec::new();
        let mut budget = process_log::BYTES_MAX;
        for block in blocks {
            let Some(left) = budget.checked_sub(block.raw_len.into()) else {
                break;
            };
            budget = left;
            match self.unpack(&block) {
                Ok(raw) => process_log::parse(&raw, &mut records),
                Err(error) => skipped(&error),
            }
        }
        records.sort_by_key(|record: &ProcessRecord| record.ticks);
        records
    }

    /// Reads and unpacks a block.
    fn unpack(&mut self, info: &BlockInfo) -> Result<Vec<u8>, TraceError> {
        let damaged = |problem| TraceError::Block {
            offset: info.offset,
            problem,
        };
        self.input
            .seek(SeekFrom::Start(info.offset + HEADER_LEN as u64))?;
        let mut packed = Vec::new();
        let len = u64::from(info.packed_len);
        self.input.by_ref().take(len).read_to_end(&mut packed)?;
        if packed.len() as u64 != len {
            return Err(damaged("it is cut off"));
        }
        if xxh3_64(&packed) != info.hash {
            return Err(damaged("its checksum is wrong"));
        }
        let mut raw = Vec::new();
        let decoder = zstd::stream::read::Decoder::new(packed.as_slice());
        let decoder = decoder.map_err(|_| damaged("it cannot be unpacked"))?;
        let read = decoder
            .take(u64::from(info.raw_len) + 1)
            .read_to_end(&mut raw);
        if read.is_err() || raw.len() as u64 != u64::from(info.raw_len) {
            return Err(damaged("it cannot be unpacked to the size that it claims"));
        }
        Ok(raw)
    }
}

/// The blocks of one vCPU.
#[derive(Debug, Default)]
struct BlockStream {
    cpu: u32,
    blocks: VecDeque<BlockInfo>,
    decoder: Option<(u64, BlockDecoder)>,
    /// The last switch of tasks, which every block repeats.
    task: Option<Event>,
    /// That switch was before the range, and has not been returned.
    owes_task: bool,
    /// The record after the switch that is returned in its stead.
    held: Option<Record>,
    /// The next record, or the error in its block.
    next: Option<Result<Record, TraceError>>,
}

impl BlockStream {
    /// Decodes the next record, if there is one.
    fn fill<R: Read + Seek>(&mut self, reader: &mut TraceReader<R>, range: &RangeInclusive<u64>) {
        self.next = self.next.take().or_else(|| self.held.take().map(Ok));
        while self.next.is_none() {
            let Some((offset, decoder)) = &mut self.decoder else {
                let Some(info) = self.blocks.pop_front() else {
                    return;
                };
                match reader.unpack(&info) {
                    Ok(raw) => {
                        self.decoder = Some((info.offset, BlockDecoder::new(&info, raw)));
                    }
                    Err(error) => self.next = Some(Err(error)),
                }
                continue;
            };
            match decoder.next() {
                Ok(Some(record)) => self.take(record, range.contains(&record.at)),
                Ok(None) => self.decoder = None,
                Err(problem) => {
                    let offset = *offset;
                    self.decoder = None;
                    self.next = Some(Err(TraceError::Block { offset, problem }));
                }
            }
        }
    }

    /// Takes a record of a block. The first one in the range comes after the switch to its task.
    fn take(&mut self, record: Record, in_range: bool) {
        if let Event::Task(_) = record.event {
            let is_repeated = self.task == Some(record.event);
            self.task = Some(record.event);
            if is_repeated && !self.owes_task {
                return;
            }
            self.owes_task = !in_range;
        }
        if !in_range {
            return;
        }
        match self.task.filter(|_| std::mem::take(&mut self.owes_task)) {
            Some(event) => {
                self.next = Some(Ok(Record { event, ..record }));
                self.held = Some(record);
            }
            None => self.next = Some(Ok(record)),
        }
    }

    /// The order in which streams are merged: errors first, then by the clock.
    fn key(&self) -> Option<u64> {
        match self.next.as_ref()? {
            Ok(record) => Some(record.ticks),
            Err(_) => Some(0),
        }
    }
}

/// Iterates over the records of a trace. After an error it continues with the next block.
#[derive(Debug)]
pub struct Records<'a, R> {
    reader: &'a mut TraceReader<R>,
    streams: Vec<BlockStream>,
    range: RangeInclusive<u64>,
}

impl<R: Read + Seek> Iterator for Records<'_, R> {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        next_record(self.reader, &mut self.streams, &self.range)
    }
}

/// Iterates over all records of a trace and owns its reader. After an error it continues with the
/// next block.
#[derive(Debug)]
pub struct IntoRecords<R> {
    reader: TraceReader<R>,
    streams: Vec<BlockStream>,
    range: RangeInclusive<u64>,
}

impl<R: Read + Seek> Iterator for IntoRecords<R> {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        next_record(&mut self.reader, &mut self.streams, &self.range)
    }
}

/// The next record of all streams, by the machine's clock.
fn next_record<R: Read + Seek>(
    reader: &mut TraceReader<R>,
    streams: &mut [BlockStream],
    range: &RangeInclusive<u64>,
) -> Option<Result<Record, TraceError>> {
    for stream in &mut *streams {
        stream.fill(reader, range);
    }
    let pending = streams.iter_mut().filter(|stream| stream.next.is_some());
    pending.min_by_key(|stream| stream.key())?.next.take()
}
