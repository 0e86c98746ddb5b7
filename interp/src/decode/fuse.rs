//! Fuses the operations of two instructions.

use super::dead_flags::FlagUse;
use super::select;
use crate::code::LINKABLE;
use crate::core::{Handler, Op};
use crate::facts::{InstructionFacts, Operand, OperandAccess};
use crate::ops::fused;
use iced_x86::Instruction;

/// An instruction that may be fused with the previous one.
pub(super) struct Second<'a> {
    pub(super) insn: &'a Instruction,
    pub(super) op: &'a Op,
    pub(super) facts: &'a InstructionFacts,
}

/// The operation that executes two instructions, and how it uses the flags.
pub(super) fn fuse(
    first: &Op,
    first_use: &FlagUse,
    second: &Second<'_>,
    record: bool,
) -> Option<(Op, FlagUse)> {
    match first.fuse {
        0 => None,
        fused::MOV_REG => fuse_mov(first, second),
        // The comparison is complete when the branch can fault.
        _ => fuse_branch(first, second, record).map(|op| (op, first_use.with_flags_only())),
    }
}

/// Fuses a MOV with the next instruction, which works on the moved value.
fn fuse_mov(first: &Op, second: &Second<'_>) -> Option<(Op, FlagUse)> {
    let Second { insn, op, facts } = *second;
    let same = facts.access[0] == OperandAccess::READ_WRITE
        && matches!(facts.operands[0], Operand::General(_))
        && (op.dst, op.size) == (first.dst, first.size);
    // The second operand must not be the moved value.
    let itself = facts.operands[1] == Operand::General(first.dst);
    if !same || itself || facts.exposes_flags() {
        return None;
    }
    let [handler, without_flags] = fused::after_mov(insn, op)?;
    let mut both = Op::new(Handler::Inner(handler));
    (both.imm, both.dst, both.src, both.size) = (op.imm, op.dst, op.src, op.size);
    both.base = first.src;
    (both.offset, both.len) = (first.offset, first.len + op.len);
    both.remaining = first.remaining;
    let flag_use = FlagUse::new(facts, Some(Handler::Inner(without_flags)));
    Some((both, flag_use))
}

/// Fuses a comparison with the conditional branch after it.
fn fuse_branch(first: &Op, second: &Second<'_>, record: bool) -> Option<Op> {
    let branch = second.op;
    let condition = second.facts.branch_condition?;
    if branch.size != 8 {
        return None;
    }
    let cc = (condition as u8).wrapping_sub(1);
    let handler = if record {
        fused::handler::<true>
    } else {
        fused::handler::<false>
    };
    let mut both = Op::new(Handler::Inner(handler(
        first.fuse,
        select::width(first),
        cc,
    )?));
    (both.imm, both.dst, both.src, both.size) = (first.imm, first.dst, first.src, first.size);
    both.disp = branch.imm;
    both.prefix = branch.prefix & LINKABLE;
    both.offset = first.offset;
    both.address_size = first.len;
    both.len = first.len + branch.len;
    both.remaining = first.remaining;
    Some(both)
}
