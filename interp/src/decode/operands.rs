//! Fills in the operands of an operation.

#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and sizes are small"
)]

use crate::code::{LOCK, MEM, REP, REPNE};
use crate::core::{Core, Op};
use crate::registers::Reg;
use iced_x86::{Code, Instruction, Mnemonic as M, OpKind, Register};

fn register(r: Register) -> Reg {
    let n = r.full_register().number() as u8;
    match r {
        Register::AH | Register::CH | Register::DH | Register::BH => Reg::high_byte(n),
        _ => Reg::general(n),
    }
}

pub(super) fn gpr(r: Register) -> bool {
    r.is_gpr()
}

/// Numbers of segment, control and debug registers too.
fn number(r: Register) -> Reg {
    if gpr(r) {
        register(r)
    } else {
        Reg::general(r.number() as u8)
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

/// Operand size in bytes.
fn operand_size(i: &Instruction, code: u8) -> u8 {
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
            OpKind::Register if gpr(i.op0_register()) => i.op0_register().size() as u8,
            OpKind::Register if gpr(i.op1_register()) => i.op1_register().size() as u8,
            _ if i.op_count() > 0 => (i.memory_size().size() as u8).max(1),
            _ => code,
        },
    }
}

impl Core {
    /// All operands, their sizes and the prefixes; `rip` is where the block begins.
    pub(super) fn operands(&self, i: &Instruction, rip: u64, op: &mut Op) {
        op.size = operand_size(i, self.mode.code_size());
        op.address_size = self.mode.code_size();
        if i.has_lock_prefix() {
            op.prefix |= LOCK;
        }
        if i.has_repne_prefix() {
            op.prefix |= REPNE;
        }
        if i.has_rep_prefix() {
            op.prefix |= REP;
        }
        for n in 0..i.op_count().min(2) {
            let kind = i.op_kind(n);
            if kind == OpKind::Register {
                let r = number(i.op_register(n));
                if n == 0 {
                    op.dst = r;
                } else {
                    op.src = r;
                }
            } else if let Some(asz) = string_address_size(kind) {
                op.address_size = asz;
            }
        }
        for n in 0..i.op_count() {
            match i.op_kind(n) {
                OpKind::Memory => self.memory_operand(i, rip, op),
                OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
                    op.imm = i.near_branch_target().wrapping_sub(rip);
                }
                OpKind::Immediate8
                | OpKind::Immediate16
                | OpKind::Immediate32
                | OpKind::Immediate64
                | OpKind::Immediate8to16
                | OpKind::Immediate8to32
                | OpKind::Immediate8to64
                | OpKind::Immediate32to64 => op.imm = i.immediate(n),
                OpKind::Immediate8_2nd => op.disp = i.immediate(n),
                OpKind::FarBranch16 => {
                    (op.imm, op.disp) = (i.far_branch16().into(), i.far_branch_selector().into());
                }
                OpKind::FarBranch32 => {
                    (op.imm, op.disp) = (i.far_branch32().into(), i.far_branch_selector().into());
                }
                _ => {}
            }
        }
        if matches!(
            i.mnemonic(),
            M::Loop | M::Loope | M::Loopne | M::Jcxz | M::Jecxz | M::Jrcxz
        ) {
            op.address_size = match i.op_code().address_size() {
                16 => 2,
                32 => 4,
                64 => 8,
                _ => self.mode.code_size(),
            };
        }
        if i.op_count() > 0 && string_address_size(i.op0_kind()).is_some()
            || i.op_count() > 1 && string_address_size(i.op1_kind()).is_some()
        {
            op.set_segment(self.segment(i));
            op.size = (i.memory_size().size() as u8).max(1);
        }
    }

    /// The segment of a memory operand: in 64-bit mode only FS and GS can be chosen.
    fn segment(&self, i: &Instruction) -> u8 {
        let chosen = i.segment_prefix();
        let segment = if self.mode.is_64bit() && !matches!(chosen, Register::FS | Register::GS) {
            match i.memory_base().full_register() {
                Register::RSP | Register::RBP => Register::SS,
                _ => Register::DS,
            }
        } else {
            i.memory_segment()
        };
        segment.number() as u8 & 7
    }

    fn memory_operand(&self, i: &Instruction, rip: u64, op: &mut Op) {
        op.prefix |= MEM;
        op.set_segment(self.segment(i));
        op.disp = i.memory_displacement64();
        let (base, index) = (i.memory_base(), i.memory_index());
        op.address_size = match (base, index) {
            (Register::RIP, _) => 8,
            (Register::EIP, _) => 4,
            (Register::None, Register::None) => match i.memory_displ_size() {
                2 => 2,
                4 => 4,
                8 => 8,
                _ => self.mode.code_size(),
            },
            (Register::None, r) if gpr(r) => r.size() as u8,
            (Register::None, _) if i.memory_displ_size() == 4 => 4,
            (Register::None, _) => self.mode.code_size().max(4),
            (r, _) => r.size() as u8,
        };
        match base {
            Register::None => {}
            Register::RIP | Register::EIP => {
                op.base = Reg::BlockRip;
                op.disp = op.disp.wrapping_sub(rip);
            }
            r => op.base = register(r),
        }
        if gpr(index) && i.mnemonic() != M::Xlatb {
            op.index = register(index);
            op.scale = i.memory_index_scale().trailing_zeros() as u8;
        }
    }
}
