//! Classes of instructions: what is compared together, and counted.

use iced_x86::{
    Code, CodeSize, CpuidFeature as F, EncodingKind, FlowControl, Instruction, Mnemonic as M,
    OpKind,
};
use iced_x86::{OpAccess, Register};
use std::arch::is_x86_feature_detected as host_has;

/// A class of user-mode instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Class {
    /// Additions, logic, comparisons, exchanges with arithmetic, decimal adjustments.
    Alu,
    /// Shifts and rotates.
    Shift,
    /// Multiplications and divisions.
    Muldiv,
    /// Bit tests and scans, byte swaps, population counts, CRC32.
    Bits,
    /// String instructions with and without repetition, XLAT.
    String,
    /// PUSH, POP, ENTER, LEAVE.
    Stack,
    /// Near branches, taken and not, behind random flags.
    Branch,
    /// Moves, conversions, LEA, CMOVcc, SETcc, hints.
    Mov,
    /// Instructions on flags alone.
    Flags,
    /// SSE to SSE4.2 in their legacy encoding.
    Sse,
    /// AVX, FMA and F16C.
    Avx,
    /// AVX2 with its gathers.
    Avx2,
    /// AVX-512.
    Avx512,
    /// The x87.
    X87,
    /// MMX.
    Mmx,
    /// AES, PCLMULQDQ, SHA, GFNI and their vector forms.
    Crypto,
    /// BMI1, BMI2 and ADX.
    Bmi,
    /// Saving and restoring the extended state.
    Xsave,
    /// Integer instructions with segment overrides and 32-bit addresses.
    Address,
    /// LOCK and XCHG with memory.
    Lock,
    /// Accesses that fault, privileged instructions, software interrupts.
    Fault,
    /// Integer instructions in compatibility mode.
    Compat,
    /// Vector and x87 instructions in compatibility mode.
    CompatVector,
}

/// All classes, in the order of the reports.
pub const ALL: [Class; 23] = [
    Class::Alu,
    Class::Shift,
    Class::Muldiv,
    Class::Bits,
    Class::String,
    Class::Stack,
    Class::Branch,
    Class::Mov,
    Class::Flags,
    Class::Sse,
    Class::Avx,
    Class::Avx2,
    Class::Avx512,
    Class::X87,
    Class::Mmx,
    Class::Crypto,
    Class::Bmi,
    Class::Xsave,
    Class::Address,
    Class::Lock,
    Class::Fault,
    Class::Compat,
    Class::CompatVector,
];

impl Class {
    /// Its name on the command line and in reports.
    pub fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self)
            .map_or_else(String::new, |v| v.get_name().to_owned())
    }

    /// 32 for compatibility mode, else 64.
    pub fn bits(self) -> u32 {
        if matches!(self, Self::Compat | Self::CompatVector) {
            32
        } else {
            64
        }
    }

    /// Whether the x87 and MMX state is compared.
    pub fn has_x87(self) -> bool {
        matches!(
            self,
            Self::X87 | Self::Mmx | Self::Xsave | Self::CompatVector
        )
    }

    /// Whether its instructions may use opmask and 512-bit vector registers on this host.
    pub fn has_evex(self) -> bool {
        let holds_evex = matches!(self, Self::Avx512 | Self::Fault | Self::CompatVector);
        holds_evex && has_avx512()
    }

    /// Whether an instruction of the kind `of` may appear in this class.
    pub fn has(self, of: Kind, i: &Instruction) -> bool {
        use Kind as K;
        let memory = i.op_kinds().any(|k| k == OpKind::Memory);
        match self {
            Self::Address => {
                let integer = matches!(
                    of,
                    K::Alu | K::Mov | K::Bits | K::Shift | K::String | K::Muldiv
                );
                integer && (memory || of == K::String)
            }
            Self::Lock => memory && locked(i),
            Self::Fault => {
                // The x87's registers are not set up here.
                let other = matches!(of, K::Xsave | K::Branch | K::X87 | K::Mmx);
                of == K::Trap || (memory || of == K::Stack || of == K::String) && !other
            }
            Self::Compat => of.integer() && of != K::Xsave,
            Self::CompatVector => !of.integer() && of != K::Trap,
            _ => of.class() == Some(self),
        }
    }

    /// Whether this host can execute instructions of the class.
    pub fn on_this_host(self) -> bool {
        match self {
            Self::Avx => host_has!("avx"),
            Self::Avx2 => host_has!("avx2"),
            Self::Avx512 => has_avx512(),
            Self::Crypto => host_has!("aes"),
            Self::Bmi => host_has!("bmi1"),
            Self::Xsave => host_has!("xsave"),
            _ => true,
        }
    }
}

/// What an instruction is, for [`Class::has`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of the classes")]
pub enum Kind {
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

impl Kind {
    fn class(self) -> Option<Class> {
        Some(match self {
            Self::Alu => Class::Alu,
            Self::Shift => Class::Shift,
            Self::Muldiv => Class::Muldiv,
            Self::Bits => Class::Bits,
            Self::String => Class::String,
            Self::Stack => Class::Stack,
            Self::Branch => Class::Branch,
            Self::Mov => Class::Mov,
            Self::Flags => Class::Flags,
            Self::Sse => Class::Sse,
            Self::Avx => Class::Avx,
            Self::Avx2 => Class::Avx2,
            Self::Avx512 => Class::Avx512,
            Self::X87 => Class::X87,
            Self::Mmx => Class::Mmx,
            Self::Crypto => Class::Crypto,
            Self::Bmi => Class::Bmi,
            Self::Xsave => Class::Xsave,
            Self::Trap => return None,
        })
    }

    /// Works on general registers, or on the whole extended state.
    pub fn integer(self) -> bool {
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

/// XCHG with memory, or anything that may have LOCK with a memory destination.
fn locked(i: &Instruction) -> bool {
    i.mnemonic() == M::Xchg || i.op_code().can_use_lock_prefix()
}

/// What an instruction is; None if it is not compared.
pub fn kind(i: &Instruction) -> Option<Kind> {
    if i.is_invalid() || excluded(i) || !i.cpuid_features().iter().all(|&f| comparable(f)) {
        return None;
    }
    if i.is_privileged() {
        return Some(Kind::Trap);
    }
    match i.flow_control() {
        FlowControl::Next => Some(by_mnemonic(i).unwrap_or_else(|| by_feature(i))),
        FlowControl::Interrupt | FlowControl::Exception => trap(i),
        FlowControl::XbeginXabortXend => None,
        _ => near(i).then_some(Kind::Branch),
    }
}

fn trap(i: &Instruction) -> Option<Kind> {
    // INT 80H is Linux's way in.
    let system_call = i.mnemonic() == M::Int && i.immediate8() == 0x80;
    (matches!(i.mnemonic(), M::Int3 | M::Int | M::Ud2 | M::Ud1) && !system_call)
        .then_some(Kind::Trap)
}

fn near(i: &Instruction) -> bool {
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

fn by_mnemonic(i: &Instruction) -> Option<Kind> {
    if i.is_string_instruction() || i.mnemonic() == M::Xlatb {
        return Some(Kind::String);
    }
    if i.encoding() != EncodingKind::Legacy {
        return None;
    }
    Some(match i.mnemonic() {
        M::Add | M::Or | M::Adc | M::Sbb | M::And | M::Sub | M::Xor | M::Cmp | M::Test => Kind::Alu,
        M::Inc | M::Dec | M::Neg | M::Not | M::Xadd | M::Cmpxchg | M::Cmpxchg8b => Kind::Alu,
        M::Cmpxchg16b | M::Daa | M::Das | M::Aaa | M::Aas | M::Salc => Kind::Alu,
        M::Rol | M::Ror | M::Rcl | M::Rcr | M::Shl | M::Sal | M::Shr | M::Sar => Kind::Shift,
        M::Shld | M::Shrd => Kind::Shift,
        M::Mul | M::Imul | M::Div | M::Idiv | M::Aam | M::Aad => Kind::Muldiv,
        M::Bt | M::Bts | M::Btr | M::Btc | M::Bsf | M::Bsr | M::Bswap | M::Popcnt => Kind::Bits,
        M::Lzcnt | M::Tzcnt | M::Movbe | M::Crc32 => Kind::Bits,
        M::Push | M::Pop | M::Pusha | M::Pushad | M::Popa | M::Popad => Kind::Stack,
        M::Enter | M::Leave => Kind::Stack,
        M::Clc | M::Stc | M::Cmc | M::Cld | M::Std | M::Lahf | M::Sahf => Kind::Flags,
        M::Pushf | M::Pushfd | M::Pushfq | M::Popf | M::Popfd | M::Popfq => Kind::Flags,
        M::Fxsave | M::Fxsave64 | M::Fxrstor | M::Fxrstor64 | M::Xsave | M::Xsave64 => Kind::Xsave,
        M::Xsavec | M::Xsavec64 | M::Xrstor | M::Xrstor64 | M::Xgetbv => Kind::Xsave,
        M::Ldmxcsr | M::Stmxcsr | M::Fnsave | M::Frstor | M::Fldenv | M::Fnstenv => Kind::Xsave,
        M::Bound | M::Adcx | M::Adox => return None,
        _ => return None,
    })
}

fn by_feature(i: &Instruction) -> Kind {
    let has = |list: &[F]| i.cpuid_features().iter().any(|f| list.contains(f));
    let avx512 = [
        F::AVX512F,
        F::AVX512BW,
        F::AVX512CD,
        F::AVX512DQ,
        F::AVX512VL,
        F::AVX512_VBMI,
        F::AVX512_VBMI2,
        F::AVX512_VNNI,
        F::AVX512_BITALG,
        F::AVX512_VPOPCNTDQ,
    ];
    if has(&avx512) || i.encoding() == EncodingKind::EVEX {
        return Kind::Avx512;
    }
    if has(&[
        F::AES,
        F::PCLMULQDQ,
        F::SHA,
        F::VAES,
        F::VPCLMULQDQ,
        F::GFNI,
    ]) {
        return Kind::Crypto;
    }
    if has(&[F::BMI1, F::BMI2, F::ADX]) {
        return Kind::Bmi;
    }
    if has(&[F::AVX2]) {
        return Kind::Avx2;
    }
    if i.encoding() != EncodingKind::Legacy {
        return Kind::Avx;
    }
    if has(&[F::FPU, F::FPU287, F::FPU387]) {
        return Kind::X87;
    }
    let mmx = (0..i.op_count()).any(|n| i.op_register(n).is_mm());
    if mmx || has(&[F::MMX]) {
        return Kind::Mmx;
    }
    let vector = [F::SSE, F::SSE2, F::SSE3, F::SSSE3, F::SSE4_1, F::SSE4_2];
    if has(&vector) && !matches!(i.mnemonic(), M::Sfence | M::Lfence | M::Mfence | M::Movnti) {
        return Kind::Sse;
    }
    Kind::Mov
}

/// Whether this host has what AVX-512 needs in the interpreter.
pub(crate) fn has_avx512() -> bool {
    host_has!("avx512f") && host_has!("avx512bw")
}

/// Extensions whose results can be compared, and that host and interpreter both have.
fn comparable(f: F) -> bool {
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
        F::XSAVEC => host_has!("xsavec"),
        F::AVX512F | F::AVX512BW => avx512,
        F::AVX512VL => avx512 && host_has!("avx512vl"),
        F::AVX512DQ => avx512 && host_has!("avx512dq"),
        F::AVX512CD => avx512 && host_has!("avx512cd"),
        F::AVX512_VBMI => avx512 && host_has!("avx512vbmi"),
        F::AVX512_VBMI2 => avx512 && host_has!("avx512vbmi2"),
        F::AVX512_VNNI => avx512 && host_has!("avx512vnni"),
        F::AVX512_BITALG => avx512 && host_has!("avx512bitalg"),
        F::AVX512_VPOPCNTDQ => avx512 && host_has!("avx512vpopcntdq"),
        _ => false,
    }
}

/// Must not be executed here, has no result that could be compared, or is where processors differ.
fn excluded(i: &Instruction) -> bool {
    let name = matches!(
        i.mnemonic(),
        // Time, chance, and what the host's kernel answers for.
        M::Rdtsc | M::Cpuid | M::Sgdt | M::Sidt | M::Sldt | M::Str | M::Smsw
            | M::Lar | M::Lsl | M::Verr | M::Verw | M::Xsetbv | M::Rdpmc
            // Loads of segments.
            | M::Lss | M::Lds | M::Les | M::Lfs | M::Lgs | M::Arpl | M::Bound
            // Kernels may permit them to users.
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
    // Its result is undefined with 16 bits.
    let word = i.mnemonic() == M::Bswap && i.op0_register().size() == 2
        || matches!(i.mnemonic(), M::Shld | M::Shrd)
            && (i.op0_register().size() == 2 || i.memory_size().size() == 2);
    name || segment || stack_pointer || word || vendors_differ(i)
}

/// Encodings that Intel's and AMD's processors take differently.
fn vendors_differ(i: &Instruction) -> bool {
    // AMD's take a repeat prefix of LOOPcc for its condition.
    let repeated = i.has_rep_prefix() || i.has_repne_prefix();
    let loops = repeated && matches!(i.mnemonic(), M::Loope | M::Loopne);
    // Intel's ignore VEX.W outside 64-bit mode, AMD's raise #UD.
    // Intel's want operands of SHA aligned, AMD's do not; the generator can only align a base.
    let sha = i.cpuid_features().contains(&F::SHA)
        && i.op_kinds().any(|k| k == OpKind::Memory)
        && (i.memory_index() != Register::None || !i.memory_base().is_gpr());
    // Intel's read two bytes, AMD's four.
    let extends = i.code() == Code::Movsxd_r16_rm16;
    let moves = matches!(i.mnemonic(), M::Vpextrd | M::Vpinsrd | M::Vmovd);
    loops
        || sha
        || extends
        || moves && i.encoding() == EncodingKind::VEX && i.code_size() == CodeSize::Code32
}

/// Whether vendors differ in a misaligned operand with a mask that selects no element: masked moves
/// of exception class E1. By Intel's manual (Table "Type E1 Class Exception Conditions") they raise
/// #GP whatever the mask is; on AMD family 1AH they raise nothing.
pub(crate) fn alignment_depends_on_mask(i: &Instruction) -> bool {
    let aligned = matches!(
        i.mnemonic(),
        M::Vmovaps | M::Vmovapd | M::Vmovdqa32 | M::Vmovdqa64
    );
    aligned && i.has_op_mask() && i.op_kinds().any(|k| k == OpKind::Memory)
}

/// Whether an operand access writes.
pub fn writes(a: OpAccess) -> bool {
    matches!(
        a,
        OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
    )
}

/// Whether an operand access reads.
pub fn reads(a: OpAccess) -> bool {
    matches!(
        a,
        OpAccess::Read | OpAccess::CondRead | OpAccess::ReadWrite | OpAccess::ReadCondWrite
    )
}

/// Flags that the manual leaves undefined, as bits of RFLAGS.
pub fn undefined_flags(i: &Instruction) -> u32 {
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
