//! Facts about an instruction that every execution tier needs to execute it.
//!
//! [`InstructionFacts::of`] is pure: its result depends on the instruction and the code size only.
//! The decoder uses the facts to fill in operations, to end blocks, to fuse operations, and to omit
//! flags that nothing reads. The translator uses the same facts.
//!
//! The facts describe this interpreter. Flags that the architecture leaves undefined have the
//! values that the interpreter gives them, which are the same on every host. The facts ignore
//! CPUID, which can make any instruction undefined, and transactions.

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
    /// The instruction's effect may depend on the value.
    pub(crate) reads: bool,
    /// The instruction may change the value.
    pub(crate) writes: bool,
}

impl OperandAccess {
    /// The value is not accessed: of a memory operand, only the address is used.
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
    /// The value is read and written, or may be kept under a condition.
    pub(crate) const READ_WRITE: Self = Self {
        reads: true,
        writes: true,
    };
}

/// How an instruction uses the six arithmetic flags when it completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlagFacts {
    /// Flags that the instruction reads.
    pub(crate) read: Rflags,
    /// Flags that it always overwrites, independently of their old values.
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
    /// Segment of the memory or string operand, 0 to 5, if there is one.
    pub(crate) segment: Option<u8>,
    /// The memory operand, unless it is that of a string instruction.
    pub(crate) memory: Option<MemoryFacts>,
    /// How it uses the arithmetic flags.
    pub(crate) flags: FlagFacts,
    /// It may raise an exception.
    pub(crate) may_fault: bool,
    /// It may leave the dispatch loop when complete, or to let other code complete it.
    pub(crate) may_leave: bool,
    /// It is the last instruction of its block.
    pub(crate) ends_block: bool,
    /// The condition of Jcc.
    pub(crate) branch_condition: Option<ConditionCode>,
}

impl InstructionFacts {
    /// Returns the facts about a valid instruction.
    ///
    /// `code_size` is the default operand size in bytes: 2, 4 or 8.
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

    /// Whether the flags from before the instruction are visible outside the block.
    ///
    /// The instruction may fault, or leave the dispatch loop: the handler of an exception, or the
    /// code after the loop, can then read them, even if the instruction does not.
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
