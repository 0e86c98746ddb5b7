//! Finds the blocks of a trace.

use std::io::{Read, Seek, SeekFrom};

use xxhash_rust::xxh3::xxh3_64;

use crate::block::{BlockInfo, HEADER_LEN, PROCESS_LOG};
use crate::error::TraceError;
use crate::header::TraceSummary;
use crate::writer::{END_MAGIC, INDEX_MAGIC};

/// Maximum number of vCPUs that a trace may name.
const CPUS_MAX: u32 = 4096;

/// Whether a block has the number of a possible vCPU, or is of the process log.
const fn has_valid_cpu(block: &BlockInfo) -> bool {
    block.cpu < CPUS_MAX || block.cpu == PROCESS_LOG
}

/// A number at an offset of bytes that may be cut off.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Reads the index at the end of a complete file; `None` if it is not intact.
pub(super) fn read(
    input: &mut (impl Read + Seek),
    begin: u64,
    len: u64,
) -> Result<Option<(Vec<BlockInfo>, TraceSummary)>, TraceError> {
    let Some(trailer) = len.checked_sub(16).filter(|&trailer| trailer >= begin) else {
        return Ok(None);
    };
    let mut end = [0; 16];
    input.seek(SeekFrom::Start(trailer))?;
    input.read_exact(&mut end)?;
    let Some((offset, magic)) = end.split_first_chunk::<8>() else {
        return Ok(None);
    };
    let offset = u64::from_le_bytes(*offset);
    if magic != END_MAGIC || !(begin..trailer).contains(&offset) {
        return Ok(None);
    }
    input.seek(SeekFrom::Start(offset))?;
    let mut bytes = Vec::new();
    input.take(trailer - offset).read_to_end(&mut bytes)?;
    Ok(parse(&bytes, begin, offset))
}

/// The blocks and the summary of an index whose blocks are in this part of the file.
fn parse(bytes: &[u8], begin: u64, end: u64) -> Option<(Vec<BlockInfo>, TraceSummary)> {
    let (all, hash) = bytes.split_last_chunk::<8>()?;
    if xxh3_64(all).to_le_bytes() != *hash || number(all, 0)? != INDEX_MAGIC.to_le_bytes() {
        return None;
    }
    let count = usize::try_from(u32::from_le_bytes(number(all, 4)?)).ok()?;
    let mut blocks = Vec::new();
    for n in 0..count {
        let at = 8 + n.checked_mul(8 + HEADER_LEN)?;
        let offset = u64::from_le_bytes(number(all, at)?);
        let block = BlockInfo::from_bytes(&number(all, at + 8)?, offset).ok()?;
        if offset < begin || block.end() > end || !has_valid_cpu(&block) {
            return None;
        }
        blocks.push(block);
    }
    let at = 8 + count * (8 + HEADER_LEN);
    let len = usize::try_from(u32::from_le_bytes(number(all, at)?)).ok()?;
    let text = all.get(at + 4..)?.get(..len)?;
    Some((blocks, serde_json::from_slice(text).ok()?))
}

/// Finds blocks by their headers, up to the first one that is damaged or cut off. Returns them and
/// why the search ended.
pub(super) fn scan(
    input: &mut (impl Read + Seek),
    begin: u64,
    len: u64,
) -> Result<(Vec<BlockInfo>, String), TraceError> {
    let mut blocks = Vec::new();
    let mut offset = begin;
    let problem = loop {
        if offset >= len {
            break "the run did not end properly".to_owned();
        }
        let mut bytes = [0; HEADER_LEN];
        if len - offset < HEADER_LEN as u64 {
            break format!("it is cut off at {offset:#x}");
        }
        input.seek(SeekFrom::Start(offset))?;
        input.read_exact(&mut bytes)?;
        let block = match BlockInfo::from_bytes(&bytes, offset) {
            Ok(block) if has_valid_cpu(&block) => block,
            Ok(_) => break format!("the block at {offset:#x} names an impossible vCPU"),
            Err(_) if bytes.starts_with(&INDEX_MAGIC.to_le_bytes()) => {
                break "its index is damaged".to_owned();
            }
            Err(problem) => break format!("the block at {offset:#x} is damaged: {problem}"),
        };
        if block.end() > len {
            break format!("the block at {offset:#x} is cut off");
        }
        offset = block.end();
        blocks.push(block);
    };
    Ok((blocks, problem))
}
