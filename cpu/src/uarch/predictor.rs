//! A branch predictor: which branches a processor would mispredict.
//!
//! Directions are predicted by gshare: two-bit counters, indexed by the address of the branch and
//! the global history. Targets of indirect jumps and calls come from a tagged buffer with the same
//! index, and returns from a stack of calls. Direct targets are known when the branch is decoded,
//! and far branches are not predicted: neither counts as mispredicted.

use super::UarchStateError;
use crate::branch::{Branch, BranchClass};

/// Number of two-bit counters, a power of two.
const COUNTERS: usize = 1 << 14;
/// Entries of the target buffer, a power of two.
const TARGETS: usize = 1 << 10;
/// Depth of the return stack, a power of two.
const RETURN_STACK_DEPTH: usize = 16;
/// Bits of global history.
const HISTORY: u32 = 12;
/// Lowest counter value that predicts "taken".
const TAKEN: u8 = 2;
/// Highest counter value.
const COUNTER_MAX: u8 = 3;
/// Bytes of the shortest and the longest CALL: the distance of its return address.
const CALL_BYTES: std::ops::RangeInclusive<u64> = 2..=15;

/// Core cycles that a misprediction costs.
pub const PENALTY: u32 = 16;

#[derive(Clone, Debug)]
struct PredictorTables {
    counters: Box<[u8]>,
    /// Address and last target of indirect branches; address 0 marks an empty entry.
    targets: Box<[(u64, u64)]>,
    /// Addresses of the calls that have not returned.
    return_stack: [u64; RETURN_STACK_DEPTH],
    /// Index of the newest call.
    top: usize,
    /// Global history, the newest direction in bit 0.
    history: u32,
}

impl Default for PredictorTables {
    fn default() -> Self {
        Self {
            // Weakly not taken.
            counters: vec![TAKEN - 1; COUNTERS].into(),
            targets: vec![(0, 0); TARGETS].into(),
            return_stack: [0; RETURN_STACK_DEPTH],
            top: 0,
            history: 0,
        }
    }
}

/// The branch predictor of one core. It allocates its memory at the first branch.
#[derive(Clone, Debug, Default)]
pub struct Predictor(Option<Box<PredictorTables>>);

impl Predictor {
    /// Whether the predictor has not been used yet.
    pub const fn is_cold(&self) -> bool {
        self.0.is_none()
    }

    /// Marks the mispredicted branches, and learns from all of them.
    ///
    /// `branches` are those that an engine executed, in order; branches that were not taken must be
    /// included.
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

/// Folds an address to 32 bits, which differ for neighbouring branches.
#[expect(clippy::cast_possible_truncation, reason = "only low bits are used")]
const fn fold(address: u64) -> u32 {
    (address ^ address >> 14) as u32
}

impl PredictorTables {
    #[inline(always)]
    fn resolve(&mut self, branch: &Branch) -> bool {
        let taken = branch.class == BranchClass::Conditional;
        // No host branch on the direction: the host would mispredict it as often.
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
            // A call to the next instruction is not returned from.
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
        debug_assert!(
            self.top < RETURN_STACK_DEPTH,
            "the top indexes the return stack"
        );
        self.top = (self.top + 1) % RETURN_STACK_DEPTH;
        self.return_stack[self.top] = from;
    }

    fn ret(&mut self, to: u64) -> bool {
        let call = std::mem::take(&mut self.return_stack[self.top]);
        self.top = (self.top + RETURN_STACK_DEPTH - 1) % RETURN_STACK_DEPTH;
        !CALL_BYTES.contains(&to.wrapping_sub(call))
    }
}

/// Saved state of a [`Predictor`]; the lists are empty if it was never used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PredictorState {
    /// The two-bit counters.
    pub counters: Vec<u8>,
    /// Address and last target of indirect branches.
    pub targets: Vec<(u64, u64)>,
    /// Addresses of the calls that have not returned.
    #[cfg_attr(feature = "serde", serde(rename = "returns"))]
    pub return_stack: [u64; RETURN_STACK_DEPTH],
    /// Index of the newest call.
    pub top: usize,
    /// Global history, the newest direction in bit 0.
    pub history: u32,
}

impl Predictor {
    /// The state as plain data.
    pub fn save(&self) -> PredictorState {
        self.0.as_ref().map_or_else(Default::default, |tables| {
            let PredictorTables {
                return_stack,
                top,
                history,
                ..
            } = **tables;
            PredictorState {
                counters: tables.counters.to_vec(),
                targets: tables.targets.to_vec(),
                return_stack,
                top,
                history,
            }
        })
    }

    /// Replaces the state by a saved one.
    ///
    /// # Errors
    ///
    /// Rejects a state that no sequence of branches causes, and leaves the predictor as it was.
    pub fn restore(&mut self, state: &PredictorState) -> Result<(), UarchStateError> {
        if *state == PredictorState::default() {
            self.0 = None;
            return Ok(());
        }
        let shape = state.counters.len() == COUNTERS && state.targets.len() == TARGETS;
        let values = state.counters.iter().all(|&n| n <= COUNTER_MAX)
            && state.top < RETURN_STACK_DEPTH
            && state.history >> HISTORY == 0;
        if !shape || !values {
            return Err(UarchStateError {
                model: "branch predictor",
                flaw: if shape {
                    "a value is out of range"
                } else {
                    "its tables have another size"
                },
            });
        }
        self.0 = Some(Box::new(PredictorTables {
            counters: state.counters.clone().into(),
            targets: state.targets.clone().into(),
            return_stack: state.return_stack,
            top: state.top,
            history: state.history,
        }));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
