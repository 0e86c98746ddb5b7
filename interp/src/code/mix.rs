//! The instruction mix: how often each instruction retired.
//!
//! Every block counts how often it was entered. When a run of a block ends early, by a fault or for
//! an event, the place is counted too. Both are converted to counts by mnemonic when the mix is
//! asked for, and before blocks are freed.

use super::op::{Op, OpId};
use iced_x86::{Instruction, Mnemonic};
use std::collections::HashMap;

/// Retired instructions by mnemonic.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mix {
    /// By number of the mnemonic. Corrections may come before what they correct.
    counts: Vec<i64>,
    /// How often a block ended early: at which operation, and whether that one retired.
    early: HashMap<(OpId, bool), u64>,
}

/// The number of an instruction's mnemonic.
pub(crate) fn mnemonic_number(insn: &Instruction) -> u16 {
    insn.mnemonic() as u16
}

impl Mix {
    /// Counts that a run of a block ended at this operation, which retired or not.
    pub(crate) fn ended_early(&mut self, op: OpId, retired: bool) {
        *self.early.entry((op, retired)).or_default() += 1;
    }

    /// Adds the runs of a block. A block may be added once, unless to a copy of the mix.
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

    /// The mnemonics with their counts, the most frequent first.
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
