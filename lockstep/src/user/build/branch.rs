//! Near branches: each jumps to the end of its slot, over an instruction that leaves a mark.

#![expect(
    clippy::cast_possible_truncation,
    reason = "instructions have at most 15 bytes"
)]

use crate::user::batch::ResultSource;
use crate::user::build::builder::{BatchBuilder, number};
use crate::user::values::CellValue;
use iced_x86::{Encoder, FlowControl, Instruction, InstructionInfo, Mnemonic as M, OpKind};

/// A branch target in the unmapped first page.
const WILD_TARGET: u64 = 0x10;

impl BatchBuilder<'_> {
    /// Emits a branch to the end of the slot. The instruction between them increments a mark.
    pub(super) fn branch(&mut self, mut insn: Instruction) {
        if self.rng.one_in(2) {
            self.flag_source();
            // The comparison comes first, so the branch may load the same registers anew.
            self.loaded = 0;
        }
        let info = self.factory.info(&insn).clone();
        let mark = self.result(ResultSource::Memory, 8);
        let target_cell = self.cell(CellValue::Fixed(0));
        self.branch_operands(&insn, &info, target_cell);
        let rip = self.asm.here();
        let bytes = self.encode_branch(&mut insn, rip);
        self.decode_at(&bytes, rip, &mut insn);
        self.asm.bytes.extend(&bytes);
        // INC dword [mark].
        self.asm.bytes.push(0xff);
        let displacement = (self.base() + mark).to_le_bytes();
        let modrm: &[u8] = if self.asm.long { &[4, 0x25] } else { &[5] };
        self.asm.bytes.extend(modrm);
        self.asm.bytes.extend(displacement);
        let end = self.asm.here();
        let wild = self.rng.one_in(32);
        if let Some(value) = self.values.iter_mut().find(|v| v.0 == target_cell) {
            value.1 = CellValue::Fixed(if wild { WILD_TARGET } else { end.into() });
        }
        self.finish_slot(insn, rip, &info);
    }

    /// Loads what the branch reads; an indirect branch or a return reads its target from the cell.
    fn branch_operands(&mut self, insn: &Instruction, info: &InstructionInfo, target_cell: u32) {
        let is_return = insn.flow_control() == FlowControl::Return;
        for memory in info.used_memory() {
            let operand = insn.op_count() > 0
                && insn.op0_kind() == OpKind::Memory
                && memory.base() == insn.memory_base()
                && memory.displacement() == insn.memory_displacement64();
            let cell = (operand || is_return).then_some(target_cell);
            self.address(insn, memory, cell);
        }
        if matches!(
            insn.mnemonic(),
            M::Loop | M::Loope | M::Loopne | M::Jcxz | M::Jecxz | M::Jrcxz
        ) {
            self.load(1, CellValue::Small(3));
        }
        if insn.op_count() > 0 && insn.op0_kind() == OpKind::Register {
            let reg = number(insn.op0_register());
            self.loaded |= 1 << reg;
            self.asm.load(reg, target_cell);
        }
    }

    /// The encoding at `rip`; a direct branch leads over the INC that follows it.
    fn encode_branch(&self, insn: &mut Instruction, rip: u32) -> Vec<u8> {
        let bits = self.class.bits();
        let inc_len = if self.asm.long { 7 } else { 6 };
        let direct = is_direct(insn);
        if direct {
            insn.set_near_branch64((rip + insn.len() as u32 + inc_len).into());
        }
        let mut encoder = Encoder::new(bits);
        let encoded = encoder.encode(insn, rip.into()).is_ok();
        let mut bytes = encoder.take_buffer();
        if !encoded {
            bytes = vec![0x90];
        }
        // The encoder may have chosen another length: encode again with the target that follows
        // from it.
        if direct {
            insn.set_near_branch64((rip + bytes.len() as u32 + inc_len).into());
            let mut encoder = Encoder::new(bits);
            if encoder.encode(insn, rip.into()).is_ok() {
                bytes = encoder.take_buffer();
            }
        }
        bytes
    }

    /// Emits a comparison right before a conditional branch: the interpreter may fuse the two.
    fn flag_source(&mut self) {
        let reg = self.rng.byte() & 7;
        let reg = if reg == 4 { 0 } else { reg };
        self.load(reg, CellValue::Random);
        // CMP, TEST, ADD, SUB or AND with a register; then CMP, AND, ADD or SUB with a small
        // number.
        let opcode = *self.rng.pick(&[0x39, 0x85, 0x01, 0x29, 0x21, 0x38, 0x84]);
        let other = (self.rng.byte() & 7) % 4;
        self.asm.bytes.extend([opcode, 0xc0 | other << 3 | reg]);
        if self.rng.one_in(2) {
            let small = self.rng.byte();
            let group = *self.rng.pick(&[0xf8, 0xe0, 0xc0, 0xe8]);
            self.asm.bytes.extend([0x83, group | reg, small]);
        }
    }
}

/// Whether the branch has its target in the instruction.
fn is_direct(insn: &Instruction) -> bool {
    insn.op_count() > 0
        && matches!(
            insn.op0_kind(),
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
        )
}
