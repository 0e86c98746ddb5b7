//! The header of a trace file: what was run, and how it was traced.

use std::fmt;
use std::io::{Read, Write};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::TraceError;

/// The first bytes of a trace file.
const MAGIC: [u8; 8] = *b"HSTRACE\x1a";
/// The version of the format that this program writes, and the newest that it reads.
pub const VERSION: u32 = 2;
/// The longest description that is read, in bytes.
const DESCRIPTION_MAX: u32 = 1 << 20;

/// An image of code that the guest runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TracedImage {
    /// Path on the host.
    pub path: String,
    /// Size of the file in bytes.
    pub size: u64,
    /// XXH3 of the file, in hexadecimal: an image that differs has other symbols.
    pub hash: String,
}

/// The description at the beginning of a trace file. Readers ignore fields that they do not know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TraceHeader {
    /// The program that wrote the file, with its version.
    pub writer: String,
    /// The guest image.
    pub image: TracedImage,
    /// Number of vCPUs.
    pub cpus: u32,
    /// CPU profile that the guest sees.
    pub cpu: String,
    /// Frequency of the clock's ticks, in Hz.
    pub tsc_hz: u64,
    /// The seed of a deterministic run.
    pub seed: Option<u64>,
    /// RIP at which vCPU 0 starts, a linear address.
    pub start: u64,
    /// Names of the event kinds that the trace has.
    pub events: Vec<String>,
    /// What limits the trace to a part of the run, as options of the command line.
    pub selection: String,
}

/// The summary at the end of a complete trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TraceSummary {
    /// Records in the file.
    pub records: u64,
    /// Of these, branches.
    pub branches: u64,
    /// Retired instructions of each vCPU at its last event.
    pub instructions: Vec<u64>,
    /// Records that `--last` dropped at the beginning.
    pub dropped: u64,
    /// Events of the guest's kernel that the process log does not have.
    pub unlogged: u64,
    /// Bytes of the file.
    pub bytes: u64,
}

impl fmt::Display for TraceSummary {
    /// Writes the numbers of records, branches and bytes, and what the file lacks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            records,
            branches,
            bytes,
            dropped,
            unlogged,
            ..
        } = self;
        write!(f, "{records} records, {branches} branches, {bytes} bytes")?;
        if *branches != 0 {
            let each = *bytes as f64 / *branches as f64;
            write!(f, " ({each:.2} a branch)")?;
        }
        if *dropped != 0 {
            write!(f, "; {dropped} earlier records were dropped")?;
        }
        if *unlogged != 0 {
            write!(f, "; the process log was full and lacks {unlogged} events")?;
        }
        Ok(())
    }
}

/// Writes magic, version and description; returns the bytes written.
pub(crate) fn write(header: &TraceHeader, out: &mut dyn Write) -> Result<u64, TraceError> {
    let text = serde_json::to_vec(header).map_err(TraceError::Description)?;
    let len = u32::try_from(text.len())
        .ok()
        .filter(|&len| len <= DESCRIPTION_MAX);
    let len = len.ok_or(TraceError::Header("it is too long"))?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(len.to_le_bytes());
    bytes.extend(text);
    bytes.extend(xxh3_64(&bytes).to_le_bytes());
    out.write_all(&bytes)?;
    Ok(bytes.len() as u64)
}

/// Reads what [`write`] wrote; returns the description, and the length of the whole header in
/// bytes.
pub(crate) fn read(input: &mut dyn Read) -> Result<(TraceHeader, u64), TraceError> {
    let mut start = [0; 16];
    input
        .read_exact(&mut start)
        .map_err(|_| TraceError::Magic)?;
    let word =
        |at: usize| u32::from_le_bytes([start[at], start[at + 1], start[at + 2], start[at + 3]]);
    if start[..8] != MAGIC {
        return Err(TraceError::Magic);
    }
    let (version, len) = (word(8), word(12));
    if version > VERSION {
        return Err(TraceError::Version {
            found: version,
            supported: VERSION,
        });
    }
    if version == 0 || len > DESCRIPTION_MAX {
        return Err(TraceError::Header("its length or version is impossible"));
    }
    let mut bytes = start.to_vec();
    input.take(u64::from(len) + 8).read_to_end(&mut bytes)?;
    let Some((all, hash)) = bytes.split_last_chunk::<8>() else {
        return Err(TraceError::Header("it is cut off"));
    };
    if all.len() != 16 + len as usize || xxh3_64(all).to_le_bytes() != *hash {
        return Err(TraceError::Header(
            "it is cut off, or its checksum is wrong",
        ));
    }
    let header = serde_json::from_slice(&all[16..]).map_err(TraceError::Description)?;
    Ok((header, bytes.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes() -> Vec<u8> {
        let mut bytes = Vec::new();
        let header = TraceHeader {
            cpus: 2,
            cpu: "portable-v1".to_owned(),
            ..TraceHeader::default()
        };
        assert_eq!(write(&header, &mut bytes).unwrap(), bytes.len() as u64);
        bytes
    }

    #[test]
    fn header_is_read_as_it_was_written() {
        let bytes = bytes();
        let (header, len) = read(&mut bytes.as_slice()).unwrap();
        assert_eq!(
            (header.cpus, header.cpu.as_str(), len),
            (2, "portable-v1", bytes.len() as u64)
        );
    }

    #[test]
    fn damaged_header_is_refused_with_its_reason() {
        let error = |bytes: &[u8]| read(&mut &*bytes).unwrap_err().to_string();
        let good = bytes();
        assert_eq!(
            error(b"\x7fELF............"),
            "not a trace file of hindsight"
        );
        assert_eq!(error(&good[..7]), "not a trace file of hindsight");
        assert!(error(&good[..good.len() - 1]).contains("cut off"));
        let mut flipped = good.clone();
        flipped[20] ^= 1;
        assert!(error(&flipped).contains("checksum"));
        let mut newer = good.clone();
        newer[8] = 9;
        assert!(error(&newer).contains("format 9 is newer"));
        let mut long = good;
        long[15] = 0xff;
        assert!(error(&long).contains("impossible"));
    }
}
