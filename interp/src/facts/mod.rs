//! Facts about an instruction that any execution tier needs before it can execute it.
//!
//! [`InstructionFacts::of`] is pure: it reads nothing but the instruction and the code size. The
//! decoder uses the facts to fill in operations, to end blocks, to fuse operations and to omit flags
//! that nothing reads; another tier can use the same ones.
//!
//! The facts are those of this interpreter. Flags that the architecture leaves undefined have the
//! values that the interpreter gives them, on every host. CPUID, which can make any instruction
//! undefined, and transactions do not count.

mod alignment;
mod behaviour;
#[cfg(test)]
pub(crate) mod encodings;
mod flow;
mod operands;
#[cfg(test)]
mod tests;

pub(crate) use alignment::needs_alignment;
use behaviour::Completion;
pub(crate) use behaviour::{is_cmov, is_setcc};
use hindsight_regs::rflags::Rflags;
use iced_x86::{ConditionCode, FlowControl, Instruction};
pub(crate) use operands::{MemoryFacts, Operand};

/// How an instruction accesses the value of an operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OperandAccess {
    /// What the instruction does may depend on the value.
    pub(crate) reads: bool,
    /// The value may change.
    pub(crate) writes: bool,
}

impl OperandAccess {
    /// Of a memory operand only the address is used.
    pub(crate) const NONE: Self = Self {
        reads: false,
        writes: false,
    };
    pub(crate) const READ: Self = Self {
        reads: true,
        writes: false,
    };
    pub(crate) const WRITE: Self = Self {
        reads: false,
        writes: true,
    };
    /// Also of an operand that keeps its value under a condition.
    pub(crate) const READ_WRITE: Self = Self {
        reads: true,
        writes: true,
    };
}

/// How an instruction uses the six arithmetic flags when it completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlagFacts {
    /// Flags whose values it depends on.
    pub(crate) read: Rflags,
    /// Flags that it always overwrites: afterwards they do not depend on their values before.
    pub(crate) written: Rflags,
    /// Flags that it may change: `written`, and those that it keeps under a condition.
    pub(crate) changed: Rflags,
    /// Flags that the architecture leaves undefined. The interpreter may overwrite or keep them.
    pub(crate) undefined: Rflags,
}

impl FlagFacts {
    /// Neither reads nor changes flags.
    pub(crate) const KEEPS: Self = behaviour::KEEPS;
}

/// Facts about one instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InstructionFacts {
    /// Operand size in bytes.
    pub(crate) operand_size: u8,
    /// Address size in bytes.
    pub(crate) address_size: u8,
    /// The explicit operands, and [`Operand::None`] after the last one.
    pub(crate) operands: [Operand; 5],
    /// How the explicit operands are accessed.
    pub(crate) access: [OperandAccess; 5],
    /// Number of the segment of the memory or string operand, if there is one.
    pub(crate) segment: Option<u8>,
    /// The memory operand, but for those of string instructions.
    pub(crate) memory: Option<MemoryFacts>,
    /// The arithmetic flags.
    pub(crate) flags: FlagFacts,
    /// It may raise an exception.
    pub(crate) may_fault: bool,
    /// It may leave the dispatch loop after it has completed, or be completed elsewhere.
    pub(crate) may_leave: bool,
    /// No instruction after it belongs to its block.
    pub(crate) ends_block: bool,
    /// The condition of Jcc.
    pub(crate) branch_condition: Option<ConditionCode>,
}

impl InstructionFacts {
    /// The facts about a valid instruction in code of this size in bytes: 2, 4 or 8.
    pub(crate) fn of(i: &Instruction, code_size: u8) -> Self {
        debug_assert!(!i.is_invalid() && matches!(code_size, 2 | 4 | 8));
        let behaviour = behaviour::of(i);
        let layout = operands::layout(i, code_size);
        let ends_block = i.flow_control() != FlowControl::Next || flow::changes_code(i);
        let free = layout.operands.iter().zip(behaviour.access).all(free);
        let (may_fault, may_leave) = match behaviour.completion {
            _ if !free => (true, true),
            Completion::Always => (false, false),
            Completion::OrFault => (true, false),
            Completion::OrFaultOrExit => (true, true),
        };
        let facts = Self {
            operand_size: layout.operand_size,
            address_size: layout.address_size,
            operands: layout.operands,
            access: behaviour.access,
            segment: layout.segment,
            memory: layout.memory,
            flags: behaviour.flags,
            may_fault,
            may_leave: may_leave || ends_block,
            ends_block,
            branch_condition: i.is_jcc_short_or_near().then(|| i.condition_code()),
        };
        debug_assert!(facts.flags.changed.contains(facts.flags.written));
        facts
    }

    /// Whether anything can read the flags that were set before the instruction, though it may not
    /// read them itself: the handler of an exception, or whatever runs after the dispatch loop.
    pub(crate) fn exposes_flags(&self) -> bool {
        self.may_fault || self.may_leave
    }
}

/// Whether accessing the operand can neither fault nor leave the dispatch loop.
fn free((operand, access): (&Operand, OperandAccess)) -> bool {
    match operand {
        Operand::None | Operand::General(_) | Operand::Immediate(_) => true,
        Operand::SecondImmediate(_) => true,
        Operand::Memory => access == OperandAccess::NONE,
        _ => false,
    }
}
