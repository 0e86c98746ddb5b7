//! The thunks that were generated for a processor.

use super::codegen::{Bank, Thunk};
use iced_x86::Register;
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes of the redirected instruction, and the register that stands for RSP.
pub(super) type Key = (Vec<u8>, Option<Register>);

/// Generated thunks of one processor.
#[derive(Debug, Default)]
pub(crate) struct Thunks {
    pub(super) bank: Bank,
    pub(super) known: HashMap<Key, Option<Arc<Thunk>>>,
    /// The thunk of each full instruction of the code cache, by [`Op::insn`](crate::code::Op::insn),
    /// once it has run.
    by_insn: Vec<Option<Arc<Thunk>>>,
    /// [`CodeCache::epoch`](crate::code::CodeCache::epoch) in which `by_insn` is valid.
    epoch: u64,
}

impl Thunks {
    /// Takes the thunk of an instruction out, so that it can run; [`Thunks::put_back`] follows.
    pub(super) fn take(&mut self, insn: u32, epoch: u64) -> Option<Arc<Thunk>> {
        if self.epoch != epoch {
            self.by_insn.clear();
            self.epoch = epoch;
        }
        self.by_insn.get_mut(insn as usize)?.take()
    }

    /// Stores the thunk of an instruction.
    pub(super) fn put_back(&mut self, insn: u32, thunk: Arc<Thunk>) {
        let index = insn as usize;
        if self.by_insn.len() <= index {
            self.by_insn.resize(index + 1, None);
        }
        self.by_insn[index] = Some(thunk);
    }
}
