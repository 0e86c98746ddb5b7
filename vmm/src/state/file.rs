//! Snapshots in files.
//!
//! A file is [`MAGIC`], then one Zstandard frame with a checksum: the length of the state, the state
//! as JSON without memory, and the pages of memory that are not zero, each after its address.
//! Numbers have eight bytes, the lowest first. The bytes are untrusted.

use std::io::{self, BufReader, BufWriter, Read, Write};

use thiserror::Error;

use super::{PAGE, Pages, Snapshot};

/// The first bytes of a file, with the version of its format.
const MAGIC: &[u8; 8] = b"hindsnp1";
/// The longest state of a file, in bytes.
const STATE_MAX: u64 = 256 << 20;

/// Why a snapshot cannot be written or read.
#[derive(Debug, Error)]
pub enum SnapshotFileError {
    /// The file cannot be written or read, or its bytes are damaged.
    #[error("the snapshot cannot be written or read")]
    Io(#[from] io::Error),
    /// It is another file.
    #[error("the file is no snapshot of this version of hindsight")]
    Magic,
    /// The state is no state of a machine.
    #[error("the state in the snapshot is damaged")]
    State(#[from] serde_json::Error),
    /// The state is longer than that of a file may be: what the guest wrote to disks is in it.
    #[error(
        "the snapshot has {} MiB of state; a file has at most {} MiB, with what the guest wrote to its disks",
        .0 >> 20,
        STATE_MAX >> 20
    )]
    Size(u64),
    /// The pages are not those of a memory.
    #[error("the memory in the snapshot is damaged: {0}")]
    Memory(String),
}

fn read_number(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

impl Snapshot {
    /// Writes the snapshot.
    ///
    /// # Errors
    ///
    /// `out` fails, or the state is too long; then nothing is written.
    pub fn write(&self, mut out: impl Write) -> Result<(), SnapshotFileError> {
        let state = serde_json::to_vec(&Self {
            memory: Pages::default(),
            ..self.clone()
        })?;
        if state.len() as u64 > STATE_MAX {
            return Err(SnapshotFileError::Size(state.len() as u64));
        }
        out.write_all(MAGIC)?;
        let mut frame = zstd::Encoder::new(BufWriter::new(out), 1)?;
        frame.include_checksum(true)?;
        frame.write_all(&(state.len() as u64).to_le_bytes())?;
        frame.write_all(&state)?;
        frame.write_all(&(self.memory.iter().count() as u64).to_le_bytes())?;
        for (gpa, page) in self.memory.iter() {
            frame.write_all(&gpa.to_le_bytes())?;
            frame.write_all(page)?;
        }
        frame.finish()?.flush()?;
        Ok(())
    }

    /// Reads a snapshot of a machine with at most `memory_max` bytes of memory.
    ///
    /// Restoring it checks what is in it.
    ///
    /// # Errors
    ///
    /// `from` fails, or is no snapshot.
    pub fn read(mut from: impl Read, memory_max: u64) -> Result<Self, SnapshotFileError> {
        let mut magic = [0; MAGIC.len()];
        from.read_exact(&mut magic)
            .map_err(|_| SnapshotFileError::Magic)?;
        if &magic != MAGIC {
            return Err(SnapshotFileError::Magic);
        }
        let mut frame = BufReader::new(zstd::Decoder::new(from)?);
        let len = read_number(&mut frame)?;
        if len > STATE_MAX {
            return Err(SnapshotFileError::Size(len));
        }
        let mut state = Vec::new();
        frame.by_ref().take(len).read_to_end(&mut state)?;
        let mut snapshot: Self = serde_json::from_slice(&state)?;
        let pages = read_number(&mut frame)?;
        if pages > memory_max / PAGE as u64 {
            return Err(SnapshotFileError::Memory(format!(
                "{pages} pages are more than this machine has"
            )));
        }
        for _ in 0..pages {
            let gpa = read_number(&mut frame)?;
            let mut page = [0; PAGE];
            frame.read_exact(&mut page)?;
            let added = snapshot.memory.add(gpa, page);
            added.map_err(SnapshotFileError::Memory)?;
        }
        // The end of the frame, where its checksum is compared.
        if io::copy(&mut frame.take(1), &mut io::sink())? != 0 {
            return Err(SnapshotFileError::Memory(
                "it has more pages than its number of pages".to_owned(),
            ));
        }
        Ok(snapshot)
    }
}
