//! The instruction mix: how often each instruction retired.
//!
//! Every block counts how often it was entered. If a run of a block ends early, because of a fault
//! or an event, the operation at which it ended is counted, too. When the mix is requested, and
//! before blocks are freed, both are converted to counts for each mnemonic.

use super::op::{Op, OpId};
use iced_x86::{Instruction, Mnemonic};
use std::collections::HashMap;

/// Retired instructions by mnemonic.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mix {
    /// Counts by mnemonic number.
    ///
    /// A correction may be added before the count that it corrects, so that a count may be
    /// negative.
    counts: Vec<i64>,
    /// How often a block ended early, by operation and whether the operation retired.
    early: HashMap<(OpId, bool), u64>,
}

/// Returns the number of an instruction's mnemonic.
pub(crate) fn mnemonic_number(insn: &Instruction) -> u16 {
    insn.mnemonic() as u16
}

impl Mix {
    /// Counts a run of a block that ended early at an operation.
    pub(crate) fn ended_early(&mut self, op: OpId, retired: bool) {
        *self.early.entry((op, retired)).or_default() += 1;
    }

    /// Adds the runs of a block.
    ///
    /// A block may be added to the mix only once. Adding it to a copy does not count.
    pub(crate) fn add_block<C>(&mut self, ops: &[Op<C>], mnemonics: &[u16]) {
        let runs = ops.first().map_or(0, Op::runs);
        if runs == 0 {
            return;
        }
        self.add(mnemonics, runs.cast_signed());
        if self.early.is_empty() {
            return;
        }
        for op in ops {
            for retired in [false, true] {
                let Some(times) = self.early.remove(&(op.id(), retired)) else {
                    continue;
                };
                let unfinished =
                    usize::from(op.remaining) - usize::from(retired && op.remaining != 0);
                debug_assert!(unfinished <= mnemonics.len());
                let from = mnemonics.len().saturating_sub(unfinished);
                let rest = mnemonics.get(from..).unwrap_or_default();
                self.add(rest, -times.cast_signed());
            }
        }
    }

    fn add(&mut self, mnemonics: &[u16], times: i64) {
        for &number in mnemonics {
            let index = usize::from(number);
            if index >= self.counts.len() {
                self.counts.resize(index + 1, 0);
            }
            self.counts[index] += times;
        }
    }

    /// Returns the mnemonics with their counts, the most frequent first.
    pub(crate) fn list(&self) -> Vec<(String, u64)> {
        let mut list: Vec<_> = Mnemonic::values()
            .zip(&self.counts)
            .filter(|(_, count)| **count > 0)
            .map(|(mnemonic, count)| {
                let name = format!("{mnemonic:?}").to_lowercase();
                (name, count.unsigned_abs())
            })
            .collect();
        list.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        list
    }
}
