//! What a process compared: counts, and the instructions that differ.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// An instruction whose results differ.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Mismatch {
    /// Seed of the batch, for a replay.
    pub seed: u64,
    /// Run of the batch; for system classes, the case in the batch.
    pub run: u64,
    /// The opcode, as the decoder names it.
    pub code: String,
    /// The instruction.
    pub text: String,
    /// The values that differ.
    #[serde(rename = "what")]
    pub difference: String,
}

/// Counts of compared instructions, and the mismatches among them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Instructions executed and compared.
    pub cases: u64,
    /// The same by opcode.
    pub codes: BTreeMap<String, u64>,
    /// The mismatches, one for each run that differs.
    pub mismatches: Vec<Mismatch>,
    /// Instructions that retired in translated code, those between the cases included.
    #[serde(default)]
    pub translated: u64,
    /// Instructions that retired in the interpreter or in translated code.
    #[serde(default)]
    pub retired: u64,
}
