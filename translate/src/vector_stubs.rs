//! Shared code that loads the guest's vector registers into the host's, and stores them.

use crate::asm::{ADDR, Assembler, CALL, JMP, Rm, jcc};
use crate::emit::named;
use crate::layout::Context;
use crate::vector::VectorLevel;
use iced_x86::{Code, Encoder, Instruction, MemoryOperand, Register};
use std::mem::offset_of;

const LOADED: usize = offset_of!(Context, vectors_loaded);
const ALLOWED: usize = offset_of!(Context, vectors_allowed);
const MXCSR: usize = offset_of!(Context, mxcsr);
const HOST_MXCSR: usize = offset_of!(Context, host_mxcsr);

/// Condition "below".
const BELOW: u8 = 2;
/// Condition "above or equal".
const ABOVE_OR_EQUAL: u8 = 3;
/// Condition "equal".
const EQUAL: u8 = 4;

/// Addresses of subroutines. They change R10 and the flags, and no other register of the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VectorStubs {
    /// Stores what is loaded.
    pub(crate) save: u64,
    /// Loads it again.
    pub(crate) restore: u64,
}

/// Emits the subroutines; `data` is the address of the context.
pub(crate) fn emit(asm: &mut Assembler, data: u64) -> VectorStubs {
    let context = |offset: usize| Rm::Fixed(data + offset as u64);
    let wide = wide_moves();
    let narrow = (
        Code::Movups_xmm_xmmm128,
        Code::Movups_xmmm128_xmm,
        Register::XMM0,
    );

    let save = asm.address();
    asm.load(8, ADDR, context(offset_of!(Context, vectors)));
    asm.alu_imm(7, 4, context(LOADED), VectorLevel::Avx as i32);
    let whole = asm.jump(&jcc(ABOVE_OR_EQUAL));
    each(asm, |register, at| {
        Instruction::with2(narrow.1, at, narrow.2 + register)
    });
    let end = asm.jump(JMP);
    asm.here(whole);
    each(asm, |register, at| {
        Instruction::with2(wide.1, at, wide.2 + register)
    });
    // VZEROUPPER
    asm.bytes(&[0xc5, 0xf8, 0x77]);
    asm.here(end);
    asm.encode(&[0x0f, 0xae], 4, 3, context(MXCSR), 0);
    asm.encode(&[0x0f, 0xae], 4, 2, context(HOST_MXCSR), 0);
    asm.bytes(&[0xc3]);

    let restore = asm.address();
    asm.encode(&[0x0f, 0xae], 4, 2, context(MXCSR), 0);
    asm.load(8, ADDR, context(offset_of!(Context, vectors)));
    asm.alu_imm(7, 4, context(LOADED), VectorLevel::Avx as i32);
    let whole = asm.jump(&jcc(ABOVE_OR_EQUAL));
    each(asm, |register, at| {
        Instruction::with2(narrow.0, narrow.2 + register, at)
    });
    asm.bytes(&[0xc3]);
    asm.here(whole);
    each(asm, |register, at| {
        Instruction::with2(wide.0, wide.2 + register, at)
    });
    asm.bytes(&[0xc3]);
    VectorStubs { save, restore }
}

/// Emits what units call to have the registers loaded up to each level, with the number of an exit
/// in R11 that is taken if the guest may not use them; `leave` is where units are left.
pub(crate) fn emit_load(
    asm: &mut Assembler,
    data: u64,
    stubs: VectorStubs,
    leave: u64,
) -> [u64; 2] {
    let context = |offset: usize| Rm::Fixed(data + offset as u64);
    [VectorLevel::Sse, VectorLevel::Avx].map(|level| {
        let load = asm.address();
        asm.alu_imm(7, 4, context(ALLOWED), level as i32);
        let refused = asm.jump(&jcc(BELOW));
        if level == VectorLevel::Avx {
            asm.alu_imm(7, 4, context(LOADED), 0);
            let none = asm.jump(&jcc(EQUAL));
            asm.jump_to(CALL, stubs.save);
            asm.here(none);
        }
        asm.store_imm(4, context(LOADED), level as i32);
        asm.jump_to(JMP, stubs.restore);
        asm.here(refused);
        // The return address: ADD RSP, 8
        asm.bytes(&[0x48, 0x83, 0xc4, 8]);
        asm.jump_to(JMP, leave);
        load
    })
}

/// Emits a call of a subroutine, unless no vector registers are loaded.
pub(crate) fn call_if_loaded(asm: &mut Assembler, data: u64, subroutine: u64) {
    asm.alu_imm(7, 4, Rm::Fixed(data + LOADED as u64), 0);
    let none = asm.jump(&jcc(EQUAL));
    asm.jump_to(CALL, subroutine);
    asm.here(none);
}

/// Emits an instruction for each of the sixteen registers, and the memory of the guest's register at
/// R10.
fn each(
    asm: &mut Assembler,
    instruction: impl Fn(u32, MemoryOperand) -> Result<Instruction, iced_x86::IcedError>,
) {
    let mut encoder = Encoder::new(64);
    for register in 0..16 {
        let at = MemoryOperand::with_base_displ(named(ADDR, 8), i64::from(register) * 64);
        let made = instruction(register, at).and_then(|i| encoder.encode(&i, asm.address()));
        debug_assert!(made.is_ok());
        asm.bytes(&encoder.take_buffer());
    }
}

/// The moves that load and store all of a register that VEX instructions change, and the first
/// register.
fn wide_moves() -> (Code, Code, Register) {
    if std::arch::is_x86_feature_detected!("avx512f") {
        (
            Code::EVEX_Vmovups_zmm_k1z_zmmm512,
            Code::EVEX_Vmovups_zmmm512_k1z_zmm,
            Register::ZMM0,
        )
    } else {
        (
            Code::VEX_Vmovups_ymm_ymmm256,
            Code::VEX_Vmovups_ymmm256_ymm,
            Register::YMM0,
        )
    }
}
