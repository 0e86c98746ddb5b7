//! What long runs have done so far, kept in a file.

use crate::judge::{Mismatch, Tally};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Most mismatches that are kept of a class.
const KEPT: usize = 200;

/// All runs on one kind of machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct State {
    /// The processor that judged.
    pub judge: String,
    /// By class.
    pub classes: BTreeMap<String, Record>,
}

/// What was done of a class.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Record {
    /// Instructions compared.
    pub cases: u64,
    /// Seeds, each with the number of batches done with it.
    pub seeds: BTreeMap<u64, u64>,
    /// Seconds of work, of all jobs together.
    pub seconds: f64,
    /// Opcodes that the class has on this host.
    pub opcodes: usize,
    /// Instructions compared, by opcode.
    pub codes: BTreeMap<String, u64>,
    /// How many runs differed.
    pub mismatched: u64,
    /// The first ones.
    pub mismatches: Vec<Mismatch>,
}

impl State {
    /// Reads a file; an absent one is an empty state.
    ///
    /// # Errors
    /// When it cannot be read or is not a state.
    pub fn read(path: &Path) -> Result<Self> {
        match std::fs::read_to_string(path) {
            Ok(text) => serde_json::from_str(&text)
                .with_context(|| format!("{} is not a state of lockstep", path.display())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let temporary = path.with_extension("new");
        let text = serde_json::to_string_pretty(self)?;
        std::fs::write(&temporary, text + "\n")
            .and_then(|()| std::fs::rename(&temporary, path))
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Record {
    /// Adds what was done.
    pub fn add(&mut self, tally: Tally) {
        self.cases += tally.cases;
        for (code, n) in tally.codes {
            *self.codes.entry(code).or_default() += n;
        }
        self.mismatched += tally.mismatches.len() as u64;
        let room = KEPT.saturating_sub(self.mismatches.len());
        self.mismatches
            .extend(tally.mismatches.into_iter().take(room));
    }
}
