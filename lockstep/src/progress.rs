//! Progress of long runs, kept in a file.

use crate::tally::{Mismatch, Tally};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Maximum number of mismatches of a class that the file keeps.
const MISMATCHES_MAX: usize = 200;

/// What all runs on one kind of machine have compared.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ProgressFile {
    /// The processor with which the interpreter was compared; written into the file by hand.
    #[serde(rename = "judge")]
    pub processor: String,
    /// By class.
    pub classes: BTreeMap<String, ClassProgress>,
}

/// What all runs have compared of a class.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ClassProgress {
    /// Instructions compared.
    pub cases: u64,
    /// Seeds, each with the number of batches done with it.
    pub seeds: BTreeMap<u64, u64>,
    /// Seconds of work, summed over all workers.
    pub seconds: f64,
    /// Opcodes that the class has on this host.
    pub opcodes: usize,
    /// Instructions compared, by opcode.
    pub codes: BTreeMap<String, u64>,
    /// How many runs differed.
    pub mismatched: u64,
    /// The first mismatches.
    pub mismatches: Vec<Mismatch>,
    /// Instructions that retired in translated code, those between the cases included.
    #[serde(default)]
    pub translated: u64,
    /// Instructions that retired in the interpreter or in translated code.
    #[serde(default)]
    pub retired: u64,
}

impl ProgressFile {
    /// Reads a file; an absent one is no progress.
    ///
    /// # Errors
    /// If it cannot be read or does not hold a progress.
    pub fn read(path: &Path) -> Result<Self> {
        match std::fs::read_to_string(path) {
            Ok(text) => serde_json::from_str(&text)
                .with_context(|| format!("{} is not a state file of lockstep", path.display())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let temporary = path.with_extension("new");
        let text = serde_json::to_string_pretty(self)?;
        std::fs::write(&temporary, text + "\n")
            .and_then(|()| std::fs::rename(&temporary, path))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// How many runs differed, of all classes.
    pub fn mismatched(&self) -> u64 {
        self.classes.values().map(|c| c.mismatched).sum()
    }
}

impl ClassProgress {
    /// Adds a tally.
    pub(crate) fn add(&mut self, tally: Tally) {
        self.cases += tally.cases;
        self.translated += tally.translated;
        self.retired += tally.retired;
        for (code, n) in tally.codes {
            *self.codes.entry(code).or_default() += n;
        }
        self.mismatched += tally.mismatches.len() as u64;
        let capacity = MISMATCHES_MAX.saturating_sub(self.mismatches.len());
        self.mismatches
            .extend(tally.mismatches.into_iter().take(capacity));
    }
}
