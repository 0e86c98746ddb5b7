//! What the host's processor can execute for the interpreter, in CPUID's own form.

use std::arch::is_x86_feature_detected;

use hindsight_cpu::cpuid::Regs;

/// XCR0 bits that need AVX, and those that need AVX-512, in the operating system too.
const XCR0_AVX: u32 = 1 << 2;
const XCR0_AVX512: u32 = 0b111 << 5;

/// CPUID of the host, less what its operating system does not let programs use.
pub fn supported(leaf: u32, subleaf: u32) -> Regs {
    let host = core::arch::x86_64::__cpuid_count(leaf, subleaf);
    let mut regs = [host.eax, host.ebx, host.ecx, host.edx];
    match (leaf, subleaf) {
        (1, _) if !is_x86_feature_detected!("avx") => {
            // FMA, XSAVE, AVX, F16C.
            regs[2] &= !(1 << 12 | 1 << 26 | 1 << 28 | 1 << 29);
        }
        (7, 0) => {
            if !is_x86_feature_detected!("avx2") {
                regs[1] &= !(1 << 5);
            }
            if !is_x86_feature_detected!("avx512f") {
                // AVX512F, DQ, IFMA, PF, ER, CD, BW, VL.
                regs[1] &= !(0b11 << 16 | 1 << 21 | 0b111 << 26 | 0b11 << 30);
            }
        }
        (0xd, 0) => {
            if !is_x86_feature_detected!("avx") {
                regs[0] &= !XCR0_AVX;
            }
            if !is_x86_feature_detected!("avx512f") {
                regs[0] &= !XCR0_AVX512;
            }
        }
        _ => {}
    }
    regs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_features_of_x86_64_are_there() {
        // FPU, TSC, MSR, CX8, CMOV, FXSR, SSE, SSE2.
        let needed = 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 15 | 0b111 << 24;
        assert_eq!(supported(1, 0)[3] & needed, needed);
    }
}
