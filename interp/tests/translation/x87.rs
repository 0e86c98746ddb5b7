//! Generates random x87 instructions and initial x87 registers.

use super::program::Program;
use super::random::Random;
use hindsight_cpu::state::CpuState;
use iced_x86::{Code, Instruction, Register};

/// Instructions with a memory operand.
const MEMORY: [Code; 49] = [
    Code::Fld_m32fp,
    Code::Fld_m64fp,
    Code::Fld_m80fp,
    Code::Fst_m32fp,
    Code::Fst_m64fp,
    Code::Fstp_m32fp,
    Code::Fstp_m64fp,
    Code::Fstp_m80fp,
    Code::Fild_m16int,
    Code::Fild_m32int,
    Code::Fild_m64int,
    Code::Fist_m16int,
    Code::Fist_m32int,
    Code::Fistp_m16int,
    Code::Fistp_m32int,
    Code::Fistp_m64int,
    Code::Fisttp_m16int,
    Code::Fisttp_m32int,
    Code::Fisttp_m64int,
    Code::Fadd_m32fp,
    Code::Fmul_m32fp,
    Code::Fcom_m32fp,
    Code::Fcomp_m32fp,
    Code::Fsub_m32fp,
    Code::Fsubr_m32fp,
    Code::Fdiv_m32fp,
    Code::Fdivr_m32fp,
    Code::Fadd_m64fp,
    Code::Fmul_m64fp,
    Code::Fcom_m64fp,
    Code::Fcomp_m64fp,
    Code::Fsub_m64fp,
    Code::Fsubr_m64fp,
    Code::Fdiv_m64fp,
    Code::Fdivr_m64fp,
    Code::Fiadd_m16int,
    Code::Fimul_m16int,
    Code::Ficom_m16int,
    Code::Fisub_m32int,
    Code::Fidivr_m32int,
    Code::Fiadd_m32int,
    Code::Ficomp_m32int,
    Code::Fnstsw_m2byte,
    Code::Fnstcw_m2byte,
    Code::Fbld_m80bcd,
    Code::Fbstp_m80bcd,
    Code::Fnstenv_m28byte,
    Code::Fldenv_m28byte,
    Code::Fldcw_m2byte,
];

/// Instructions whose operands are ST(0) and ST(i), in both orders, or ST(i) alone.
const FROM_STACK: [Code; 16] = [
    Code::Fadd_st0_sti,
    Code::Fmul_st0_sti,
    Code::Fsub_st0_sti,
    Code::Fsubr_st0_sti,
    Code::Fdiv_st0_sti,
    Code::Fdivr_st0_sti,
    Code::Fcom_st0_sti,
    Code::Fcomp_st0_sti,
    Code::Fucom_st0_sti,
    Code::Fucomp_st0_sti,
    Code::Fcomi_st0_sti,
    Code::Fcomip_st0_sti,
    Code::Fucomi_st0_sti,
    Code::Fucomip_st0_sti,
    Code::Fxch_st0_sti,
    Code::Fcmovb_st0_sti,
];
const TO_STACK: [Code; 12] = [
    Code::Fadd_sti_st0,
    Code::Fmul_sti_st0,
    Code::Fsub_sti_st0,
    Code::Fsubr_sti_st0,
    Code::Fdiv_sti_st0,
    Code::Fdivr_sti_st0,
    Code::Faddp_sti_st0,
    Code::Fmulp_sti_st0,
    Code::Fsubp_sti_st0,
    Code::Fsubrp_sti_st0,
    Code::Fdivp_sti_st0,
    Code::Fdivrp_sti_st0,
];
const ONE: [Code; 4] = [
    Code::Fld_sti,
    Code::Fst_sti,
    Code::Fstp_sti,
    Code::Ffree_sti,
];
const PLAIN: [Code; 32] = [
    Code::Fchs,
    Code::Fabs,
    Code::Ftst,
    Code::Fxam,
    Code::Fld1,
    Code::Fldl2t,
    Code::Fldl2e,
    Code::Fldpi,
    Code::Fldlg2,
    Code::Fldln2,
    Code::Fldz,
    Code::F2xm1,
    Code::Fyl2x,
    Code::Fptan,
    Code::Fpatan,
    Code::Fxtract,
    Code::Fprem1,
    Code::Fdecstp,
    Code::Fincstp,
    Code::Fprem,
    Code::Fyl2xp1,
    Code::Fsqrt,
    Code::Fsincos,
    Code::Frndint,
    Code::Fscale,
    Code::Fsin,
    Code::Fcos,
    Code::Fucompp,
    Code::Fcompp,
    Code::Wait,
    Code::Fnop,
    Code::Fnclex,
];

/// Fills the x87 registers with numbers of all kinds; some are empty.
pub fn enable(state: &mut CpuState, random: &mut Random) {
    let area = &mut state.xsave.0;
    // XSTATE_BV: the area holds the x87 state.
    area[512] |= 1;
    let control = 0x7f | (random.below(16) << 8 & 0xf00) as u16;
    area[0..2].copy_from_slice(&control.to_le_bytes());
    area[2..4].copy_from_slice(&((random.below(8) as u16) << 11).to_le_bytes());
    area[4] = random.value() as u8;
    for register in 0..8 {
        let at = 32 + register * 16;
        let exponent = match random.below(4) {
            0 => random.value() as u16,
            1 => 0x7fff | (random.below(2) as u16) << 15,
            _ => 0x3ff0 + random.below(32) as u16,
        };
        let integer = u64::from(!random.chance(10)) << 63;
        let mantissa = random.next() >> 1 | integer;
        area[at..at + 8].copy_from_slice(&mantissa.to_le_bytes());
        area[at + 8..at + 10].copy_from_slice(&exponent.to_le_bytes());
    }
}

/// Adds a random x87 instruction.
pub fn add_instruction(program: &mut Program) {
    let stack = Register::ST0 + program.random.below(8) as u32;
    let instruction = match program.random.below(8) {
        0..=2 => {
            // The last one loads a random control word, which most often unmasks an exception.
            let last = usize::from(program.random.chance(20));
            let codes = &MEMORY[..MEMORY.len() - 1 + last];
            let memory = program.memory();
            Instruction::with1(program.random.pick(codes), memory)
        }
        3 => Instruction::with2(program.random.pick(&FROM_STACK), Register::ST0, stack),
        4 => Instruction::with2(program.random.pick(&TO_STACK), stack, Register::ST0),
        5 => Instruction::with1(program.random.pick(&ONE), stack),
        6 if program.random.chance(4) => Instruction::with1(Code::Fnstsw_AX, Register::AX),
        _ => Ok(Instruction::with(program.random.pick(&PLAIN))),
    };
    program.add(instruction);
}
