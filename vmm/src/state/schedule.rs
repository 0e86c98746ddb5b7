//! The position of a deterministic machine in its round of turns.

use serde::{Deserialize, Serialize};

/// The position in the round of turns.
///
/// In a round, each vCPU has one turn of a fixed number of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// The vCPU whose turn it is.
    pub turn: usize,
    /// Instructions of the turn that are executed already.
    pub used: u64,
    /// No vCPU has executed an instruction in this round so far.
    pub idle: bool,
    /// Rounds before this one.
    pub round: u64,
    /// Entries of the input log that were delivered.
    pub inputs: u64,
}

impl Schedule {
    /// The beginning of the first round.
    pub const START: Self = Self {
        turn: 0,
        used: 0,
        idle: true,
        round: 0,
        inputs: 0,
    };
}
