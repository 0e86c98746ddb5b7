//! The saved event log of one vCPU of a deterministic machine.

use serde::{Deserialize, Serialize};

/// Saved state of a processor's log. Every value is possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunLogState {
    /// The hash of all events so far, low half first.
    pub digest: [u64; 2],
    /// The generator behind RDRAND and RDSEED.
    pub random: u64,
    /// Retired instructions.
    pub retired: u64,
    /// Core cycles: with each further iteration of repeated string instructions.
    pub cycles: u64,
    /// A hash of the taken branches, interrupts and exceptions: where each went, and after how many
    /// instructions.
    pub path: u64,
}
