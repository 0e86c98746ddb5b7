//! Which instructions the host executes, and which run in software.

use iced_x86::{CpuidFeature as F, EncodingKind, Instruction, Mnemonic as M};
use std::arch::is_x86_feature_detected as has;

/// Which instructions thunks execute in software: at least those that the host lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SoftwarePolicy {
    /// Whether results must be the same on every host.
    pub(crate) portable: bool,
    /// Whether all instructions of AVX, AVX-512, AES, PCLMULQDQ, GFNI and SHA run in software, as on
    /// a host without them.
    pub(crate) all_vectors: bool,
}

impl SoftwarePolicy {
    /// Whether an instruction runs in software.
    pub(crate) fn applies(self, i: &Instruction) -> bool {
        let legacy = [F::AES, F::PCLMULQDQ, F::GFNI, F::SHA];
        let vector = matches!(i.encoding(), EncodingKind::VEX | EncodingKind::EVEX)
            || i.cpuid_features().iter().any(|f| legacy.contains(f));
        (vector && self.all_vectors)
            || (self.portable && differs_between_hosts(i.mnemonic()))
            || !executes(i)
    }
}

/// Whether hosts return different results.
///
/// These are the estimates, the flags of VREDUCE, those of BMI that the manual leaves undefined, and
/// the NaN that DPPS returns.
pub(super) fn differs_between_hosts(m: M) -> bool {
    matches!(
        m,
        M::Vrcpps
            | M::Vrcpss
            | M::Vrsqrtps
            | M::Vrsqrtss
            | M::Vrcp14ps
            | M::Vrcp14pd
            | M::Vrcp14ss
            | M::Vrcp14sd
            | M::Vrsqrt14ps
            | M::Vrsqrt14pd
            | M::Vrsqrt14ss
            | M::Vrsqrt14sd
            | M::Vreduceps
            | M::Vreducepd
            | M::Vreducess
            | M::Vreducesd
            | M::Dpps
            | M::Dppd
            | M::Vdpps
            | M::Vdppd
            | M::Andn
            | M::Bextr
            | M::Blsi
            | M::Blsmsk
            | M::Blsr
            | M::Bzhi
    )
}

/// Whether the host has the ZMM and opmask registers, and can save all of them.
pub(crate) fn has_zmm() -> bool {
    has!("avx512f") && has!("avx512bw")
}

/// Whether the host executes an instruction.
pub(super) fn executes(i: &Instruction) -> bool {
    let opmask = (0..i.op_count()).any(|n| i.op_register(n).is_k());
    let wide = i.encoding() == EncodingKind::EVEX || opmask;
    (!wide || has_zmm()) && i.cpuid_features().iter().all(|f| host_has(*f))
}

/// Whether the host has an extension; extensions that are not of vectors are not looked up.
fn host_has(feature: F) -> bool {
    match feature {
        F::AVX => has!("avx"),
        F::AVX2 => has!("avx2"),
        F::FMA => has!("fma"),
        F::F16C => has!("f16c"),
        F::AVX512F => has!("avx512f"),
        F::AVX512CD => has!("avx512cd"),
        F::AVX512BW => has!("avx512bw"),
        F::AVX512DQ => has!("avx512dq"),
        F::AVX512VL => has!("avx512vl"),
        F::AVX512_IFMA => has!("avx512ifma"),
        F::AVX512_VBMI => has!("avx512vbmi"),
        F::AVX512_VBMI2 => has!("avx512vbmi2"),
        F::AVX512_VNNI => has!("avx512vnni"),
        F::AVX512_BITALG => has!("avx512bitalg"),
        F::AVX512_VPOPCNTDQ => has!("avx512vpopcntdq"),
        F::BMI1 => has!("bmi1"),
        F::BMI2 => has!("bmi2"),
        F::SSE4_1 => has!("sse4.1"),
        F::SSE4_2 => has!("sse4.2"),
        F::AES => has!("aes"),
        F::PCLMULQDQ => has!("pclmulqdq"),
        F::GFNI => has!("gfni"),
        F::SHA => has!("sha"),
        F::VAES => has!("vaes"),
        F::VPCLMULQDQ => has!("vpclmulqdq"),
        _ => true,
    }
}
