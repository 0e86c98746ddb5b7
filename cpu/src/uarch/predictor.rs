//! A branch predictor: which branches a processor would have taken for granted wrongly.
//!
//! Directions by gshare: two-bit counters, found by the branch's address and the last directions.
//! Targets of indirect jumps and calls from a tagged buffer, found the same way; returns from a
//! stack of calls. Direct targets are known when the branch is decoded, and far branches are never
//! predicted: neither counts as mispredicted.

use serde::{Deserialize, Serialize};

use super::ModelError;
use crate::branch::{Branch, BranchClass};

/// Two-bit counters, a power of two.
const COUNTERS: usize = 1 << 14;
/// Known indirect targets, a power of two.
const TARGETS: usize = 1 << 10;
/// Calls whose returns are known, a power of two.
const RETURNS: usize = 16;
/// Directions that are part of an index.
const HISTORY: u32 = 12;
/// A counter from here on says "taken".
const TAKEN: u8 = 2;
/// The highest value of a counter.
const COUNTER_MAX: u8 = 3;
/// The shortest and the longest CALL, in bytes: how far from it its return goes.
const CALL_BYTES: std::ops::RangeInclusive<u64> = 2..=15;

/// Cycles that a wrong prediction costs.
pub const PENALTY: u32 = 16;

#[derive(Clone, Debug)]
struct Tables {
    counters: Box<[u8]>,
    /// Address of a branch and where it went last; a branch at 0 is none.
    targets: Box<[(u64, u64)]>,
    /// Addresses of calls.
    returns: [u64; RETURNS],
    /// Where the newest one is.
    top: usize,
    /// The last directions, the newest in bit 0.
    history: u32,
}

impl Default for Tables {
    fn default() -> Self {
        Self {
            // Weakly not taken.
            counters: vec![TAKEN - 1; COUNTERS].into(),
            targets: vec![(0, 0); TARGETS].into(),
            returns: [0; RETURNS],
            top: 0,
            history: 0,
        }
    }
}

/// The predictor of one processor. It takes memory when it is first used.
#[derive(Clone, Debug, Default)]
pub struct Predictor(Option<Box<Tables>>);

impl Predictor {
    /// Nothing was learnt since it was made.
    pub const fn is_cold(&self) -> bool {
        self.0.is_none()
    }

    /// Takes the next branches, interrupts and exceptions, whose outcomes are known by now, and learns from them; those
    /// that are not taken must be among them. Marks what was mispredicted.
    pub fn resolve(&mut self, branches: &mut [Branch]) {
        if branches.is_empty() {
            return;
        }
        let tables = self.0.get_or_insert_with(Box::default);
        for branch in branches {
            branch.mispredicted = tables.resolve(branch);
        }
    }
}

/// Folds an address to 32 bits that differ for near branches.
#[expect(clippy::cast_possible_truncation, reason = "only low bits are used")]
const fn fold(address: u64) -> u32 {
    (address ^ address >> 14) as u32
}

impl Tables {
    #[inline(always)]
    fn resolve(&mut self, branch: &Branch) -> bool {
        let taken = branch.class == BranchClass::Conditional;
        // Without a jump on whether it was taken, which the host would mispredict as often.
        if taken | (branch.class == BranchClass::NotTaken) {
            self.direction(branch.from, taken)
        } else {
            self.other(branch)
        }
    }

    #[inline(never)]
    fn other(&mut self, branch: &Branch) -> bool {
        match branch.class {
            BranchClass::IndirectJump => self.target(branch),
            BranchClass::IndirectCall => {
                self.call(branch.from);
                self.target(branch)
            }
            BranchClass::DirectCall => {
                self.call(branch.from);
                false
            }
            BranchClass::Return => self.ret(branch.to),
            // A call to the next instruction has no return to come.
            BranchClass::Conditional
            | BranchClass::NotTaken
            | BranchClass::CallNext
            | BranchClass::DirectJump
            | BranchClass::Far
            | BranchClass::SoftwareInterrupt
            | BranchClass::Exception
            | BranchClass::Debug
            | BranchClass::Interrupt
            | BranchClass::Abort => false,
        }
    }

    fn direction(&mut self, from: u64, taken: bool) -> bool {
        let at = (fold(from) ^ self.history) as usize & (COUNTERS - 1);
        let counter = &mut self.counters[at];
        let predicted = *counter >= TAKEN;
        let up = u8::from(taken & (*counter < COUNTER_MAX));
        let down = u8::from(!taken & (*counter > 0));
        *counter = *counter + up - down;
        self.history = (self.history << 1 | u32::from(taken)) & ((1 << HISTORY) - 1);
        predicted != taken
    }

    fn target(&mut self, branch: &Branch) -> bool {
        let at = (fold(branch.from) ^ self.history) as usize & (TARGETS - 1);
        let now = (branch.from, branch.to);
        std::mem::replace(&mut self.targets[at], now) != now
    }

    const fn call(&mut self, from: u64) {
        self.top = (self.top + 1) % RETURNS;
        self.returns[self.top] = from;
    }

    fn ret(&mut self, to: u64) -> bool {
        let call = std::mem::take(&mut self.returns[self.top]);
        self.top = (self.top + RETURNS - 1) % RETURNS;
        !CALL_BYTES.contains(&to.wrapping_sub(call))
    }
}

/// Saved state of a [`Predictor`]; empty lists for one that is cold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PredictorState {
    /// The two-bit counters.
    pub counters: Vec<u8>,
    /// Addresses of indirect branches, and their targets.
    pub targets: Vec<(u64, u64)>,
    /// Addresses of calls.
    pub returns: [u64; RETURNS],
    /// Where the newest one is.
    pub top: usize,
    /// The last directions.
    pub history: u32,
}

impl Predictor {
    /// Everything there is to save.
    pub fn save(&self) -> PredictorState {
        self.0.as_ref().map_or_else(Default::default, |tables| {
            let Tables {
                returns,
                top,
                history,
                ..
            } = **tables;
            PredictorState {
                counters: tables.counters.to_vec(),
                targets: tables.targets.to_vec(),
                returns,
                top,
                history,
            }
        })
    }

    /// Takes over a saved state.
    ///
    /// # Errors
    ///
    /// Refuses what no branches could have led to; the predictor is then as before.
    pub fn restore(&mut self, state: &PredictorState) -> Result<(), ModelError> {
        if *state == PredictorState::default() {
            self.0 = None;
            return Ok(());
        }
        let shape = state.counters.len() == COUNTERS && state.targets.len() == TARGETS;
        let values = state.counters.iter().all(|&n| n <= COUNTER_MAX)
            && state.top < RETURNS
            && state.history >> HISTORY == 0;
        if !shape || !values {
            return Err(ModelError {
                model: "branch predictor",
                why: if shape { "a value" } else { "the size" },
            });
        }
        self.0 = Some(Box::new(Tables {
            counters: state.counters.clone().into(),
            targets: state.targets.clone().into(),
            returns: state.returns,
            top: state.top,
            history: state.history,
        }));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
