//! Determines the operands of an instruction, their sizes and addresses.

#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and sizes are small"
)]

use crate::registers::Reg;
use iced_x86::{Code, Instruction, Mnemonic as M, OpKind, Register};

/// An explicit operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    /// No operand.
    None,
    /// A general register or a part of one.
    General(Reg),
    /// A register of another kind; its number is stored as that of a general register.
    Special(Reg),
    /// The memory operand: [`super::InstructionFacts::memory`].
    Memory,
    /// The memory operand of a string instruction, at rSI or rDI.
    String,
    /// An immediate, extended to the operand size.
    Immediate(u64),
    /// The second immediate, as ENTER has.
    SecondImmediate(u64),
    /// Offset of a near branch's target.
    NearBranch(u64),
    /// Offset and selector of a far branch's target.
    FarBranch(u32, u16),
}

/// How the address of a memory operand is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryFacts {
    /// The base register, or [`Reg::Zero`] if there is none.
    pub(crate) base: Reg,
    /// The index register; [`Reg::Zero`] for none or a vector register.
    pub(crate) index: Reg,
    /// Binary logarithm of the index register's scale factor.
    pub(crate) scale: u8,
    /// The displacement, or the whole offset of an operand relative to RIP.
    pub(crate) displacement: u64,
    /// Whether the address is relative to RIP.
    pub(crate) rip_relative: bool,
}

/// The operands and sizes in [`super::InstructionFacts`].
pub(super) struct OperandLayout {
    pub(super) operand_size: u8,
    pub(super) address_size: u8,
    pub(super) operands: [Operand; 5],
    pub(super) segment: Option<u8>,
    pub(super) memory: Option<MemoryFacts>,
}

/// Returns the operands and sizes of an instruction.
pub(super) fn layout(i: &Instruction, code_size: u8) -> OperandLayout {
    let mut layout = OperandLayout {
        operand_size: operand_size(i, code_size),
        address_size: code_size,
        operands: [Operand::None; 5],
        segment: None,
        memory: None,
    };
    for (n, operand) in (0..i.op_count()).zip(&mut layout.operands) {
        *operand = explicit(i, n);
        match *operand {
            Operand::Memory => {
                layout.memory = Some(memory_operand(i));
                layout.address_size = memory_address_size(i, code_size);
                layout.segment = Some(segment(i, code_size));
            }
            Operand::String => {
                layout.address_size = string_address_size(i.op_kind(n)).unwrap_or(code_size);
                layout.operand_size = (i.memory_size().size() as u8).max(1);
                layout.segment = Some(segment(i, code_size));
            }
            _ => {}
        }
    }
    if matches!(
        i.mnemonic(),
        M::Loop | M::Loope | M::Loopne | M::Jcxz | M::Jecxz | M::Jrcxz
    ) {
        layout.address_size = match i.op_code().address_size() {
            16 => 2,
            32 => 4,
            64 => 8,
            _ => code_size,
        };
    }
    layout
}

fn explicit(i: &Instruction, n: u32) -> Operand {
    match i.op_kind(n) {
        OpKind::Register => {
            let r = i.op_register(n);
            if r.is_gpr() {
                Operand::General(general(r))
            } else {
                Operand::Special(Reg::general(r.number() as u8))
            }
        }
        OpKind::Memory => Operand::Memory,
        OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
            Operand::NearBranch(i.near_branch_target())
        }
        OpKind::FarBranch16 => Operand::FarBranch(i.far_branch16().into(), i.far_branch_selector()),
        OpKind::FarBranch32 => Operand::FarBranch(i.far_branch32(), i.far_branch_selector()),
        OpKind::Immediate8_2nd => Operand::SecondImmediate(i.immediate(n)),
        OpKind::Immediate8
        | OpKind::Immediate16
        | OpKind::Immediate32
        | OpKind::Immediate64
        | OpKind::Immediate8to16
        | OpKind::Immediate8to32
        | OpKind::Immediate8to64
        | OpKind::Immediate32to64 => Operand::Immediate(i.immediate(n)),
        _ => Operand::String,
    }
}

fn general(r: Register) -> Reg {
    let n = r.full_register().number() as u8;
    match r {
        Register::AH | Register::CH | Register::DH | Register::BH => Reg::high_byte(n),
        _ => Reg::general(n),
    }
}

fn string_address_size(kind: OpKind) -> Option<u8> {
    Some(match kind {
        OpKind::MemorySegSI | OpKind::MemorySegDI | OpKind::MemoryESDI => 2,
        OpKind::MemorySegESI | OpKind::MemorySegEDI | OpKind::MemoryESEDI => 4,
        OpKind::MemorySegRSI | OpKind::MemorySegRDI | OpKind::MemoryESRDI => 8,
        _ => return None,
    })
}

/// Returns the operand size in bytes.
fn operand_size(i: &Instruction, code_size: u8) -> u8 {
    let by_stack = i.stack_pointer_increment().unsigned_abs();
    match i.code() {
        Code::Retnw | Code::Retnw_imm16 | Code::Retfw | Code::Retfw_imm16 | Code::Iretw => 2,
        Code::Retnd | Code::Retnd_imm16 | Code::Retfd | Code::Retfd_imm16 | Code::Iretd => 4,
        Code::Retnq | Code::Retnq_imm16 | Code::Retfq | Code::Retfq_imm16 | Code::Iretq => 8,
        Code::Enterw_imm16_imm8 | Code::Leavew => 2,
        Code::Enterd_imm16_imm8 | Code::Leaved => 4,
        Code::Enterq_imm16_imm8 | Code::Leaveq => 8,
        Code::Pushaw | Code::Popaw => 2,
        Code::Pushad | Code::Popad => 4,
        Code::Cbw | Code::Cwd => 2,
        Code::Cwde | Code::Cdq => 4,
        Code::Cdqe | Code::Cqo => 8,
        Code::Sysretq | Code::Sysexitq => 8,
        Code::Sysretd | Code::Sysexitd => 4,
        Code::Lgdt_m1632_16 | Code::Lidt_m1632_16 => 2,
        Code::Jmp_m1616 | Code::Call_m1616 | Code::Jmp_ptr1616 | Code::Call_ptr1616 => 2,
        Code::Jmp_m1632 | Code::Call_m1632 | Code::Jmp_ptr1632 | Code::Call_ptr1632 => 4,
        Code::Jmp_m1664 | Code::Call_m1664 => 8,
        _ => match i.op0_kind() {
            OpKind::NearBranch16 => 2,
            OpKind::NearBranch32 => 4,
            OpKind::NearBranch64 => 8,
            _ if matches!(
                i.mnemonic(),
                M::Push | M::Pop | M::Pushf | M::Pushfd | M::Pushfq | M::Popf | M::Popfd | M::Popfq
            ) =>
            {
                by_stack as u8
            }
            OpKind::Register if i.op0_register().is_gpr() => i.op0_register().size() as u8,
            OpKind::Register if i.op1_register().is_gpr() => i.op1_register().size() as u8,
            _ if i.op_count() > 0 => (i.memory_size().size() as u8).max(1),
            _ => code_size,
        },
    }
}

/// Returns the segment of a memory operand.
///
/// In 64-bit mode an operand can select only FS and GS.
fn segment(i: &Instruction, code_size: u8) -> u8 {
    let chosen = i.segment_prefix();
    let segment = if code_size == 8 && !matches!(chosen, Register::FS | Register::GS) {
        match i.memory_base().full_register() {
            Register::RSP | Register::RBP => Register::SS,
            _ => Register::DS,
        }
    } else {
        i.memory_segment()
    };
    segment.number() as u8 & 7
}

fn memory_address_size(i: &Instruction, code_size: u8) -> u8 {
    match (i.memory_base(), i.memory_index()) {
        (Register::RIP, _) => 8,
        (Register::EIP, _) => 4,
        (Register::None, Register::None) => match i.memory_displ_size() {
            2 => 2,
            4 => 4,
            8 => 8,
            _ => code_size,
        },
        (Register::None, r) if r.is_gpr() => r.size() as u8,
        (Register::None, _) if i.memory_displ_size() == 4 => 4,
        (Register::None, _) => code_size.max(4),
        (r, _) => r.size() as u8,
    }
}

fn memory_operand(i: &Instruction) -> MemoryFacts {
    let (base, index) = (i.memory_base(), i.memory_index());
    let rip_relative = matches!(base, Register::RIP | Register::EIP);
    // XLATB has AL as its index, which its handler adds.
    let indexed = index.is_gpr() && i.mnemonic() != M::Xlatb;
    MemoryFacts {
        base: match base {
            Register::None | Register::RIP | Register::EIP => Reg::Zero,
            r => general(r),
        },
        index: if indexed { general(index) } else { Reg::Zero },
        scale: if indexed {
            i.memory_index_scale().trailing_zeros() as u8
        } else {
            0
        },
        displacement: i.memory_displacement64(),
        rip_relative,
    }
}
