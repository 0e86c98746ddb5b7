//! The code before the first slot and after the last one.

#![expect(
    clippy::cast_possible_truncation,
    reason = "the base of GS is a small constant"
)]

use crate::asm::Asm;
use crate::host_cpu::{has_avx512, has_fsgsbase};
use crate::layout::*;
use crate::user::batch::{CS32, CS64, DS, vector_registers};
use crate::user::class::InsnClass;

/// State components of AVX-512: opmask registers, upper halves of ZMM registers, ZMM16 to 31.
const AVX512_COMPONENTS: u32 = 0xe0;

/// Loads all registers that slots may use. It starts in 64-bit code.
pub(super) fn prologue(asm: &mut Asm, class: InsnClass) {
    // MOV EAX, DS; MOV DS, EAX; MOV ES, EAX.
    asm.bytes.push(0xb8);
    asm.bytes.extend(u32::from(DS).to_le_bytes());
    asm.bytes.extend([0x8e, 0xd8, 0x8e, 0xc0]);
    if class == InsnClass::Address && has_fsgsbase() {
        // MOV EAX, imm; WRGSBASE RAX.
        asm.bytes.push(0xb8);
        asm.bytes.extend((GS_BASE as u32).to_le_bytes());
        asm.bytes.extend([0xf3, 0x48, 0x0f, 0xae, 0xd8]);
    }
    for (reg, len) in vector_registers(class) {
        asm.vector(false, reg, len, START_VECTORS + u32::from(reg) * 64);
    }
    if class.has_evex() {
        for k in 0..8 {
            asm.opmask(false, k, START_OPMASKS + u32::from(k) * 8);
        }
    }
    if class.saves_state() && has_avx512() {
        // XGETBV reports which components are in use. The lockstep process itself uses these, and
        // the guest does not: put them into their initial state.
        // MOV EAX, imm; XOR EDX, EDX; XRSTOR.
        asm.bytes.push(0xb8);
        asm.bytes.extend(AVX512_COMPONENTS.to_le_bytes());
        asm.bytes.extend([0x31, 0xd2]);
        asm.xrstor(ZEROS);
    }
    asm.ldmxcsr(START + 0x88);
    // MOV ESP, imm; POPFQ.
    asm.bytes.push(0xbc);
    asm.bytes.extend((asm.base + START + 0x80).to_le_bytes());
    asm.bytes.push(0x9d);
    for reg in 0..16 {
        asm.load(reg, START + u32::from(reg) * 8);
    }
    if class.bits() == 32 {
        asm.jump_to_compat(FAR, CS32.into());
    }
}

/// Stores all registers and jumps out of the batch.
pub(super) fn epilogue(asm: &mut Asm, class: InsnClass) {
    if class.bits() == 32 {
        for reg in 0..8 {
            asm.store(FINAL + u32::from(reg) * 8, reg);
        }
        asm.jump_to_long(CS64);
    } else {
        for reg in 0..16 {
            asm.store(FINAL + u32::from(reg) * 8, reg);
        }
    }
    // MOV ESP, imm; PUSHFQ.
    asm.bytes.push(0xbc);
    asm.bytes.extend((asm.base + FINAL + 0x90).to_le_bytes());
    asm.bytes.push(0x9c);
    asm.stmxcsr(FINAL + 0x98);
    for (reg, len) in vector_registers(class) {
        asm.vector(true, reg, len, FINAL_VECTORS + 0x40 * u32::from(reg));
    }
    if class.has_evex() {
        for k in 0..8 {
            asm.opmask(true, k, FINAL_OPMASKS + u32::from(k) * 8);
        }
    }
    asm.load(4, SAVED_RSP);
    asm.jump_to_cell(RESUME);
}
