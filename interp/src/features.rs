//! The instruction-set extensions that the guest's CPUID reports.

use crate::platform::Platform;
use iced_x86::CpuidFeature as F;

/// The set of instruction-set extensions that may be used.
#[derive(Clone, Debug)]
pub(crate) struct Features([u64; 4]);

/// Leaf, subleaf, register (EAX 0, EBX 1, ECX 2, EDX 3), bit.
const BITS: &[(F, u32, u32, usize, u32)] = &[
    (F::FPU, 1, 0, 3, 0),
    (F::TSC, 1, 0, 3, 4),
    (F::MSR, 1, 0, 3, 5),
    (F::CX8, 1, 0, 3, 8),
    (F::SEP, 1, 0, 3, 11),
    (F::CMOV, 1, 0, 3, 15),
    (F::CLFSH, 1, 0, 3, 19),
    (F::MMX, 1, 0, 3, 23),
    (F::FXSR, 1, 0, 3, 24),
    (F::SSE, 1, 0, 3, 25),
    (F::SSE2, 1, 0, 3, 26),
    (F::SSE3, 1, 0, 2, 0),
    (F::PCLMULQDQ, 1, 0, 2, 1),
    (F::MONITOR, 1, 0, 2, 3),
    (F::SSSE3, 1, 0, 2, 9),
    (F::FMA, 1, 0, 2, 12),
    (F::CMPXCHG16B, 1, 0, 2, 13),
    (F::SSE4_1, 1, 0, 2, 19),
    (F::SSE4_2, 1, 0, 2, 20),
    (F::MOVBE, 1, 0, 2, 22),
    (F::POPCNT, 1, 0, 2, 23),
    (F::AES, 1, 0, 2, 25),
    (F::XSAVE, 1, 0, 2, 26),
    (F::AVX, 1, 0, 2, 28),
    (F::F16C, 1, 0, 2, 29),
    (F::RDRAND, 1, 0, 2, 30),
    (F::FSGSBASE, 7, 0, 1, 0),
    (F::BMI1, 7, 0, 1, 3),
    (F::AVX2, 7, 0, 1, 5),
    (F::BMI2, 7, 0, 1, 8),
    (F::INVPCID, 7, 0, 1, 10),
    (F::AVX512F, 7, 0, 1, 16),
    (F::AVX512DQ, 7, 0, 1, 17),
    (F::HLE, 7, 0, 1, 4),
    (F::HLE_or_RTM, 7, 0, 1, 11),
    (F::RTM, 7, 0, 1, 11),
    (F::RDSEED, 7, 0, 1, 18),
    (F::ADX, 7, 0, 1, 19),
    (F::SMAP, 7, 0, 1, 20),
    (F::AVX512_IFMA, 7, 0, 1, 21),
    (F::CLFLUSHOPT, 7, 0, 1, 23),
    (F::CLWB, 7, 0, 1, 24),
    (F::AVX512CD, 7, 0, 1, 28),
    (F::SHA, 7, 0, 1, 29),
    (F::AVX512BW, 7, 0, 1, 30),
    (F::AVX512VL, 7, 0, 1, 31),
    (F::AVX512_VBMI, 7, 0, 2, 1),
    (F::PKU, 7, 0, 2, 3),
    (F::AVX512_VBMI2, 7, 0, 2, 6),
    (F::GFNI, 7, 0, 2, 8),
    (F::VAES, 7, 0, 2, 9),
    (F::VPCLMULQDQ, 7, 0, 2, 10),
    (F::AVX512_VNNI, 7, 0, 2, 11),
    (F::AVX512_BITALG, 7, 0, 2, 12),
    (F::AVX512_VPOPCNTDQ, 7, 0, 2, 14),
    (F::RDPID, 7, 0, 2, 22),
    (F::LZCNT, 0x8000_0001, 0, 2, 5),
    (F::SYSCALL, 0x8000_0001, 0, 3, 11),
    (F::RDTSCP, 0x8000_0001, 0, 3, 27),
    (F::X64, 0x8000_0001, 0, 3, 29),
    (F::PREFETCHW, 0x8000_0001, 0, 2, 8),
    (F::XSAVEOPT, 0xd, 1, 0, 0),
    (F::XSAVEC, 0xd, 1, 0, 1),
    (F::XSAVES, 0xd, 1, 0, 3),
];

/// Extensions of every x86-64 processor, whatever CPUID reports.
const ALWAYS: &[F] = &[
    F::INTEL8086,
    F::INTEL186,
    F::INTEL286,
    F::INTEL386,
    F::INTEL486,
    F::FPU287,
    F::FPU387,
    F::CPUID,
    F::MULTIBYTENOP,
    F::SMM,
    F::PAUSE,
    F::RDPMC,
    F::PREFETCHW,
    F::CET_IBT,
    F::PREFETCHWT1,
    F::PREFETCHITI,
];

impl Features {
    /// Returns only the extensions that every processor has.
    pub(crate) fn none() -> Self {
        let mut set = Self([0; 4]);
        for &f in ALWAYS {
            set.add(f);
        }
        set
    }

    /// Returns all extensions that CPUID can report.
    #[cfg(test)]
    pub(crate) fn all() -> Self {
        let mut set = Self::none();
        for &(f, ..) in BITS {
            set.add(f);
        }
        set
    }

    pub(crate) fn of(platform: &dyn Platform) -> Self {
        let mut set = Self::none();
        for &(feature, leaf, sub, reg, bit) in BITS {
            if platform.cpuid(leaf, sub)[reg] >> bit & 1 != 0 {
                set.add(feature);
            }
        }
        set
    }

    fn add(&mut self, f: F) {
        let n = f as usize;
        self.0[(n / 64) & 3] |= 1 << (n % 64);
    }

    pub(crate) fn has(&self, f: F) -> bool {
        let n = f as u8;
        self.0[usize::from(n / 64)] >> (n % 64) & 1 != 0
    }
}
