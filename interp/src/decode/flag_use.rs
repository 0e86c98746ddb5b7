//! How an instruction uses the flags, and its handler where its flags are dead.

use super::dead_flags::FlagUse;
use super::operands::gpr;
use super::select::Pick;
use crate::core::Op;
use crate::ops::alu::NoFlags;
use crate::ops::{alu, inner, mov, shift};
use iced_x86::Mnemonic as M;

impl Pick<'_> {
    /// How the instruction uses the flags. Only frequent instructions are analysed: others count as
    /// readers.
    pub(super) fn flag_use(&self, o: &mut Op) -> FlagUse {
        let (i, size) = (self.i, self.size);
        if self.mem(0) || self.mem(1) {
            return self.memory_flag_use(o);
        }
        let general = (0..i.op_count().min(2)).all(|n| !self.reg(n) || gpr(i.op_register(n)));
        if !general {
            return FlagUse::Reads;
        }
        macro_rules! stepped {
            ($dec:literal) => {
                FlagUse::WritesAllButCarry(match size {
                    1 => inner!(alu::step_r::<u8, $dec, false>),
                    2 => inner!(alu::step_r::<u16, $dec, false>),
                    4 => inner!(alu::step_r::<u32, $dec, false>),
                    _ => inner!(alu::step_r::<u64, $dec, false>),
                })
            };
        }
        match i.mnemonic() {
            M::Mov | M::Movzx | M::Movsx | M::Movsxd | M::Not | M::Bswap | M::Nop | M::Endbr64 => {
                FlagUse::Preserves
            }
            M::Add => FlagUse::Writes(Some(self.alu::<NoFlags<alu::Add>>(o))),
            M::Sub => FlagUse::Writes(Some(self.alu::<NoFlags<alu::Sub>>(o))),
            M::And => FlagUse::Writes(Some(self.alu::<NoFlags<alu::And>>(o))),
            M::Or => FlagUse::Writes(Some(self.alu::<NoFlags<alu::Or>>(o))),
            M::Xor => FlagUse::Writes(Some(self.alu::<NoFlags<alu::Xor>>(o))),
            M::Cmp | M::Test => FlagUse::Writes(Some(inner!(mov::nop))),
            M::Inc => stepped!(false),
            M::Dec => stepped!(true),
            M::Shl | M::Sal => self.shift_flag_use::<{ shift::SHL }>(o),
            M::Shr => self.shift_flag_use::<{ shift::SHR }>(o),
            M::Sar => self.shift_flag_use::<{ shift::SAR }>(o),
            _ => FlagUse::Reads,
        }
    }

    fn memory_flag_use(&self, o: &mut Op) -> FlagUse {
        match self.i.mnemonic() {
            M::Lea => FlagUse::Preserves,
            _ if !self.fast || o.lock() => FlagUse::Reads,
            M::Add => FlagUse::FaultsOrWrites(self.alu::<NoFlags<alu::Add>>(o)),
            M::Sub => FlagUse::FaultsOrWrites(self.alu::<NoFlags<alu::Sub>>(o)),
            M::And => FlagUse::FaultsOrWrites(self.alu::<NoFlags<alu::And>>(o)),
            M::Or => FlagUse::FaultsOrWrites(self.alu::<NoFlags<alu::Or>>(o)),
            M::Xor => FlagUse::FaultsOrWrites(self.alu::<NoFlags<alu::Xor>>(o)),
            _ => FlagUse::Reads,
        }
    }

    /// A shift by a number; one by 0 keeps the flags.
    fn shift_flag_use<const OP: u8>(&self, o: &Op) -> FlagUse {
        let mask = if self.size == 8 { 63 } else { 31 };
        if self.reg(1) || o.imm & mask == 0 {
            return FlagUse::Reads;
        }
        FlagUse::Writes(Some(match self.size {
            1 => inner!(shift::without_flags::<u8, OP>),
            2 => inner!(shift::without_flags::<u16, OP>),
            4 => inner!(shift::without_flags::<u32, OP>),
            _ => inner!(shift::without_flags::<u64, OP>),
        }))
    }
}
