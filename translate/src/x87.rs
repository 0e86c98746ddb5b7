//! Which x87 instructions are translated, and the stubs that load and save the x87 state.
//!
//! The first x87 instruction of a unit loads the guest's state into the host's x87, where it stays
//! until translated code is left. The caller allows that only while all x87 exceptions are masked.
//! The instruction pointer of the saved state is that of the guest, and its opcode and data pointer
//! are unchanged, because only unmasked exceptions record them.

use crate::asm::{ADDR, Assembler, JMP, Rm, TEMP, jcc};
use crate::layout::Context;
use iced_x86::{Instruction, Mnemonic as M, OpKind, Register};
use std::mem::offset_of;

/// Values of [`Context::x87`].
pub(crate) const NOT_LOADED: u32 = 0;
pub(crate) const LOADED: u32 = 1;
pub(crate) const REFUSED: u32 = 2;

/// Condition "not equal".
const NOT_EQUAL: u8 = 5;
/// Offset of FIP in the x87 state.
const FIP: i8 = 8;

/// Whether an x87 instruction is translated.
///
/// Those are left out that access the whole state, and that depend on pending exceptions.
pub(crate) fn is_translated(i: &Instruction) -> bool {
    let excluded = matches!(
        i.mnemonic(),
        M::Fninit | M::Fnclex | M::Fnstenv | M::Fnsave | M::Fldenv | M::Frstor | M::Emms | M::Wait
    ) || matches!(
        i.mnemonic(),
        M::Fcmovb | M::Fcmove | M::Fcmovbe | M::Fcmovu | M::Fcmovnb | M::Fcmovne
    ) || matches!(
        i.mnemonic(),
        M::Fcmovnbe | M::Fcmovnu | M::Fbld | M::Fbstp | M::Fnop
    );
    let address = |r: Register| r == Register::None || r == Register::RIP || r.is_gpr64();
    let plain = |n| match i.op_kind(n) {
        OpKind::Register => i.op_register(n).is_st() || i.op_register(n) == Register::AX,
        OpKind::Memory => address(i.memory_base()) && address(i.memory_index()),
        _ => false,
    };
    is_x87(i)
        && !excluded
        && (0..i.op_count()).all(plain)
        && std::arch::is_x86_feature_detected!("xsave")
}

/// Whether an instruction belongs to the x87.
#[must_use]
pub fn is_x87(i: &Instruction) -> bool {
    use iced_x86::CpuidFeature as F;
    let features = i.cpuid_features();
    features
        .iter()
        .any(|f| matches!(f, F::FPU | F::FPU287 | F::FPU387))
        || (features.contains(&F::SSE3) && i.mnemonic() == M::Fisttp)
}

/// Whether an instruction keeps the x87 instruction pointer.
pub(crate) fn keeps_pointer(i: &Instruction) -> bool {
    matches!(i.mnemonic(), M::Fldcw | M::Fnstcw | M::Fnstsw)
}

/// Emits the subroutine that saves the guest's state and initializes the host's.
///
/// It changes R10, R11 and the flags.
pub(crate) fn emit_save(asm: &mut Assembler, data: u64) -> u64 {
    let context = |offset: usize| Rm::Fixed(data + offset as u64);
    let save = asm.address();
    asm.load(8, ADDR, context(offset_of!(Context, x87_area)));
    // Hosts save different pointers: keep all 18 bytes of them.
    for offset in [6, 14, 16] {
        // PUSH QWORD [R10 + offset]
        asm.bytes(&[0x41, 0xff, 0x72, offset]);
    }
    // XSAVE64 [R10]
    with_component(asm, &[0x49, 0x0f, 0xae, 0x22]);
    for offset in [16, 14, 6] {
        // POP QWORD [R10 + offset]
        asm.bytes(&[0x41, 0x8f, 0x42, offset]);
    }
    asm.load(8, TEMP, context(offset_of!(Context, fip)));
    asm.store(8, Rm::At(ADDR, FIP), TEMP);
    // FNINIT
    asm.bytes(&[0xdb, 0xe3]);
    asm.bytes(&[0xc3]);
    save
}

/// Emits the subroutine that loads the guest's state.
///
/// Units call it with the number of an exit in R11, which it takes through the stub `leave` if the
/// state must not be loaded. It changes R10, R11 and the flags.
pub(crate) fn emit_load(asm: &mut Assembler, data: u64, leave: u64) -> u64 {
    let context = |offset: usize| Rm::Fixed(data + offset as u64);
    let state = context(offset_of!(Context, x87));
    let load = asm.address();
    asm.alu_imm(7, 4, state, NOT_LOADED.cast_signed());
    let refused = asm.jump(&jcc(NOT_EQUAL));
    asm.store_imm(4, state, LOADED.cast_signed());
    asm.load(8, ADDR, context(offset_of!(Context, x87_area)));
    asm.load(8, TEMP, Rm::At(ADDR, FIP));
    asm.store(8, context(offset_of!(Context, fip)), TEMP);
    // MOV BYTE [R10 + 512], 1: the area holds the x87 state.
    asm.bytes(&[0x41, 0xc6, 0x82, 0, 2, 0, 0, 1]);
    // XRSTOR64 [R10]
    with_component(asm, &[0x49, 0x0f, 0xae, 0x2a]);
    asm.bytes(&[0xc3]);
    asm.here(refused);
    // Drop the return address: ADD RSP, 8
    asm.bytes(&[0x48, 0x83, 0xc4, 8]);
    asm.jump_to(JMP, leave);
    load
}

/// Emits an instruction of the XSAVE feature set for the x87 state alone.
fn with_component(asm: &mut Assembler, instruction: &[u8]) {
    // PUSH RAX; PUSH RDX; MOV EAX, 1; XOR EDX, EDX
    asm.bytes(&[0x50, 0x52, 0xb8, 1, 0, 0, 0, 0x31, 0xd2]);
    asm.bytes(instruction);
    // POP RDX; POP RAX
    asm.bytes(&[0x5a, 0x58]);
}
