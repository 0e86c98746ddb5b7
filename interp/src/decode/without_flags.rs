//! Handlers for instructions whose flags are dead.

use super::select::Pick;
use crate::core::{Handler, Op};
use crate::ops::alu::NoFlags;
use crate::ops::{alu, inner, mov, shift};
use iced_x86::Mnemonic as M;

impl Pick<'_> {
    /// Returns a handler that executes the instruction but keeps the flags, if any.
    pub(super) fn without_flags(&self, o: &mut Op) -> Option<Handler> {
        let memory = self.facts.memory.is_some();
        if memory && (!self.fast || o.lock()) {
            return None;
        }
        Some(match self.i.mnemonic() {
            M::Add => self.alu::<NoFlags<alu::Add>>(o),
            M::Sub => self.alu::<NoFlags<alu::Sub>>(o),
            M::And => self.alu::<NoFlags<alu::And>>(o),
            M::Or => self.alu::<NoFlags<alu::Or>>(o),
            M::Xor => self.alu::<NoFlags<alu::Xor>>(o),
            _ if memory => return None,
            M::Cmp | M::Test => inner!(mov::nop),
            M::Inc => self.step::<false>(),
            M::Dec => self.step::<true>(),
            // The count is a constant that is not 0.
            _ if self.facts.flags.written.is_empty() => return None,
            M::Shl | M::Sal => self.shift_without_flags::<{ shift::SHL }>(),
            M::Shr => self.shift_without_flags::<{ shift::SHR }>(),
            M::Sar => self.shift_without_flags::<{ shift::SAR }>(),
            _ => return None,
        })
    }

    fn step<const DECREMENT: bool>(&self) -> Handler {
        match self.size {
            1 => inner!(alu::step_r::<u8, DECREMENT, false>),
            2 => inner!(alu::step_r::<u16, DECREMENT, false>),
            4 => inner!(alu::step_r::<u32, DECREMENT, false>),
            _ => inner!(alu::step_r::<u64, DECREMENT, false>),
        }
    }

    fn shift_without_flags<const OP: u8>(&self) -> Handler {
        match self.size {
            1 => inner!(shift::without_flags::<u8, OP>),
            2 => inner!(shift::without_flags::<u16, OP>),
            4 => inner!(shift::without_flags::<u32, OP>),
            _ => inner!(shift::without_flags::<u64, OP>),
        }
    }
}
