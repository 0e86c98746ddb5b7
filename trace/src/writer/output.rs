//! Writes the blocks of a trace to the file, all of them or the last ones.

use std::collections::VecDeque;
use std::io::{self, Write};

use xxhash_rust::xxh3::xxh3_64;

use crate::block::BlockInfo;
use crate::encode::PackedBlock;
use crate::header::TraceSummary;

/// The first word of the index.
pub(crate) const INDEX_MAGIC: u32 = u32::from_le_bytes(*b"HTIX");
/// The last bytes of a complete file.
pub(crate) const END_MAGIC: [u8; 8] = *b"HSTREND\x1a";

/// Writes blocks, or keeps the last ones.
pub(crate) struct BlockOutput {
    out: Box<dyn Write + Send>,
    /// Number of bytes written so far.
    offset: u64,
    blocks: Vec<BlockInfo>,
    summary: TraceSummary,
    /// With `--last`: the newest blocks, and the number of records that they must hold together.
    ring: Option<(VecDeque<PackedBlock>, u64)>,
}

impl BlockOutput {
    /// An output to `out`, which has `offset` bytes already.
    pub(crate) fn new(out: Box<dyn Write + Send>, offset: u64, last: Option<u64>) -> Self {
        Self {
            out,
            offset,
            blocks: Vec::new(),
            summary: TraceSummary::default(),
            ring: last.map(|last| (VecDeque::new(), last)),
        }
    }

    /// Adds a block, if there is one.
    pub(crate) fn put(&mut self, block: Option<PackedBlock>) -> io::Result<()> {
        let Some(block) = block else { return Ok(()) };
        self.summary.records += u64::from(block.info.records);
        self.summary.branches += u64::from(block.branches);
        let Some((ring, last)) = &mut self.ring else {
            return self.write(block);
        };
        ring.push_back(block);
        while let Some(first) = ring.front() {
            let records = u64::from(first.info.records);
            if self.summary.records - records < *last {
                break;
            }
            self.summary.records -= records;
            self.summary.branches -= u64::from(first.branches);
            self.summary.dropped += records;
            ring.pop_front();
        }
        Ok(())
    }

    /// Adds a block of the process log, which the ring does not drop.
    pub(crate) fn put_log(&mut self, block: Option<PackedBlock>) -> io::Result<()> {
        block.map_or(Ok(()), |block| self.append(&block))
    }

    fn write(&mut self, block: PackedBlock) -> io::Result<()> {
        let cpu = usize::try_from(block.info.cpu).unwrap_or(0);
        if self.summary.instructions.len() <= cpu {
            self.summary.instructions.resize(cpu + 1, 0);
        }
        self.summary.instructions[cpu] = block.info.last_at;
        self.append(&block)
    }

    fn append(&mut self, block: &PackedBlock) -> io::Result<()> {
        self.out.write_all(&block.bytes)?;
        self.blocks.push(BlockInfo {
            offset: self.offset,
            ..block.info
        });
        self.offset += block.bytes.len() as u64;
        Ok(())
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Writes the blocks of the ring, the index and the summary, which has the number of events
    /// that the process log lacks.
    pub(crate) fn finish(mut self, unlogged: u64) -> io::Result<TraceSummary> {
        self.summary.unlogged = unlogged;
        if let Some((ring, _)) = self.ring.take() {
            for block in ring {
                self.write(block)?;
            }
        }
        let index_offset = self.offset;
        let mut index = INDEX_MAGIC.to_le_bytes().to_vec();
        let count = u32::try_from(self.blocks.len()).unwrap_or(u32::MAX);
        index.extend(count.to_le_bytes());
        for block in &self.blocks {
            index.extend(block.offset.to_le_bytes());
            index.extend(block.to_bytes());
        }
        self.summary.bytes = index_offset;
        let summary = serde_json::to_vec(&self.summary)?;
        index.extend(
            u32::try_from(summary.len())
                .unwrap_or(u32::MAX)
                .to_le_bytes(),
        );
        index.extend(summary);
        index.extend(xxh3_64(&index).to_le_bytes());
        index.extend(index_offset.to_le_bytes());
        index.extend(END_MAGIC);
        self.out.write_all(&index)?;
        self.out.flush()?;
        self.summary.bytes = index_offset + index.len() as u64;
        Ok(self.summary)
    }
}
