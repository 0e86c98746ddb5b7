//! Emits BT, BTS, BTR and BTC.

use super::alu::MEMORY;
use super::flags::operand_size;
use super::flow::NOT_EQUAL;
use super::{Emitter, Retry};
use crate::analysis::{UnitStep, accesses_memory};
use crate::asm::{ADDR, Rm, TEMP};
use iced_x86::{Instruction, Mnemonic as M, OpKind};

/// Returns the operation as the second opcode of the group encodes it: 4 to 7.
fn operation(i: &Instruction) -> u8 {
    match i.mnemonic() {
        M::Bts => 5,
        M::Btr => 6,
        M::Btc => 7,
        _ => 4,
    }
}

impl Emitter<'_> {
    pub(super) fn bit(&mut self, step: &UnitStep) -> Result<(), Retry> {
        let i = &step.insn;
        if !accesses_memory(i) {
            return self.producer(step);
        }
        let size = operand_size(i);
        let stores = self.stores_now();
        self.address(i)?;
        let by_register = i.op1_kind() == OpKind::Register;
        if by_register {
            self.add_bit_offset(i, size);
        }
        self.find(size, i.mnemonic() != M::Bt);
        if i.has_lock_prefix() && size > 1 {
            // Like other atomic operations that are not aligned.
            self.test_immediate(1, Rm::Reg(ADDR), i32::from(size) - 1);
            self.leave_if(step, NOT_EQUAL);
        }
        if by_register {
            self.bit_by_register(i, size);
        } else {
            if i.has_lock_prefix() {
                self.asm.bytes(&[0xf0]);
            }
            self.asm
                .encode(&[0x0f, 0xba], size, operation(i), MEMORY, 1);
            self.asm.bytes(&[i.immediate8() & (8 * size - 1)]);
        }
        if stores {
            self.store_bit();
        }
        Ok(())
    }

    /// Adds the offset of the operand that has the bit, which may be negative, to the address in R10.
    fn add_bit_offset(&mut self, i: &Instruction, size: u8) {
        let offset = self.home(i.op1_register());
        if size == 4 {
            // MOVSXD R11
            self.asm.encode(&[0x63], 8, TEMP.0, offset, 0);
        } else {
            self.asm.load(8, TEMP, offset);
        }
        // SAR R11; SHL R11
        let (bits, bytes) = if size == 4 { (5, 2) } else { (6, 3) };
        self.asm.bytes(&[0x49, 0xc1, 0xfb, bits]);
        self.asm.bytes(&[0x49, 0xc1, 0xe3, bytes]);
        self.asm.alu(0, 8, Rm::Reg(ADDR), TEMP);
        self.valid = 0;
    }

    /// Emits the operation on a bit of the memory at R10 whose number is in a register.
    fn bit_by_register(&mut self, i: &Instruction, size: u8) {
        let number = self.home(i.op1_register());
        self.asm.load(size, TEMP, number);
        let mask = 8 * i32::from(size) - 1;
        self.asm.alu_imm(4, size, Rm::Reg(TEMP), mask);
        let opcode = 0xa3 | (operation(i) - 4) << 3;
        let target = if i.mnemonic() == M::Bt {
            self.asm.load(size, ADDR, MEMORY);
            Rm::Reg(ADDR)
        } else {
            MEMORY
        };
        if i.has_lock_prefix() {
            self.asm.bytes(&[0xf0]);
        }
        self.asm.encode(&[0x0f, opcode], size, TEMP.0, target, 0);
    }
}
