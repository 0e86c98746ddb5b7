//! Kinds of instructions, and which instructions can be compared at all.

use crate::host_cpu::has_avx512;
use iced_x86::{
    Code, CodeSize, CpuidFeature as F, EncodingKind, FlowControl, Instruction, Mnemonic as M,
    OpAccess, OpKind, Register,
};
use std::arch::is_x86_feature_detected as host_has;

/// The kind of an instruction, from which its classes follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InsnKind {
    Alu,
    Shift,
    Muldiv,
    Bits,
    String,
    Stack,
    Branch,
    Mov,
    Flags,
    Sse,
    Avx,
    Avx2,
    Avx512,
    X87,
    Mmx,
    Crypto,
    Bmi,
    Xsave,
    /// Always an exception in user mode.
    Trap,
}

impl InsnKind {
    /// Whether it works on general registers, or on the whole extended state.
    pub(super) fn is_integer(self) -> bool {
        matches!(
            self,
            Self::Alu
                | Self::Shift
                | Self::Muldiv
                | Self::Bits
                | Self::String
                | Self::Stack
                | Self::Branch
                | Self::Mov
                | Self::Flags
                | Self::Bmi
                | Self::Xsave
        )
    }
}

/// The kind of an instruction; `None` if it is not compared.
pub(super) fn kind(i: &Instruction) -> Option<InsnKind> {
    if i.is_invalid() || is_excluded(i) || !i.cpuid_features().iter().all(|&f| is_comparable(f)) {
        return None;
    }
    if i.is_privileged() {
        return Some(InsnKind::Trap);
    }
    match i.flow_control() {
        FlowControl::Next => Some(by_mnemonic(i).unwrap_or_else(|| by_feature(i))),
        FlowControl::Interrupt | FlowControl::Exception => is_trap(i).then_some(InsnKind::Trap),
        FlowControl::XbeginXabortXend => None,
        _ => is_near_branch(i).then_some(InsnKind::Branch),
    }
}

fn is_trap(i: &Instruction) -> bool {
    // INT 80H calls the kernel on Linux.
    let system_call = i.mnemonic() == M::Int && i.immediate8() == 0x80;
    matches!(i.mnemonic(), M::Int3 | M::Int | M::Ud2 | M::Ud1) && !system_call
}

fn is_near_branch(i: &Instruction) -> bool {
    let far = i.is_jmp_far() || i.is_jmp_far_indirect() || i.is_call_far();
    let far = far || i.is_call_far_indirect();
    let others = matches!(
        i.mnemonic(),
        M::Retf
            | M::Iret
            | M::Iretd
            | M::Iretq
            | M::Syscall
            | M::Sysenter
            | M::Sysret
            | M::Sysexit
            | M::Loadall
            | M::Jmpe
            | M::Uiret
            | M::Sysretq
            | M::Sysexitq
    );
    !far && !others
}

fn by_mnemonic(i: &Instruction) -> Option<InsnKind> {
    if i.is_string_instruction() || i.mnemonic() == M::Xlatb {
        return Some(InsnKind::String);
    }
    if i.encoding() != EncodingKind::Legacy {
        return None;
    }
    Some(match i.mnemonic() {
        M::Add | M::Or | M::Adc | M::Sbb | M::And | M::Sub | M::Xor | M::Cmp | M::Test => {
            InsnKind::Alu
        }
        M::Inc | M::Dec | M::Neg | M::Not | M::Xadd | M::Cmpxchg | M::Cmpxchg8b => InsnKind::Alu,
        M::Cmpxchg16b | M::Daa | M::Das | M::Aaa | M::Aas | M::Salc => InsnKind::Alu,
        M::Rol | M::Ror | M::Rcl | M::Rcr | M::Shl | M::Sal | M::Shr | M::Sar => InsnKind::Shift,
        M::Shld | M::Shrd => InsnKind::Shift,
        M::Mul | M::Imul | M::Div | M::Idiv | M::Aam | M::Aad => InsnKind::Muldiv,
        M::Bt | M::Bts | M::Btr | M::Btc | M::Bsf | M::Bsr | M::Bswap | M::Popcnt => InsnKind::Bits,
        M::Lzcnt | M::Tzcnt | M::Movbe | M::Crc32 => InsnKind::Bits,
        M::Push | M::Pop | M::Pusha | M::Pushad | M::Popa | M::Popad => InsnKind::Stack,
        M::Enter | M::Leave => InsnKind::Stack,
        M::Clc | M::Stc | M::Cmc | M::Cld | M::Std | M::Lahf | M::Sahf => InsnKind::Flags,
        M::Pushf | M::Pushfd | M::Pushfq | M::Popf | M::Popfd | M::Popfq => InsnKind::Flags,
        M::Fxsave | M::Fxsave64 | M::Fxrstor | M::Fxrstor64 | M::Xsave | M::Xsave64 => {
            InsnKind::Xsave
        }
        M::Xsaveopt
        | M::Xsaveopt64
        | M::Xsavec
        | M::Xsavec64
        | M::Xrstor
        | M::Xrstor64
        | M::Xgetbv => InsnKind::Xsave,
        M::Ldmxcsr | M::Stmxcsr | M::Fnsave | M::Frstor | M::Fldenv | M::Fnstenv => InsnKind::Xsave,
        _ => return None,
    })
}

fn by_feature(i: &Instruction) -> InsnKind {
    let has = |list: &[F]| i.cpuid_features().iter().any(|f| list.contains(f));
    let avx512 = [
        F::AVX512F,
        F::AVX512BW,
        F::AVX512CD,
        F::AVX512DQ,
        F::AVX512VL,
        F::AVX512_IFMA,
        F::AVX512_VBMI,
        F::AVX512_VBMI2,
        F::AVX512_VNNI,
        F::AVX512_BITALG,
        F::AVX512_VPOPCNTDQ,
    ];
    if has(&avx512) || i.encoding() == EncodingKind::EVEX {
        return InsnKind::Avx512;
    }
    if has(&[
        F::AES,
        F::PCLMULQDQ,
        F::SHA,
        F::VAES,
        F::VPCLMULQDQ,
        F::GFNI,
    ]) {
        return InsnKind::Crypto;
    }
    if has(&[F::BMI1, F::BMI2, F::ADX]) {
        return InsnKind::Bmi;
    }
    if has(&[F::AVX2]) {
        return InsnKind::Avx2;
    }
    if i.encoding() != EncodingKind::Legacy {
        return InsnKind::Avx;
    }
    if has(&[F::FPU, F::FPU287, F::FPU387]) {
        return InsnKind::X87;
    }
    let mmx = (0..i.op_count()).any(|n| i.op_register(n).is_mm());
    if mmx || has(&[F::MMX]) {
        return InsnKind::Mmx;
    }
    let vector = [F::SSE, F::SSE2, F::SSE3, F::SSSE3, F::SSE4_1, F::SSE4_2];
    if has(&vector) && !matches!(i.mnemonic(), M::Sfence | M::Lfence | M::Mfence | M::Movnti) {
        return InsnKind::Sse;
    }
    InsnKind::Mov
}

/// Whether the results of an extension can be compared, and host and interpreter both have it.
fn is_comparable(f: F) -> bool {
    let avx512 = has_avx512();
    match f {
        F::INTEL8086 | F::INTEL186 | F::INTEL286 | F::INTEL386 | F::INTEL486 | F::X64 => true,
        F::INTEL8086_ONLY | F::FPU | F::FPU287 | F::FPU387 | F::CMOV | F::CX8 | F::MMX => true,
        F::SSE | F::SSE2 | F::FXSR | F::MULTIBYTENOP | F::CLFSH | F::CMPXCHG16B => true,
        F::MSR | F::PREFETCHW => true,
        F::SSE3 => host_has!("sse3"),
        F::SSSE3 => host_has!("ssse3"),
        F::SSE4_1 => host_has!("sse4.1"),
        F::SSE4_2 => host_has!("sse4.2"),
        F::AVX => host_has!("avx"),
        F::AVX2 => host_has!("avx2"),
        F::FMA => host_has!("fma"),
        F::F16C => host_has!("f16c"),
        F::AES => host_has!("aes"),
        F::PCLMULQDQ => host_has!("pclmulqdq"),
        F::SHA => host_has!("sha"),
        F::GFNI => host_has!("gfni"),
        F::VAES => host_has!("vaes"),
        F::VPCLMULQDQ => host_has!("vpclmulqdq"),
        F::BMI1 => host_has!("bmi1"),
        F::BMI2 => host_has!("bmi2"),
        F::ADX => host_has!("adx"),
        F::LZCNT => host_has!("lzcnt"),
        F::POPCNT => host_has!("popcnt"),
        F::MOVBE => host_has!("movbe"),
        F::XSAVE => host_has!("xsave"),
        F::XSAVEOPT => host_has!("xsaveopt"),
        F::XSAVEC => host_has!("xsavec"),
        F::AVX512F | F::AVX512BW => avx512,
        F::AVX512VL => avx512 && host_has!("avx512vl"),
        F::AVX512DQ => avx512 && host_has!("avx512dq"),
        F::AVX512CD => avx512 && host_has!("avx512cd"),
        F::AVX512_IFMA => avx512 && host_has!("avx512ifma"),
        F::AVX512_VBMI => avx512 && host_has!("avx512vbmi"),
        F::AVX512_VBMI2 => avx512 && host_has!("avx512vbmi2"),
        F::AVX512_VNNI => avx512 && host_has!("avx512vnni"),
        F::AVX512_BITALG => avx512 && host_has!("avx512bitalg"),
        F::AVX512_VPOPCNTDQ => avx512 && host_has!("avx512vpopcntdq"),
        _ => false,
    }
}

/// Whether an instruction must not be executed here, has no result to compare, or differs between
/// processors.
fn is_excluded(i: &Instruction) -> bool {
    let name = matches!(
        i.mnemonic(),
        // They give time, or what the host's kernel has chosen.
        M::Rdtsc | M::Cpuid | M::Sgdt | M::Sidt | M::Sldt | M::Str | M::Smsw
            | M::Lar | M::Lsl | M::Verr | M::Verw | M::Xsetbv | M::Rdpmc
            // Loads of segments.
            | M::Lss | M::Lds | M::Les | M::Lfs | M::Lgs | M::Arpl | M::Bound
            // Kernels may permit them at CPL 3.
            | M::Cli | M::Sti | M::In | M::Out | M::Insb | M::Insw | M::Insd
            | M::Outsb | M::Outsw | M::Outsd
            // Intel and AMD differ.
            | M::Pause | M::Reservednop | M::Sysexit | M::Sysexitq | M::Sysret | M::Sysretq
            | M::Loadall | M::Umov | M::Xbts | M::Ibts | M::Into | M::Int1 | M::Wait
            | M::Fstdw | M::Fstsg | M::Frstpm | M::Fsetpm | M::Fndisi | M::Fneni | M::Fnsetpm
            | M::Fdisi | M::Feni
    );
    let segment = (0..i.op_count()).any(|n| i.op_register(n).is_segment_register());
    let stack_pointer = i.is_stack_instruction()
        && (0..i.op_count()).any(|n| {
            i.op_kind(n) == OpKind::Register && i.op_register(n).full_register() == Register::RSP
        });
    // The result of a 16-bit operation is undefined.
    let undefined = i.mnemonic() == M::Bswap && i.op0_register().size() == 2
        || matches!(i.mnemonic(), M::Shld | M::Shrd)
            && (i.op0_register().size() == 2 || i.memory_size().size() == 2);
    name || segment || stack_pointer || undefined || vendors_differ(i)
}

/// Whether processors of Intel and AMD execute an encoding differently.
fn vendors_differ(i: &Instruction) -> bool {
    // AMD's use a repeat prefix of LOOPcc as its condition.
    let repeated = i.has_rep_prefix() || i.has_repne_prefix();
    let loops = repeated && matches!(i.mnemonic(), M::Loope | M::Loopne);
    // Intel's raise #GP for a misaligned operand of SHA, AMD's do not; the generator can only align
    // a base register.
    let sha = i.cpuid_features().contains(&F::SHA)
        && i.op_kinds().any(|k| k == OpKind::Memory)
        && (i.memory_index() != Register::None || !i.memory_base().is_gpr());
    // Intel's read two bytes, AMD's four.
    let extends = i.code() == Code::Movsxd_r16_rm16;
    // Intel's ignore VEX.W outside 64-bit mode, AMD's raise #UD.
    let moves = matches!(i.mnemonic(), M::Vpextrd | M::Vpinsrd | M::Vmovd);
    loops
        || sha
        || extends
        || moves && i.encoding() == EncodingKind::VEX && i.code_size() == CodeSize::Code32
}

/// Whether processors return different results, so that software has its own.
///
/// These are the estimates, the flags of VREDUCE, and the NaN that VDPPS and VDPPD return.
pub(super) fn results_depend_on_host(m: M) -> bool {
    matches!(
        m,
        M::Vrcpps
            | M::Vrcpss
            | M::Vrcp14ps
            | M::Vrcp14pd
            | M::Vrcp14ss
            | M::Vrcp14sd
            | M::Vrsqrtps
            | M::Vrsqrtss
            | M::Vrsqrt14ps
            | M::Vrsqrt14pd
            | M::Vrsqrt14ss
            | M::Vrsqrt14sd
            | M::Vreduceps
            | M::Vreducepd
            | M::Vreducess
            | M::Vreducesd
            | M::Vdpps
            | M::Vdppd
    )
}

/// Whether vendors differ for a misaligned operand whose mask selects no element.
///
/// They do for the masked moves of exception class E1. By Intel's manual (Table "Type E1 Class
/// Exception Conditions") these raise #GP whatever the mask is; on AMD family 1AH they raise
/// nothing.
pub(super) fn alignment_depends_on_mask(i: &Instruction) -> bool {
    let aligned = matches!(
        i.mnemonic(),
        M::Vmovaps | M::Vmovapd | M::Vmovdqa32 | M::Vmovdqa64
    );
    aligned && i.has_op_mask() && i.op_kinds().any(|k| k == OpKind::Memory)
}

/// Whether an operand access writes.
pub(super) fn writes(a: OpAccess) -> bool {
    matches!(
        a,
        OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
    )
}

/// Whether an operand access reads.
pub(super) fn reads(a: OpAccess) -> bool {
    matches!(
        a,
        OpAccess::Read | OpAccess::CondRead | OpAccess::ReadWrite | OpAccess::ReadCondWrite
    )
}

/// Flags that the manual leaves undefined, as bits of RFLAGS.
pub(super) fn undefined_flags(i: &Instruction) -> u32 {
    use iced_x86::RflagsBits as R;
    let u = i.rflags_undefined();
    let bit = |flag: u32, bit: u32| if u & flag != 0 { bit } else { 0 };
    let listed = bit(R::OF, 0x800)
        | bit(R::SF, 0x80)
        | bit(R::ZF, 0x40)
        | bit(R::AF, 0x10)
        | bit(R::CF, 1)
        | bit(R::PF, 4);
    match i.mnemonic() {
        M::Bsf | M::Bsr => listed | 0x895,
        M::Rcl | M::Rcr => listed | 0x800,
        M::Bt | M::Bts | M::Btr | M::Btc => listed | 0x894,
        _ => listed,
    }
}
