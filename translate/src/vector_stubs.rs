//! Stubs that load the guest's vector registers into the host's, and save them.

use crate::asm::{ADDR, Assembler, CALL, JMP, Rm, jcc};
use crate::emit::named;
use crate::layout::Context;
use crate::vector::VectorLevel;
use iced_x86::{Code, Encoder, Instruction, MemoryOperand, Register};
use std::mem::offset_of;
use std::ops::Range;

const LOADED: usize = offset_of!(Context, vectors_loaded);
const ALLOWED: usize = offset_of!(Context, vectors_allowed);
const MXCSR: usize = offset_of!(Context, mxcsr);
const HOST_MXCSR: usize = offset_of!(Context, host_mxcsr);

/// Condition "below".
const BELOW: u8 = 2;
/// Condition "equal".
const EQUAL: u8 = 4;

/// Addresses of the subroutines that save and restore the loaded vector registers.
///
/// They change R10 and the flags, and no other register of the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VectorStubs {
    /// Saves the registers that are loaded.
    pub(crate) save: u64,
    /// Loads the same registers again.
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

    let mask = (
        Code::VEX_Kmovq_kr_km64,
        Code::VEX_Kmovq_m64_kr,
        Register::K0,
    );
    let level = |asm: &mut Assembler| {
        asm.load(8, ADDR, context(offset_of!(Context, vectors)));
        asm.alu_imm(7, 4, context(LOADED), VectorLevel::Avx as i32);
        let narrow = asm.jump(&jcc(BELOW));
        let low = asm.jump(&jcc(EQUAL));
        (narrow, low)
    };

    let save = asm.address();
    let (only_low_halves, only_low) = level(asm);
    if avx512() {
        each(asm, 16..32, 64, |r, at| {
            Instruction::with2(wide.1, at, wide.2 + r)
        });
        masks(asm, |r, at| Instruction::with2(mask.1, at, mask.2 + r));
    }
    asm.here(only_low);
    each(asm, 0..16, 64, |r, at| {
        Instruction::with2(wide.1, at, wide.2 + r)
    });
    // VZEROUPPER
    asm.bytes(&[0xc5, 0xf8, 0x77]);
    let end = asm.jump(JMP);
    asm.here(only_low_halves);
    each(asm, 0..16, 64, |r, at| {
        Instruction::with2(narrow.1, at, narrow.2 + r)
    });
    asm.here(end);
    asm.encode(&[0x0f, 0xae], 4, 3, context(MXCSR), 0);
    asm.encode(&[0x0f, 0xae], 4, 2, context(HOST_MXCSR), 0);
    asm.bytes(&[0xc3]);

    let restore = asm.address();
    asm.encode(&[0x0f, 0xae], 4, 2, context(MXCSR), 0);
    let (only_low_halves, only_low) = level(asm);
    if avx512() {
        each(asm, 16..32, 64, |r, at| {
            Instruction::with2(wide.0, wide.2 + r, at)
        });
        masks(asm, |r, at| Instruction::with2(mask.0, mask.2 + r, at));
    }
    asm.here(only_low);
    each(asm, 0..16, 64, |r, at| {
        Instruction::with2(wide.0, wide.2 + r, at)
    });
    asm.bytes(&[0xc3]);
    asm.here(only_low_halves);
    each(asm, 0..16, 64, |r, at| {
        Instruction::with2(narrow.0, narrow.2 + r, at)
    });
    asm.bytes(&[0xc3]);
    VectorStubs { save, restore }
}

/// Emits a subroutine for each [`VectorLevel`] that loads its registers.
///
/// Units call it with the number of an exit in R11. It takes that exit, through the stub `leave`,
/// if the guest may not use the registers.
pub(crate) fn emit_load(
    asm: &mut Assembler,
    data: u64,
    stubs: VectorStubs,
    leave: u64,
) -> [u64; 3] {
    let context = |offset: usize| Rm::Fixed(data + offset as u64);
    [VectorLevel::Sse, VectorLevel::Avx, VectorLevel::Avx512].map(|level| {
        let load = asm.address();
        asm.alu_imm(7, 4, context(ALLOWED), level as i32);
        let refused = asm.jump(&jcc(BELOW));
        if level > VectorLevel::Sse {
            asm.alu_imm(7, 4, context(LOADED), 0);
            let none = asm.jump(&jcc(EQUAL));
            asm.jump_to(CALL, stubs.save);
            asm.here(none);
        }
        asm.store_imm(4, context(LOADED), level as i32);
        asm.jump_to(JMP, stubs.restore);
        asm.here(refused);
        // Drop the return address: ADD RSP, 8
        asm.bytes(&[0x48, 0x83, 0xc4, 8]);
        asm.jump_to(JMP, leave);
        load
    })
}

/// Emits a call of a subroutine that is skipped if no vector registers are loaded.
pub(crate) fn call_if_loaded(asm: &mut Assembler, data: u64, subroutine: u64) {
    asm.alu_imm(7, 4, Rm::Fixed(data + LOADED as u64), 0);
    let none = asm.jump(&jcc(EQUAL));
    asm.jump_to(CALL, subroutine);
    asm.here(none);
}

/// Emits an instruction for each register of a range.
///
/// Its memory operand is at R10 plus `size` bytes times the register's number.
fn each(
    asm: &mut Assembler,
    registers: Range<u32>,
    size: i64,
    instruction: impl Fn(u32, MemoryOperand) -> Result<Instruction, iced_x86::IcedError>,
) {
    let mut encoder = Encoder::new(64);
    for register in registers {
        let at = MemoryOperand::with_base_displ(named(ADDR, 8), i64::from(register) * size);
        let made = instruction(register, at).and_then(|i| encoder.encode(&i, asm.address()));
        debug_assert!(made.is_ok());
        asm.bytes(&encoder.take_buffer());
    }
}

/// Emits an instruction for each opmask register, with its memory operand.
fn masks(
    asm: &mut Assembler,
    instruction: impl Fn(u32, MemoryOperand) -> Result<Instruction, iced_x86::IcedError>,
) {
    asm.lea(ADDR, ADDR, 32 * 64);
    each(asm, 0..8, 8, instruction);
    asm.lea(ADDR, ADDR, -32 * 64);
}

/// Whether the host has the registers of AVX-512.
fn avx512() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("avx512f") && has!("avx512bw")
}

/// Returns the codes that load and store a full register, and the first register.
///
/// The full width is what VEX instructions change: ZMM if the host has AVX-512, else YMM.
#[must_use]
pub fn wide_moves() -> (Code, Code, Register) {
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
