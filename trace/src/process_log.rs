//! The process log: what the guest's kernel ran, as lines of JSON in blocks of their own.
//!
//! Names are needed whatever part of the run is selected, so the log has every event from the start
//! of the run on.

use std::io;

use xxhash_rust::xxh3::xxh3_64;

use crate::block::{BlockInfo, HEADER_LEN, PROCESS_LOG};
use crate::encode::PackedBlock;
use crate::process::ProcessRecord;

/// Maximum number of bytes of a whole log that are read.
pub(crate) const BYTES_MAX: u64 = 256 << 20;
/// Maximum number of bytes of one line; longer ones are left out.
const LINE_MAX: usize = 24 << 20;
/// Bytes at which a block is full.
const BLOCK_FULL: usize = 4 << 20;
/// Maximum number of bytes that are written of one run.
const WRITTEN_MAX: u64 = BYTES_MAX / 2;
/// Compression level: names repeat.
const LEVEL: i32 = 6;

/// Encodes the process log.
#[derive(Debug, Default)]
pub(crate) struct ProcessLog {
    lines: Vec<u8>,
    records: u32,
    /// Bytes of the whole log so far.
    written: u64,
}

impl ProcessLog {
    /// Adds a record; returns a block when it is full.
    pub(crate) fn add(&mut self, record: &ProcessRecord) -> io::Result<Option<PackedBlock>> {
        let line = serde_json::to_vec(record)?;
        let total = self.written.saturating_add(line.len() as u64);
        if line.len() > LINE_MAX || total > WRITTEN_MAX {
            return Ok(None);
        }
        self.written = total;
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
