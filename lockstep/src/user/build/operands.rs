//! The memory operands and the registers that an instruction reads.

#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and offsets in a region are small"
)]

use crate::host_cpu::has_fsgsbase;
use crate::layout::*;
use crate::user::batch::vector_len;
use crate::user::build::builder::{BatchBuilder, EmptyMask, number};
use crate::user::class::InsnClass;
use crate::user::kind::{alignment_depends_on_mask, reads};
use crate::user::values::{AddressValue, CellValue};
use iced_x86::{
    CodeSize, CpuidFeature, EncodingKind, Instruction, InstructionInfo, Mnemonic as M, OpKind,
    Register, UsedMemory,
};

/// Whether this is a repeated CMPS, both operands of which may reach unmapped memory.
pub(super) fn compares_strings(i: &Instruction) -> bool {
    let counted = i.has_rep_prefix() || i.has_repne_prefix();
    counted
        && matches!(i.mnemonic(), M::Cmpsb | M::Cmpsw | M::Cmpsd | M::Cmpsq)
        && i.is_string_instruction()
}

/// Whether this is a bit test with the bit number in a register, which may lead far from the
/// operand.
fn has_bit_number(i: &Instruction) -> bool {
    matches!(i.mnemonic(), M::Bt | M::Bts | M::Btr | M::Btc)
        && i.op0_kind() == OpKind::Memory
        && i.op1_kind() == OpKind::Register
}

/// Whether the bit offset of a bit test is a register that holds an address: the bit would then be
/// in memory that only the host has mapped.
pub(super) fn bit_number_is_address(i: &Instruction) -> bool {
    let same = |r: Register| r.full_register() == i.op1_register().full_register();
    has_bit_number(i) && (same(i.memory_base()) || same(i.memory_index()))
}

/// Whether processors differ in the order of an instruction's accesses and checks.
///
/// They differ in the address that a masked store reports, in the x87 state after it faults, in how
/// far PUSHA and POPA come before they fault, and in what they check first if GS makes an address
/// canonical.
pub(super) fn order_differs(insn: &Instruction) -> bool {
    let all_registers = matches!(insn.mnemonic(), M::Popa | M::Popad | M::Pusha | M::Pushad);
    let masked = matches!(
        insn.mnemonic(),
        M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu
    );
    all_registers || masked || insn.segment_prefix() == Register::GS
}

/// Bytes of an index of a gather or scatter.
fn index_width(insn: &Instruction) -> usize {
    let name = format!("{:?}", insn.mnemonic()).to_lowercase();
    if name.contains("gatherq") || name.contains("scatterq") {
        8
    } else {
        4
    }
}

/// Whether the register is the index vector of the instruction.
fn is_index_vector(insn: &Instruction, r: Register) -> bool {
    insn.is_vsib() && insn.memory_index().number() == r.number()
}

impl BatchBuilder<'_> {
    /// Loads random x87 state or a random MXCSR, in the classes that compare them.
    pub(super) fn extended_state(&mut self, insn: &Instruction) {
        if self.class.has_x87() {
            let cell = self.cell(CellValue::Fxsave);
            self.asm.fxrstor(cell);
        }
        let vector = matches!(
            self.class,
            InsnClass::Sse
                | InsnClass::Avx
                | InsnClass::Avx2
                | InsnClass::Avx512
                | InsnClass::Fault
        );
        // A dot product has several steps, and a step that faults keeps the later ones from
        // happening.
        let has_steps = matches!(insn.mnemonic(), M::Dpps | M::Dppd | M::Vdpps | M::Vdppd);
        if has_steps || vector && self.rng.one_in(2) {
            let value = if has_steps {
                CellValue::MaskedMxcsr
            } else {
                CellValue::Mxcsr
            };
            let cell = self.cell(value);
            self.asm.ldmxcsr(cell);
        }
        if self.class.saves_state() && vector_len(self.class) >= 32 {
            for reg in [0, 7] {
                let cell = self.cell(CellValue::Vector(32));
                self.asm.vector(false, reg, 32, cell);
            }
        }
    }

    /// How to treat a mask that selects no element.
    pub(super) fn empty_mask_of(&mut self, insn: &Instruction) -> EmptyMask {
        let (base, index) = (insn.memory_base(), insn.memory_index());
        let can_align = base.is_gpr() && base.full_register() != index.full_register();
        match alignment_depends_on_mask(insn) {
            false => EmptyMask::Allowed,
            true if can_align && self.rng.one_in(2) => EmptyMask::Aligned,
            true => EmptyMask::Avoided,
        }
    }

    /// Loads the registers of a memory operand's address, which leads to the data or to the offset
    /// `to`.
    pub(super) fn address(&mut self, insn: &Instruction, memory: &UsedMemory, to: Option<u32>) {
        let (base, index) = (memory.base(), memory.index());
        let narrow = memory.address_size() == CodeSize::Code32 || self.class.bits() == 32;
        let size = memory.memory_size().size().max(1) as u64;
        let mut address = AddressValue {
            plus: memory.displacement(),
            index: None,
            times: 1,
            align: if size >= 16 {
                64
            } else {
                size.next_power_of_two()
            },
            strict: insn.cpuid_features().contains(&CpuidFeature::SHA)
                || self.empty_mask == EmptyMask::Aligned,
            wild: if order_differs(insn) {
                0
            } else {
                self.wild(insn)
            },
            narrow,
            to,
        };
        if memory.segment() == Register::GS && self.class == InsnClass::Address && has_fsgsbase() {
            address.plus = address.plus.wrapping_add(GS_BASE);
        }
        let scale = u64::from(memory.scale());
        if index.is_vector_register() {
            let cell = self.cell(CellValue::Indices(index_width(insn)));
            let len = vector_len(self.class);
            self.asm.vector(false, index.number() as u8, len, cell);
        } else if index.is_gpr() && index.full_register() != base.full_register() {
            let value = if insn.mnemonic() == M::Xlatb || index.size() == 1 {
                CellValue::Random
            } else if has_bit_number(insn) {
                CellValue::Small(64)
            } else {
                CellValue::Small(0x80)
            };
            let cell = self.load(number(index), value).filter(|_| index.size() > 1);
            address.index = cell.map(|cell| (cell, scale));
        }
        if base.is_gpr() {
            if index.full_register() == base.full_register() {
                address.times += scale;
                if size >= 16 {
                    // A register that counts more than once rarely makes the target aligned.
                    address.wild = 0;
                }
            }
            self.load(number(base), CellValue::Address(address));
        }
    }

    /// How often an address is one that faults: once in this many times, or never if it is 0.
    ///
    /// Only one address of an instruction may fault, because the order of two accesses is not
    /// defined.
    fn wild(&mut self, insn: &Instruction) -> u64 {
        if std::mem::replace(&mut self.has_wild_address, true) {
            return 0;
        }
        match self.class {
            InsnClass::Fault => 2,
            InsnClass::Branch | InsnClass::Xsave | InsnClass::CompatXsave => 0,
            // Masked elements do not fault, so more addresses may be wild.
            _ if insn.has_op_mask() => 8,
            _ => 100,
        }
    }

    /// Loads other registers that the instruction reads.
    pub(super) fn registers(&mut self, insn: &Instruction, info: &InstructionInfo) {
        let divides = matches!(insn.mnemonic(), M::Div | M::Idiv);
        if insn.is_string_instruction() && (insn.has_rep_prefix() || insn.has_repne_prefix()) {
            self.load(1, CellValue::Count);
        }
        if has_bit_number(insn) {
            self.load(number(insn.op1_register()), CellValue::Small(512));
        }
        if divides && !self.rng.one_in(4) {
            self.load(2, CellValue::Small(4));
        }
        let len = vector_len(self.class);
        for used in info.used_registers() {
            let r = used.register();
            if !reads(used.access()) {
                continue;
            }
            if r.is_gpr() && number(r) != 4 && self.rng.one_in(2) {
                self.load(number(r), CellValue::Random);
            } else if r.is_vector_register() && self.rng.one_in(2) && !is_index_vector(insn, r) {
                let legacy = insn.encoding() == EncodingKind::Legacy;
                let len = if legacy { 16 } else { len };
                let cell = self.cell(CellValue::Vector(len));
                self.asm.vector(false, r.number() as u8, len, cell);
            } else if r.is_k() && r == insn.op_mask() && self.empty_mask == EmptyMask::Avoided {
                let cell = self.cell(CellValue::Odd);
                self.asm.opmask(false, r.number() as u8, cell);
            } else if r.is_k() && r != Register::K0 && self.rng.one_in(2) {
                let cell = self.cell(CellValue::Random);
                self.asm.opmask(false, r.number() as u8, cell);
            }
        }
    }
}
