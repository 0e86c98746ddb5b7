//! Fills in the operands of an operation.

use crate::code::{LOCK, MEM, REP, REPNE};
use crate::core::Op;
use crate::facts::{InstructionFacts, Operand};
use crate::registers::Reg;
use iced_x86::Instruction;

/// Stores the operands, their sizes and the prefixes; `rip` is where the block begins.
pub(super) fn fill_in(i: &Instruction, facts: &InstructionFacts, rip: u64, op: &mut Op) {
    op.size = facts.operand_size;
    op.address_size = facts.address_size;
    for (on, prefix) in [
        (i.has_lock_prefix(), LOCK),
        (i.has_repne_prefix(), REPNE),
        (i.has_rep_prefix(), REP),
    ] {
        if on {
            op.prefix |= prefix;
        }
    }
    for (n, operand) in facts.operands.iter().enumerate() {
        match *operand {
            Operand::General(r) | Operand::Special(r) => match n {
                0 => op.dst = r,
                1 => op.src = r,
                _ => {}
            },
            Operand::Immediate(value) => op.imm = value,
            Operand::SecondImmediate(value) => op.disp = value,
            Operand::NearBranch(target) => op.imm = target.wrapping_sub(rip),
            Operand::FarBranch(offset, selector) => {
                (op.imm, op.disp) = (offset.into(), selector.into());
            }
            Operand::None | Operand::Memory | Operand::String => {}
        }
    }
    if let Some(segment) = facts.segment {
        op.set_segment(segment);
    }
    if let Some(memory) = facts.memory {
        op.prefix |= MEM;
        (op.base, op.index, op.scale) = (memory.base, memory.index, memory.scale);
        op.disp = memory.displacement;
        if memory.rip_relative {
            op.base = Reg::BlockRip;
            op.disp = op.disp.wrapping_sub(rip);
        }
    }
}
