//! Emits divisions; one that may fault is left to the caller.

use super::flags::operand_size;
use super::{Emitter, Retry};
use crate::analysis::{UnitStep, accesses_memory};
use crate::asm::{ADDR, Host, RAX, RDX, Rm, TEMP};
use iced_x86::OpKind;

/// Condition "above or equal".
const ABOVE_OR_EQUAL: u8 = 3;
/// Condition "not equal".
const NOT_EQUAL: u8 = 5;
/// Condition "below or equal".
const BELOW_OR_EQUAL: u8 = 6;

impl Emitter<'_> {
    /// Emits DIV or IDIV of 32 or 64 bits. The guest's flags are kept.
    pub(super) fn divide(&mut self, step: &UnitStep, signed: bool) -> Result<(), Retry> {
        let i = &step.insn;
        let size = operand_size(i);
        if size < 4 {
            return self.cannot();
        }
        let divisor = if accesses_memory(i) {
            self.operand(i, false)?;
            self.asm.load(size, TEMP, Rm::At(ADDR, 0));
            TEMP
        } else {
            debug_assert!(i.op0_kind() == OpKind::Register);
            self.value(i.op0_register())
        };
        if signed {
            self.check_signed(step, size, divisor);
        } else {
            // The quotient fits if the upper half of the dividend is below the divisor.
            self.asm.alu_from(7, size, RDX, Rm::Reg(divisor));
            self.leave_if(step, ABOVE_OR_EQUAL);
        }
        let operation = if signed { 7 } else { 6 };
        self.asm
            .encode(&[0xf7], size, operation, Rm::Reg(divisor), 0);
        self.valid = 0;
        Ok(())
    }

    /// Leaves the unit before an IDIV that may fault.
    ///
    /// It cannot fault if the dividend is sign-extended from its lower half and the divisor is
    /// neither 0 nor -1.
    fn check_signed(&mut self, step: &UnitStep, size: u8, divisor: Host) {
        self.asm.lea(ADDR, divisor, 1);
        self.asm.alu_imm(7, size, Rm::Reg(ADDR), 1);
        self.leave_if(step, BELOW_OR_EQUAL);
        self.asm.load(size, ADDR, Rm::Reg(RAX));
        // SAR
        self.asm.encode(&[0xc1], size, 7, Rm::Reg(ADDR), 1);
        self.asm.bytes(&[size * 8 - 1]);
        self.asm.alu_from(7, size, ADDR, Rm::Reg(RDX));
        self.leave_if(step, NOT_EQUAL);
    }
}
