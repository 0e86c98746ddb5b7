//! The instruction mix: how often each instruction retired.
//!
//! Every block counts how often it was entered; what a run of it did not get to, because of a fault or
//! something to look at, is noted on the way out. Both are folded into mnemonics when somebody asks, and
//! before blocks are freed.

use crate::op::{Next, Op};
use iced_x86::{Instruction, Mnemonic};
use std::collections::HashMap;

/// Retired instructions by mnemonic.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mix {
    /// By number of the mnemonic. Corrections may come before what they correct.
    counts: Vec<i64>,
    /// How often a block ended early: at which operation, and whether that one retired.
    early: HashMap<(usize, bool), u64>,
}

/// The number of an instruction's mnemonic.
pub(crate) fn number(insn: &Instruction) -> u16 {
    insn.mnemonic() as u16
}

impl Mix {
    /// A block ended at this operation, which retired or not.
    pub(crate) fn ended(&mut self, op: Next, retired: bool) {
        *self.early.entry((op.addr(), retired)).or_default() += 1;
    }

    /// Adds what a block did. Once, unless in a copy.
    pub(crate) fn fold(&mut self, ops: &[Op], mnemonics: &[u16]) {
        let runs = ops.first().map_or(0, |op| op.runs.get());
        if runs == 0 {
            return;
        }
        self.add(mnemonics, runs.cast_signed());
        if self.early.is_empty() {
            return;
        }
        for op in ops {
            for retired in [false, true] {
                let key = (std::ptr::from_ref(op).addr(), retired);
                let Some(times) = self.early.remove(&key) else {
                    continue;
                };
                let unfinished = usize::from(op.left) - usize::from(retired && op.left != 0);
                let from = mnemonics.len().saturating_sub(unfinished);
                self.add(
                    mnemonics.get(from..).unwrap_or_default(),
                    -times.cast_signed(),
                );
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
