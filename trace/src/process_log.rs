//! The process log: what the guest's kernel ran, as lines of JSON in blocks of their own.
//!
//! Names are needed whatever part of the run is selected, so the log has every event from the start
//! of the run on.

use std::io;

use xxhash_rust::xxh3::xxh3_64;

use crate::block::{BlockInfo, HEADER_LEN, PROCESS_LOG};
use crate::encode::PackedBlock;
use crate::process::{ProcessEvent, ProcessRecord};

/// Maximum number of bytes of a whole log that are read.
pub(crate) const BYTES_MAX: u64 = 256 << 20;
/// Maximum number of bytes of one line.
const LINE_MAX: usize = 24 << 20;
/// Bytes at which a block is full.
const BLOCK_FULL: usize = 4 << 20;
/// Maximum number of bytes that are written of one run.
const WRITTEN_MAX: u64 = BYTES_MAX / 2;
/// Of these, the bytes that are reserved for the record of its end.
const END_MAX: u64 = 256;
/// Compression level: names repeat.
const LEVEL: i32 = 6;

/// Encodes the process log.
#[derive(Debug)]
pub(crate) struct ProcessLog {
    lines: Vec<u8>,
    records: u32,
    /// Bytes of the whole log so far, and at most.
    written: u64,
    max: u64,
    /// Events after the end of a log that is full.
    unlogged: u64,
}

/// The record of a file without its functions, so that its mappings do not have those of an older
/// file.
fn without_functions(record: &ProcessRecord) -> Option<ProcessRecord> {
    let ProcessEvent::File {
        path,
        build_id,
        segments,
        ..
    } = &record.event
    else {
        return None;
    };
    Some(ProcessRecord {
        event: ProcessEvent::File {
            path: path.clone(),
            build_id: build_id.clone(),
            functions: Vec::new(),
            segments: segments.clone(),
        },
        ..*record
    })
}

impl ProcessLog {
    /// An empty log.
    pub(crate) const fn new() -> Self {
        Self {
            lines: Vec::new(),
            records: 0,
            written: 0,
            max: WRITTEN_MAX,
            unlogged: 0,
        }
    }

    /// Events that the log does not have, because it was full.
    pub(crate) const fn unlogged(&self) -> u64 {
        self.unlogged
    }

    /// Adds a record; returns a block when it is full.
    pub(crate) fn add(&mut self, record: &ProcessRecord) -> io::Result<Option<PackedBlock>> {
        if self.unlogged != 0 {
            self.unlogged += 1;
            return Ok(None);
        }
        let mut line = serde_json::to_vec(record)?;
        if line.len() > LINE_MAX
            && let Some(short) = without_functions(record)
        {
            line = serde_json::to_vec(&short)?;
        }
        let total = self.written.saturating_add(line.len() as u64);
        if line.len() > LINE_MAX || total > self.max - END_MAX {
            tracing::warn!("the process log is full: the trace names no processes from here on");
            self.unlogged = 1;
            line = serde_json::to_vec(&ProcessRecord {
                event: ProcessEvent::Truncated {},
                ..*record
            })?;
        }
        self.written = self.written.saturating_add(line.len() as u64);
        self.lines.extend(line);
        self.lines.push(b'\n');
        self.records += 1;
        if self.lines.len() < BLOCK_FULL {
            return Ok(None);
        }
        self.take()
    }

    /// Takes the block and begins the next one; `None` if it has no records.
    pub(crate) fn take(&mut self) -> io::Result<Option<PackedBlock>> {
        if self.records == 0 {
            return Ok(None);
        }
        let packed = zstd::bulk::compress(&self.lines, LEVEL)?;
        let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let info = BlockInfo {
            cpu: PROCESS_LOG,
            records: self.records,
            raw_len: len(&self.lines),
            packed_len: len(&packed),
            hash: xxh3_64(&packed),
            ..BlockInfo::default()
        };
        self.lines.clear();
        self.records = 0;
        let mut bytes = Vec::with_capacity(HEADER_LEN + packed.len());
        bytes.extend(info.to_bytes());
        bytes.extend(packed);
        Ok(Some(PackedBlock {
            info,
            branches: 0,
            bytes,
        }))
    }
}

/// Adds the records of a block. Lines that are malformed, or of a kind that this program does not
/// know, are left out.
pub(crate) fn parse(raw: &[u8], records: &mut Vec<ProcessRecord>) {
    let lines = raw.split(|&byte| byte == b'\n');
    records.extend(lines.filter_map(|line| serde_json::from_slice(line).ok()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::LoggedFunction;

    fn record(at: u64, event: ProcessEvent) -> ProcessRecord {
        ProcessRecord {
            cpu: 0,
            at,
            ticks: at,
            event,
        }
    }

    fn exec(at: u64) -> ProcessRecord {
        let name = "x".repeat(100);
        record(at, ProcessEvent::Exec { tgid: 1, name })
    }

    #[test]
    fn full_log_ends_with_a_record_of_its_end() {
        let mut log = ProcessLog {
            max: 1000,
            ..ProcessLog::new()
        };
        for at in 0..20 {
            assert!(log.add(&exec(at)).unwrap().is_none());
        }
        assert!(log.written <= 1000);
        let mut records = Vec::new();
        parse(&log.lines, &mut records);
        let last = records.pop().unwrap();
        assert_eq!(last.event, ProcessEvent::Truncated {});
        assert_eq!(last.at, records.len() as u64);
        assert_eq!(log.unlogged(), 20 - last.at);
    }

    #[test]
    fn file_with_too_many_functions_is_logged_without_them() {
        let functions = vec![LoggedFunction(1, 2, "x".repeat(LINE_MAX))];
        let file = |functions| ProcessEvent::File {
            path: "/bin/a".to_owned(),
            build_id: "12".to_owned(),
            functions,
            segments: vec![(1, 2, 3)],
        };
        let mut log = ProcessLog::new();
        log.add(&record(1, file(functions))).unwrap();
        let mut records = Vec::new();
        parse(&log.lines, &mut records);
        assert_eq!(records, [record(1, file(Vec::new()))]);
        assert_eq!(log.unlogged(), 0);
    }
}
