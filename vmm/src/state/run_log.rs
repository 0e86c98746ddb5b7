//! The saved run log of one vCPU of a deterministic machine.

use serde::{Deserialize, Serialize};

/// The saved run log of one vCPU. Every value is valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunLogState {
    /// The hash of all events so far, low half first.
    pub digest: [u64; 2],
    /// The state of the generator for RDRAND and RDSEED.
    pub random: u64,
    /// Retired instructions.
    pub retired: u64,
    /// Core cycles: retired instructions, and further iterations of repeated string instructions.
    pub cycles: u64,
    /// A hash of the taken branches, interrupts and exceptions: the target of each, and the number
    /// of instructions before it.
    pub path: u64,
}
