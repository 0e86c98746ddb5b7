//! Emits x87 instructions. They use the host's registers.

use super::same::redirect;
use super::{Emitter, Late, Retry};
use crate::analysis::{ARITHMETIC, UnitStep, accesses_memory};
use crate::asm::{ADDR, CALL, JMP, Jump32, Rm, TEMP, jcc};
use crate::flags::FlagKind;
use crate::layout::Context;
use crate::x87::{LOADED, keeps_pointer};
use iced_x86::Mnemonic as M;
use std::mem::offset_of;

/// Condition "not equal".
const NOT_EQUAL: u8 = 5;
/// The bits of the x87 control word that mask all exceptions.
const MASKS: i32 = 0x3f;

impl Emitter<'_> {
    /// Emits an x87 instruction.
    pub(super) fn x87(&mut self, step: &UnitStep) -> Result<(), Retry> {
        let mut i = step.insn;
        let stores = step.flags.changed != 0 && self.stores_now();
        debug_assert!(step.flags.read == 0);
        self.need_x87(step);
        if accesses_memory(&i) {
            self.operand(&step.insn, writes_memory(i.mnemonic()))?;
            redirect(&mut i);
        }
        if i.mnemonic() == M::Fldcw {
            self.check_control_word(step);
        }
        self.encode(&i)?;
        if !keeps_pointer(&i) {
            self.store_pointer(i.ip());
        }
        if stores {
            debug_assert!(step.flags.written == ARITHMETIC);
            self.store_explicit(FlagKind::Explicit);
        }
        Ok(())
    }

    /// Emits the check that the guest's x87 state is loaded, if this is not known.
    fn need_x87(&mut self, step: &UnitStep) {
        if self.x87_loaded {
            return;
        }
        self.x87_loaded = true;
        let state = self.context(offset_of!(Context, x87));
        self.asm.alu_imm(7, 4, state, LOADED.cast_signed());
        let from = self.asm.jump(&jcc(NOT_EQUAL));
        let back = self.asm.pos();
        let point = self.instruction(step.block, step.index, None);
        let exit = self.exit(point);
        self.late.push(Late::LoadX87 { from, exit, back });
        self.valid = 0;
    }

    /// Emits the call that loads the x87 state; it leaves the unit if that is not allowed.
    pub(super) fn load_x87(&mut self, from: Jump32, exit: u32, back: usize) {
        self.asm.here(from);
        self.asm.constant(TEMP, exit.into());
        self.asm.jump_to(CALL, self.addresses.load_x87);
        let jump = self.asm.jump(JMP);
        self.asm.lead(jump, back);
    }

    /// Leaves the unit before an FLDCW that would unmask an exception.
    fn check_control_word(&mut self, step: &UnitStep) {
        self.asm.load(2, TEMP, Rm::At(ADDR, 0));
        self.asm.alu_imm(6, 4, Rm::Reg(TEMP), MASKS);
        self.test_immediate(4, Rm::Reg(TEMP), MASKS);
        self.leave_if(step, NOT_EQUAL);
        self.valid = 0;
    }

    /// Emits the store of the x87 instruction pointer. The flags are kept.
    fn store_pointer(&mut self, rip: u64) {
        let at = offset_of!(Context, fip);
        if let Ok(value) = i32::try_from(rip.cast_signed()) {
            let to = self.context(at);
            self.asm.store_imm(8, to, value);
            return;
        }
        for (offset, half) in [(0, rip & 0xffff_ffff), (4, rip >> 32)] {
            let to = self.context(at + offset);
            let half = u32::try_from(half).unwrap_or(0);
            self.asm.store_imm(4, to, half.cast_signed());
        }
    }
}

/// Whether the memory operand of an x87 instruction is its destination.
fn writes_memory(mnemonic: M) -> bool {
    matches!(
        mnemonic,
        M::Fst | M::Fstp | M::Fist | M::Fistp | M::Fisttp | M::Fnstcw | M::Fnstsw
    )
}
