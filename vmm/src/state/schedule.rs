//! Where a deterministic machine is in its round of turns.

use serde::{Deserialize, Serialize};

/// Where the round of turns is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Whose turn it is.
    pub turn: usize,
    /// Instructions of the turn that are over.
    pub used: u64,
    /// Nobody ran in this round so far.
    pub idle: bool,
    /// Rounds before this one.
    pub round: u64,
    /// Entries of the input log that came.
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
