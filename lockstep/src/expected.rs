//! What the interpreter leaves of many batches, as digests in a file.
//!
//! Made where the interpreter is fast, and compared where KVM is: in a lab, whose emulator would take
//! many times as long for the interpreter as for what it judges.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The digest of a batch at which the interpreter ended otherwise than by its end.
pub const NONE: u64 = 0;

/// Digests of batches.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Expected {
    seed: u64,
    /// By class, the first batches of the seed in order.
    classes: BTreeMap<String, Vec<u64>>,
}

impl Expected {
    /// None yet.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            classes: BTreeMap::new(),
        }
    }

    /// Adds a class.
    pub fn insert(&mut self, class: String, digests: Vec<u64>) {
        self.classes.insert(class, digests);
    }

    /// The digest of a batch, if it is known.
    pub fn digest(&self, seed: u64, class: &str, index: u64) -> Option<u64> {
        let list = self.classes.get(class).filter(|_| seed == self.seed)?;
        list.get(usize::try_from(index).ok()?).copied()
    }

    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read or does not hold digests.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
        serde_json::from_str(&text).with_context(|| format!("{name} holds no digests of lockstep"))
    }

    /// Writes a file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string(self)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}
