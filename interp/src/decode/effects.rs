//! What an instruction does with the flags, and how it is executed where nobody looks at them.

use super::operands::gpr;
use super::quiet::Effect;
use super::select::Pick;
use crate::core::Op;
use crate::ops::alu::BtsFastPath;
use crate::ops::{alu, inner, mov, shift};
use iced_x86::Mnemonic as M;

impl Pick<'_> {
    /// What the instruction does with the flags, where blocks are long enough for that to matter.
    pub(super) fn effect(&self, o: &mut Op) -> Effect {
        let (i, size) = (self.i, self.size);
        if self.mem(0) || self.mem(1) {
            return self.memory_effect(o);
        }
        let general = (0..i.op_count().min(2)).all(|n| !self.reg(n) || gpr(i.op_register(n)));
        if !general {
            return Effect::Seen;
        }
        macro_rules! stepped {
            ($dec:literal) => {
                Effect::SetButCarry(match size {
                    1 => inner!(alu::step_r::<u8, $dec, false>),
                    2 => inner!(alu::step_r::<u16, $dec, false>),
                    4 => inner!(alu::step_r::<u32, $dec, false>),
                    _ => inner!(alu::step_r::<u64, $dec, false>),
                })
            };
        }
        match i.mnemonic() {
            M::Mov | M::Movzx | M::Movsx | M::Movsxd | M::Not | M::Bswap | M::Nop | M::Endbr64 => {
                Effect::Kept
            }
            M::Add => Effect::Set(Some(self.alu::<BtsFastPath<alu::Add>>(o))),
            M::Sub => Effect::Set(Some(self.alu::<BtsFastPath<alu::Sub>>(o))),
            M::And => Effect::Set(Some(self.alu::<BtsFastPath<alu::And>>(o))),
            M::Or => Effect::Set(Some(self.alu::<BtsFastPath<alu::Or>>(o))),
            M::Xor => Effect::Set(Some(self.alu::<BtsFastPath<alu::Xor>>(o))),
            M::Cmp | M::Test => Effect::Set(Some(inner!(mov::nop))),
            M::Inc => stepped!(false),
            M::Dec => stepped!(true),
            M::Shl | M::Sal => self.shift_effect::<{ shift::SHL }>(o),
            M::Shr => self.shift_effect::<{ shift::SHR }>(o),
            M::Sar => self.shift_effect::<{ shift::SAR }>(o),
            _ => Effect::Seen,
        }
    }

    fn memory_effect(&self, o: &mut Op) -> Effect {
        match self.i.mnemonic() {
            M::Lea => Effect::Kept,
            _ if !self.fast || o.lock() => Effect::Seen,
            M::Add => Effect::SetLast(self.alu::<BtsFastPath<alu::Add>>(o)),
            M::Sub => Effect::SetLast(self.alu::<BtsFastPath<alu::Sub>>(o)),
            M::And => Effect::SetLast(self.alu::<BtsFastPath<alu::And>>(o)),
            M::Or => Effect::SetLast(self.alu::<BtsFastPath<alu::Or>>(o)),
            M::Xor => Effect::SetLast(self.alu::<BtsFastPath<alu::Xor>>(o)),
            _ => Effect::Seen,
        }
    }

    /// A shift by a number; one by 0 keeps the flags.
    fn shift_effect<const OP: u8>(&self, o: &Op) -> Effect {
        let mask = if self.size == 8 { 63 } else { 31 };
        if self.reg(1) || o.imm & mask == 0 {
            return Effect::Seen;
        }
        Effect::Set(Some(match self.size {
            1 => inner!(shift::quiet::<u8, OP>),
            2 => inner!(shift::quiet::<u16, OP>),
            4 => inner!(shift::quiet::<u32, OP>),
            _ => inner!(shift::quiet::<u64, OP>),
        }))
    }
}
