//! Memory operands with a format of their own, operands of CMPXCHG that compare equal, and
//! displacements.

use crate::host_cpu::has_fsgsbase;
use crate::layout::*;
use crate::user::batch::ResultSource;
use crate::user::build::builder::{BatchBuilder, number};
use crate::user::class::InsnClass;
use crate::user::values::CellValue;
use iced_x86::{
    Code, Decoder, DecoderOptions, Encoder, Instruction, MemoryOperand, Mnemonic as M, OpKind,
    Register,
};

/// Parts of an FXSAVE image that are not compared: FOP, FIP, FDP, MXCSR_MASK and what is reserved.
pub(super) const FX_IGNORED: [(u32, u32); 10] = [
    (6, 18),
    (28, 4),
    (42, 6),
    (58, 6),
    (74, 6),
    (90, 6),
    (106, 6),
    (122, 6),
    (138, 6),
    (154, 6),
];

/// Parts of an FNSTENV image that are not compared: FIP, FCS, FOP, FDP, FDS and the reserved words.
fn environment(insn: &Instruction) -> &'static [(u32, u32)] {
    match insn.code() {
        Code::Fnstenv_m14byte | Code::Fnsave_m94byte => &[(6, 8)],
        _ => &[(2, 2), (6, 2), (10, 18)],
    }
}

/// The instructions that save the components that EDX:EAX selects.
fn is_xsave(m: M) -> bool {
    matches!(
        m,
        M::Xsave | M::Xsave64 | M::Xsaveopt | M::Xsaveopt64 | M::Xsavec | M::Xsavec64
    )
}

impl BatchBuilder<'_> {
    /// Points a memory operand with a format of its own to a cell or a result of that format.
    pub(super) fn fixed_operand(&mut self, insn: &Instruction) {
        let mut to_cell = None;
        let mut ignore: &[(u32, u32)] = &[];
        let mut result_len = 0;
        match insn.mnemonic() {
            M::Popf | M::Popfd | M::Popfq => to_cell = Some(CellValue::Flags),
            M::Xrstor | M::Xrstor64 => to_cell = Some(CellValue::Xsave),
            M::Fxrstor | M::Fxrstor64 | M::Frstor | M::Fldenv => to_cell = Some(CellValue::Fxsave),
            M::Ldmxcsr | M::Vldmxcsr => to_cell = Some(CellValue::LdmxcsrOperand),
            M::Fxsave | M::Fxsave64 => {
                result_len = 1024;
                ignore = &FX_IGNORED;
            }
            m if is_xsave(m) => {
                result_len = 1024;
                ignore = &FX_IGNORED;
            }
            M::Fnstenv | M::Fnsave => {
                result_len = 128;
                ignore = environment(insn);
            }
            _ => return,
        }
        if is_xsave(insn.mnemonic()) || matches!(insn.mnemonic(), M::Xrstor | M::Xrstor64) {
            self.load(0, CellValue::Components);
            self.load(2, CellValue::Fixed(0));
        }
        let to = match to_cell {
            Some(value) => self.cell(value),
            None if result_len > 0 => self.result(ResultSource::Memory, result_len),
            None => return,
        };
        self.ignored
            .extend(ignore.iter().map(|&(at, len)| (to + at, len)));
        let info = self.factory.info(insn).clone();
        let Some(memory) = info.used_memory().first() else {
            return;
        };
        self.operand = Some(to);
        if !memory.base().is_gpr() && memory.index().is_gpr() {
            self.load(number(memory.index()), CellValue::Fixed(0));
        }
        self.address(insn, memory, Some(to));
    }

    /// Makes CMPXCHG compare equal half of the time: loads the accumulator from the operand.
    pub(super) fn equal_operand(&mut self, insn: &Instruction) {
        let wide = matches!(insn.mnemonic(), M::Cmpxchg8b | M::Cmpxchg16b);
        let plain = insn.memory_base().is_gpr()
            && insn.memory_base().size() == self.class.bits() as usize / 8;
        let uses = [insn.memory_base(), insn.memory_index()];
        let clash = uses
            .iter()
            .any(|r| r.is_gpr() && matches!(number(*r), 0 | 2));
        if !(wide || insn.mnemonic() == M::Cmpxchg) || self.class == InsnClass::Fault {
            return;
        }
        if insn.op0_kind() != OpKind::Memory || !plain || clash || self.rng.one_in(2) {
            return;
        }
        let part = insn.memory_size().size() / if wide { 2 } else { 1 };
        let (code, low, high) = match part {
            8 => (Code::Mov_r64_rm64, Register::RAX, Register::RDX),
            4 => (Code::Mov_r32_rm32, Register::EAX, Register::EDX),
            2 => (Code::Mov_r16_rm16, Register::AX, Register::DX),
            _ => (Code::Mov_r8_rm8, Register::AL, Register::DL),
        };
        let operand = |plus: i64| {
            MemoryOperand::new(
                insn.memory_base(),
                insn.memory_index(),
                insn.memory_index_scale(),
                insn.memory_displacement64()
                    .wrapping_add(plus.cast_unsigned())
                    .cast_signed(),
                4,
                false,
                insn.segment_prefix(),
            )
        };
        let mut encoder = Encoder::new(self.class.bits());
        let mut loads = vec![Instruction::with2(code, low, operand(0))];
        if wide {
            loads.push(Instruction::with2(code, high, operand(part as i64)));
        }
        for insn in loads.into_iter().flatten() {
            if encoder.encode(&insn, 0).is_err() {
                return;
            }
        }
        if !self.rng.one_in(64) {
            self.asm.bytes.extend(encoder.take_buffer());
        }
    }

    /// Points an absolute or RIP-relative operand to the data.
    pub(super) fn fix_displacement(&mut self, bytes: &mut [u8], rip: u32) {
        let mut decoder =
            Decoder::with_ip(self.class.bits(), bytes, rip.into(), DecoderOptions::NONE);
        let insn = decoder.decode();
        let offsets = decoder.get_constant_offsets(&insn);
        let no_base = insn.memory_base() == Register::None;
        let relative = insn.is_ip_rel_memory_operand();
        if !offsets.has_displacement() || !(no_base || relative) {
            return;
        }
        let mut to = u64::from(self.base() + DATA) + 0x400 + (self.rng.below(0x1800) & !63);
        if self.class == InsnClass::Fault && self.rng.one_in(2) {
            to = u64::from(self.base() + DATA + DATA_LEN) - 8 + self.rng.below(16);
        }
        if let Some(at) = self.operand {
            to = (self.base() + at).into();
        }
        let v = if relative {
            to.wrapping_sub(insn.next_ip())
        } else if insn.segment_prefix() == Register::GS
            && self.class == InsnClass::Address
            && has_fsgsbase()
        {
            to - GS_BASE
        } else {
            to
        };
        let (at, len) = (offsets.displacement_offset(), offsets.displacement_size());
        bytes[at..at + len].copy_from_slice(&v.to_le_bytes()[..len]);
    }
}
