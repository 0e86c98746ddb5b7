//! Finds the function that executes an instruction.

use super::legacy::{self, Equivalent};
use super::run::{InstructionShape, SoftHandler};
use super::{
    aes, arithmetic, compare, convert, floating, galois, general, integer, moves, opmask, permute,
    sha, special, strings,
};
use crate::thunk::vectors::Vectors;
use iced_x86::{Instruction, Mnemonic as M};

/// An instruction that is executed in software.
#[derive(Clone, Copy)]
pub(crate) struct SoftInstruction {
    insn: Instruction,
    work: SoftHandler,
    shape: InstructionShape,
}

impl std::fmt::Debug for SoftInstruction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SoftInstruction").field(&self.insn).finish()
    }
}

fn work(m: M) -> Option<SoftHandler> {
    arithmetic::work(m)
        .or_else(|| integer::work(m))
        .or_else(|| moves::work(m))
        .or_else(|| permute::work(m))
        .or_else(|| floating::work(m))
        .or_else(|| convert::work(m))
        .or_else(|| special::work(m))
        .or_else(|| compare::work(m))
        .or_else(|| opmask::work(m))
        .or_else(|| strings::work(m))
        .or_else(|| aes::work(m))
        .or_else(|| galois::work(m))
        .or_else(|| sha::work(m))
        .or_else(|| general::work(m))
}

impl SoftInstruction {
    /// Returns an instruction that is executed in software; `None` if it is not implemented.
    pub(crate) fn of(i: &Instruction) -> Option<Self> {
        let plain = Equivalent {
            mnemonic: i.mnemonic(),
            destructive: false,
        };
        let equivalent = match legacy::equivalent(i.mnemonic()) {
            Some(_) if (0..i.op_count()).any(|n| i.op_register(n).is_mm()) => return None,
            Some(equivalent) => equivalent,
            None => plain,
        };
        Some(Self {
            insn: *i,
            work: work(equivalent.mnemonic)?,
            shape: InstructionShape::of(i, equivalent),
        })
    }

    /// Executes the instruction with the registers of `vectors`, as a thunk's code does.
    pub(crate) fn call(&self, vectors: &mut Vectors) {
        self.shape.run(&self.insn, self.work, vectors);
    }
}
