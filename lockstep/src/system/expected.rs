//! Digests of the interpreter's results, in a file.
//!
//! The file is made on a machine where the interpreter is fast, and compared on one that has KVM:
//! in a lab, whose emulator runs the interpreter many times slower than KVM.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The digest of a batch that the interpreter could not run to its end.
pub(super) const NO_DIGEST: u64 = 0;

/// Digests of the results of batches.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ExpectedDigests {
    seed: u64,
    /// By class: the first batches of the seed, in order.
    classes: BTreeMap<String, Vec<u64>>,
}

impl ExpectedDigests {
    /// No digests, for batches of this seed.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            seed,
            classes: BTreeMap::new(),
        }
    }

    /// Adds a class.
    pub(super) fn insert(&mut self, class: String, digests: Vec<u64>) {
        self.classes.insert(class, digests);
    }

    /// The digest of a batch, if it is known.
    pub(super) fn digest(&self, seed: u64, class: &str, index: u64) -> Option<u64> {
        let list = self.classes.get(class).filter(|_| seed == self.seed)?;
        list.get(usize::try_from(index).ok()?).copied()
    }

    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read or does not hold digests.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{name} is not a file of `lockstep --expect`"))
    }

    /// Writes a file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string(self)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}
