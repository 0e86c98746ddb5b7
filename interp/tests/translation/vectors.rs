//! Generates random vector instructions and initial vector registers.

use super::program::Program;
use super::random::Random;
use hindsight_cpu::state::CpuState;
use iced_x86::{
    Code, CpuidFeature as F, EncodingKind, Instruction, OpCodeOperandKind as K, OpKind, Register,
};
use std::sync::OnceLock;

/// Returns the vector instructions that this host has, without those on MMX.
fn codes() -> &'static [Code] {
    static CODES: OnceLock<Vec<Code>> = OnceLock::new();
    CODES.get_or_init(|| {
        let all = Code::values().filter(|code| {
            let features = code.cpuid_features();
            let info = code.op_code();
            !features.is_empty()
                && features.iter().all(|f| host_has(*f))
                && info.mode64()
                && info.op_kinds().iter().all(|k| operand(*k).is_some())
                && !matches!(code, Code::Ldmxcsr_m32 | Code::VEX_Vldmxcsr_m32)
        });
        all.collect()
    })
}

fn host_has(feature: F) -> bool {
    use std::arch::is_x86_feature_detected as has;
    match feature {
        F::SSE | F::SSE2 => true,
        F::SSE3 => has!("sse3"),
        F::SSSE3 => has!("ssse3"),
        F::SSE4_1 => has!("sse4.1"),
        F::SSE4_2 => has!("sse4.2"),
        F::AES => has!("aes"),
        F::PCLMULQDQ => has!("pclmulqdq"),
        F::SHA => has!("sha"),
        F::AVX => has!("avx"),
        F::AVX2 => has!("avx2"),
        F::GFNI => has!("gfni"),
        F::VAES => has!("vaes"),
        F::VPCLMULQDQ => has!("vpclmulqdq"),
        F::FMA => has!("fma"),
        F::F16C => has!("f16c"),
        F::AVX512F => has!("avx512f"),
        F::AVX512BW => has!("avx512bw"),
        F::AVX512DQ => has!("avx512dq"),
        F::AVX512VL => has!("avx512vl"),
        F::AVX512CD => has!("avx512cd"),
        F::AVX512_IFMA => has!("avx512ifma"),
        F::AVX512_VBMI => has!("avx512vbmi"),
        F::AVX512_VBMI2 => has!("avx512vbmi2"),
        F::AVX512_VNNI => has!("avx512vnni"),
        F::AVX512_BITALG => has!("avx512bitalg"),
        F::AVX512_VPOPCNTDQ => has!("avx512vpopcntdq"),
        _ => false,
    }
}

/// The kinds of operand that an instruction allows.
#[derive(Clone, Copy)]
struct Choice {
    register: Option<Register>,
    memory: bool,
    immediate: bool,
}

fn operand(kind: K) -> Option<Choice> {
    let register = match kind {
        K::xmm_reg | K::xmm_rm | K::xmm_vvvv | K::xmm_is4 | K::xmm_or_mem => Some(Register::XMM0),
        K::ymm_reg | K::ymm_rm | K::ymm_vvvv | K::ymm_is4 | K::ymm_or_mem => Some(Register::YMM0),
        K::r32_reg | K::r32_rm | K::r32_or_mem => Some(Register::EAX),
        K::r64_reg | K::r64_rm | K::r64_or_mem => Some(Register::RAX),
        K::r8_or_mem => Some(Register::AL),
        K::r16_or_mem => Some(Register::AX),
        K::zmm_reg | K::zmm_rm | K::zmm_vvvv | K::zmm_or_mem => Some(Register::ZMM0),
        K::k_reg | K::k_rm | K::k_vvvv | K::k_or_mem => Some(Register::K0),
        K::mem | K::imm8 => None,
        _ => return None,
    };
    Some(Choice {
        register,
        memory: matches!(
            kind,
            K::mem
                | K::xmm_or_mem
                | K::ymm_or_mem
                | K::zmm_or_mem
                | K::k_or_mem
                | K::r8_or_mem
                | K::r16_or_mem
                | K::r32_or_mem
                | K::r64_or_mem
        ),
        immediate: kind == K::imm8,
    })
}

/// Adds a vector instruction to a program.
pub fn add_instruction(program: &mut Program) {
    let code = program.random.pick(codes());
    let mut i = Instruction::default();
    i.set_code(code);
    let evex = code.op_code().encoding() == EncodingKind::EVEX;
    if code.op_code().can_use_op_mask_register() && program.random.chance(2) {
        i.set_op_mask(Register::K1 + program.random.below(7) as u32);
        let zero = code.op_code().can_use_zeroing_masking() && program.random.chance(2);
        i.set_zeroing_masking(zero);
    }
    for (n, kind) in (0..).zip(code.op_code().op_kinds()) {
        let Some(choice) = operand(*kind) else { return };
        if choice.immediate {
            i.set_op_kind(n, OpKind::Immediate8);
            i.set_immediate8(program.random.next() as u8);
        } else if let Some(first) = choice.register
            && (!choice.memory || program.random.chance(2))
        {
            let register = match first {
                Register::XMM0 | Register::YMM0 | Register::ZMM0 => {
                    first + program.random.below(if evex { 32 } else { 16 }) as u32
                }
                Register::K0 => first + program.random.below(8) as u32,
                Register::AL => program.register(1),
                Register::AX => program.register(2),
                Register::EAX => program.register(4),
                _ => program.register(8),
            };
            i.set_op_kind(n, OpKind::Register);
            i.set_op_register(n, register);
        } else {
            i.set_op_kind(n, OpKind::Memory);
            let unaligned = program.random.chance(60);
            let at = program.random.below(0x1800) & if unaligned { !0 } else { !63 };
            i.set_memory_base(program.base);
            i.set_memory_displ_size(8);
            i.set_memory_displacement64(at);
        }
    }
    program.add(Ok(i));
}

/// Returns a floating-point number that is often a special value.
fn number(random: &mut Random) -> u64 {
    let special = [0, 1, 0x7ff0, 0x7ff8, 0x8000, 0xfff0, 0x3ff0, 0xbff0, 0x0010];
    let short = [0, 0x7f80, 0xff80, 0x8000, 0x3f80, 0x7fc0, 0x0080, 1];
    match random.below(4) {
        0 => random.pick(&special) << 48 | random.below(2),
        1 => random.pick(&short) << 48 | random.pick(&short) << 16,
        2 => 0x3ff0_0000_0000_0000 + (random.next() >> 12),
        _ => random.next(),
    }
}

/// Enables the vector registers and fills them with random values.
pub fn enable(state: &mut CpuState, random: &mut Random) {
    const OSFXSR: u64 = 1 << 9;
    const OSXMMEXCPT: u64 = 1 << 10;
    const OSXSAVE: u64 = 1 << 18;
    let avx = std::arch::is_x86_feature_detected!("avx") && !random.chance(8);
    state.cr4 |= OSFXSR | OSXMMEXCPT | OSXSAVE;
    let avx512 = avx
        && std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && !random.chance(4);
    let components: u8 = match (avx512, avx) {
        (true, _) => 0xe7,
        (_, true) => 7,
        _ => 3,
    };
    state.xcr0 = components.into();
    let area = &mut state.xsave.0;
    let mut masks = 0x1f80_u32;
    if random.chance(8) {
        masks &= random.next() as u32;
    }
    let modes = random.next() as u32 & 0xe040;
    area[24..28].copy_from_slice(&(masks | modes).to_le_bytes());
    for at in (160..416).chain(576..832).chain(1088..2688).step_by(8) {
        area[at..at + 8].copy_from_slice(&number(random).to_le_bytes());
    }
    area[512] = components;
}
