//! Which vector instructions are translated, and which host registers they need.

use iced_x86::{CpuidFeature as F, EncodingKind, Instruction, Mnemonic as M, OpKind, Register};

/// The set of vector registers that code uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum VectorLevel {
    /// None.
    #[default]
    None = 0,
    /// XMM0 to XMM15.
    ///
    /// Instructions with legacy encodings keep the bits above XMM.
    Sse = 1,
    /// YMM0 to YMM15, and the bits above, which VEX instructions clear.
    Avx = 2,
    /// ZMM0 to ZMM31, and the opmask registers.
    Avx512 = 3,
}

impl VectorLevel {
    /// The registers that an instruction needs.
    pub(crate) fn of(i: &Instruction) -> Self {
        match i.encoding() {
            EncodingKind::Legacy => Self::Sse,
            EncodingKind::VEX if !(0..i.op_count()).any(|n| i.op_register(n).is_k()) => Self::Avx,
            _ => Self::Avx512,
        }
    }
}

/// Whether an instruction of SSE to AVX-512 or a related extension is translated.
///
/// Its operands are general, vector and opmask registers, immediates, and at most one memory
/// operand. Masks need no check: translated code accesses an operand only if all of it lies in one
/// page that the TLB holds, and cannot fault there whatever the mask selects.
pub(crate) fn is_translated(i: &Instruction) -> bool {
    let excluded = matches!(
        i.mnemonic(),
        // These access MXCSR, or memory that is not an explicit operand.
        M::Ldmxcsr | M::Stmxcsr | M::Vldmxcsr | M::Vstmxcsr | M::Maskmovdqu | M::Vmaskmovdqu
        // These must not fault on elements that the mask does not select.
        | M::Vmaskmovps | M::Vmaskmovpd | M::Vpmaskmovd | M::Vpmaskmovq
        // Hosts compute different estimates; a deterministic processor uses its own.
        | M::Rcpps | M::Rcpss | M::Rsqrtps | M::Rsqrtss
    );
    let encoding = matches!(
        i.encoding(),
        EncodingKind::Legacy | EncodingKind::VEX | EncodingKind::EVEX
    );
    let features = i.cpuid_features();
    encoding
        && !excluded
        && !i.is_vsib()
        && !has_packed_memory(i)
        && !features.is_empty()
        && features.iter().all(|&f| host_has(f))
        && (0..i.op_count()).all(|n| is_plain(i, n))
}

/// Whether the memory operand holds only the elements that the mask selects.
fn has_packed_memory(i: &Instruction) -> bool {
    matches!(
        i.mnemonic(),
        M::Vcompresspd
            | M::Vcompressps
            | M::Vpcompressb
            | M::Vpcompressw
            | M::Vpcompressd
            | M::Vpcompressq
    ) || matches!(
        i.mnemonic(),
        M::Vexpandpd | M::Vexpandps | M::Vpexpandb | M::Vpexpandw | M::Vpexpandd | M::Vpexpandq
    )
}

fn is_plain(i: &Instruction, operand: u32) -> bool {
    let address = |r: Register| r == Register::None || r == Register::RIP || r.is_gpr64();
    match i.op_kind(operand) {
        OpKind::Register => {
            let r = i.op_register(operand);
            r.is_gpr32() || r.is_gpr64() || r.is_vector_register() || r.is_k()
        }
        OpKind::Memory => {
            let (base, index) = (i.memory_base(), i.memory_index());
            address(base) && address(index)
        }
        OpKind::Immediate8 => true,
        _ => false,
    }
}

/// Whether a feature is a vector extension that the host has.
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
        F::FMA => has!("fma"),
        F::F16C => has!("f16c"),
        F::GFNI => has!("gfni"),
        F::VAES => has!("vaes"),
        F::VPCLMULQDQ => has!("vpclmulqdq"),
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
