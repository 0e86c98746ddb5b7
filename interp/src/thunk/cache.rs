//! The cache of a processor's thunks.

use super::codegen::{self, Bank, Thunk};
use super::host::SoftwarePolicy;
use iced_x86::{Instruction, Register};
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes of the redirected instruction, and the register that replaces RSP.
pub(super) type Key = (Vec<u8>, Option<Register>);

/// Maximum number of thunks of a processor.
///
/// A guest that executes instructions with ever new immediates or registers exceeds it; its thunks
/// are then generated again.
const THUNKS_MAX: usize = 1 << 14;

/// Generated thunks of one processor.
#[derive(Debug, Default)]
pub(crate) struct Thunks {
    pub(super) bank: Bank,
    pub(super) known: HashMap<Key, Option<Arc<Thunk>>>,
    /// Thunks by [`Op::insn`](crate::code::Op::insn), the index of a full instruction.
    ///
    /// `None` until the instruction has run.
    by_insn: Vec<Option<Arc<Thunk>>>,
    /// The [`CodeCache::epoch`](crate::code::CodeCache::epoch) in which `by_insn` is valid.
    epoch: u64,
    /// Which instructions are executed in software.
    pub(crate) policy: SoftwarePolicy,
}

impl Thunks {
    /// Removes the thunk of an instruction from the cache, so that it can run.
    ///
    /// Call [`Thunks::put_back`] afterwards.
    pub(super) fn take(&mut self, insn: u32, epoch: u64) -> Option<Arc<Thunk>> {
        if self.epoch != epoch {
            self.by_insn.clear();
            self.epoch = epoch;
        }
        self.by_insn.get_mut(insn as usize)?.take()
    }

    /// Puts the thunk of an instruction back into the cache.
    pub(super) fn put_back(&mut self, insn: u32, thunk: Arc<Thunk>) {
        let index = insn as usize;
        if self.by_insn.len() <= index {
            self.by_insn.resize(index + 1, None);
        }
        self.by_insn[index] = Some(thunk);
    }

    /// Returns or generates the thunk of an instruction that has not run yet.
    ///
    /// Returns `None` if the instruction cannot have a thunk. If there are too many thunks, all are
    /// dropped, so no thunk may be running.
    pub(super) fn find_or_build(&mut self, insn: &Instruction) -> Option<Arc<Thunk>> {
        let software = self.policy.applies(insn);
        let (bytes, registers) = codegen::redirect(insn)?;
        let key = (bytes, registers.for_rsp);
        if let Some(thunk) = self.known.get(&key) {
            return thunk.clone();
        }
        if self.known.len() >= THUNKS_MAX {
            *self = Self {
                epoch: self.epoch,
                policy: self.policy,
                ..Self::default()
            };
        }
        let made = codegen::build(&mut self.bank, insn, &key.0, registers, software).map(Arc::new);
        self.known.insert(key, made.clone());
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    #[test]
    fn distinct_instructions_leave_a_limited_number_of_thunks() {
        let mut thunks = Thunks::default();
        let mut dropped = 0;
        for number in 0..40_000_u32 {
            let [immediate, registers, rex, _] = number.to_le_bytes();
            // PALIGNR with every register and immediate.
            let code = [
                0x66,
                0x40 | (rex & 1),
                0x0f,
                0x3a,
                0x0f,
                0xc0 | (registers & 0x3f),
                immediate,
            ];
            let mut code = code.to_vec();
            code[1] |= (registers >> 4) & 4;
            let insn = Decoder::new(64, &code, DecoderOptions::NONE).decode();
            let before = thunks.known.len();
            assert!(thunks.find_or_build(&insn).is_some(), "{insn}");
            dropped += usize::from(thunks.known.len() < before);
            assert!(thunks.known.len() <= THUNKS_MAX);
        }
        assert!(dropped > 0);
    }
}
