//! Which vector instructions are translated, and which of the host's registers they need.

use iced_x86::{CpuidFeature as F, EncodingKind, Instruction, Mnemonic as M, OpKind, Register};

/// The parts of the vector registers that code uses: those of XMM0 to XMM15, or all of YMM0 to
/// YMM15 and what lies above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum VectorLevel {
    /// None.
    #[default]
    None = 0,
    /// The lower 128 bits. Instructions with legacy encodings keep the others.
    Sse = 1,
    /// All bits, which instructions with VEX prefixes change.
    Avx = 2,
}

impl VectorLevel {
    /// What an instruction needs.
    pub(crate) fn of(i: &Instruction) -> Self {
        match i.encoding() {
            EncodingKind::Legacy => Self::Sse,
            _ => Self::Avx,
        }
    }
}

/// Whether an instruction of SSE to AVX2 or a relative of theirs is translated: its operands are
/// general registers, XMM0 to XMM15, YMM0 to YMM15, immediates, and one whole memory operand.
pub(crate) fn is_translated(i: &Instruction) -> bool {
    let excluded = matches!(
        i.mnemonic(),
        // They access the control register, or memory that is no explicit operand.
        M::Ldmxcsr | M::Stmxcsr | M::Vldmxcsr | M::Vstmxcsr | M::Maskmovdqu | M::Vmaskmovdqu
        // Elements that the mask does not select must not fault.
        | M::Vmaskmovps | M::Vmaskmovpd | M::Vpmaskmovd | M::Vpmaskmovq
        // Hosts differ, and a deterministic processor has results of its own.
        | M::Rcpps | M::Rcpss | M::Rsqrtps | M::Rsqrtss
    );
    let encoding = matches!(i.encoding(), EncodingKind::Legacy | EncodingKind::VEX);
    let features = i.cpuid_features();
    encoding
        && !excluded
        && !i.is_vsib()
        && !features.is_empty()
        && features.iter().all(|&f| host_has(f))
        && (0..i.op_count()).all(|n| is_plain(i, n))
}

fn is_plain(i: &Instruction, operand: u32) -> bool {
    let address = |r: Register| r == Register::None || r == Register::RIP || r.is_gpr64();
    match i.op_kind(operand) {
        OpKind::Register => {
            let r = i.op_register(operand);
            r.is_gpr32() || r.is_gpr64() || r.is_xmm() || r.is_ymm()
        }
        OpKind::Memory => {
            let (base, index) = (i.memory_base(), i.memory_index());
            address(base) && address(index)
        }
        OpKind::Immediate8 => true,
        _ => false,
    }
}

/// Whether the feature is one of a vector instruction, and the host has it.
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
        _ => false,
    }
}
