//! The features that the interpreter can execute, as CPUID leaves.

use std::arch::is_x86_feature_detected as host_has;

use hindsight_regs::branch::xsave as branch_state;

fn bits(list: &[u32]) -> u32 {
    list.iter().fold(0, |mask, bit| mask | 1 << bit)
}

/// Returns the bits in the list whose extension the host has.
fn thunked(list: &[(bool, u32)]) -> u32 {
    list.iter()
        .filter(|(on, _)| *on)
        .fold(0, |mask, (_, bit)| mask | 1 << bit)
}

/// Lengths and offsets of the XSAVE components of Intel processors.
const COMPONENTS: [(u32, u32, u32); 5] = [
    (2, 256, 576),
    (5, 64, 1088),
    (6, 512, 1152),
    (7, 1024, 1664),
    (9, 8, 2688),
];

/// CPUID.7.0:EDX: MD_CLEAR, SPEC_CTRL, STIBP, L1D_FLUSH, SSBD. There is no speculation to control.
const LEAF_7_EDX: u32 = 1 << 10 | 0b111 << 26 | 1 << 31;

/// Returns a CPUID leaf as the interpreter supports it on this host.
///
/// The registers are EAX, EBX, ECX, EDX. Integer and system instructions are always supported, and
/// so are vector instructions: AVX-512 F, CD, BW, DQ, VL, IFMA, VBMI, VBMI2, VNNI, BITALG and
/// VPOPCNTDQ, what precedes them, GFNI, VAES, VPCLMULQDQ and SHA. SSE3 and SSSE3 are supported if
/// the host's processor has them. Leaves that only describe the processor (vendor, brand, family)
/// are the host's own.
pub fn supported_cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    match (leaf, subleaf) {
        (1, _) => [raw(1, 0)[0], 0, leaf_1_ecx(), leaf_1_edx()],
        (7, 0) => [0, leaf_7_ebx(), leaf_7_ecx(), LEAF_7_EDX],
        (0xd, 0) => [XCR0, 576, 2696, 0],
        // XSAVEOPT, XSAVEC, XGETBV with ECX = 1, XSAVES.
        (0xd, 1) => [0b1111, 0, 1 << branch_state::COMPONENT, 0],
        // A component of IA32_XSS.
        (0xd, branch_state::COMPONENT) => [branch_state::BYTES, 0, 1, 0],
        (0xd, n) => COMPONENTS
            .iter()
            .find(|c| c.0 == n)
            .map_or([0; 4], |c| [c.1, c.2, 0, 0]),
        // LAHF, LZCNT, PREFETCHW; SYSCALL, NX, 1-GiB pages, RDTSCP, long mode.
        (0x8000_0001, _) => [0, 0, bits(&[0, 5, 8]), bits(&[11, 20, 26, 27, 29])],
        // 46 physical and 48 linear address bits.
        (0x8000_0008, _) => [48 << 8 | 46, 0, 0, 0],
        (0 | 0x8000_0000 | 0x8000_0002..=0x8000_0004, _) => raw(leaf, subleaf),
        _ => [0; 4],
    }
}

fn raw(leaf: u32, subleaf: u32) -> [u32; 4] {
    let r = std::arch::x86_64::__cpuid_count(leaf, subleaf);
    [r.eax, r.ebx, r.ecx, r.edx]
}

/// The components of XCR0: x87, SSE, AVX, AVX-512 (three), PKRU.
const XCR0: u32 = 0b111 | 0b111 << 5 | 1 << 9;

fn leaf_1_ecx() -> u32 {
    // PCLMULQDQ, FMA, CX16, PCID, SSE4.1, SSE4.2, x2APIC, MOVBE, POPCNT, TSC deadline, AES, XSAVE,
    // AVX, F16C, RDRAND.
    bits(&[1, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 28, 29, 30])
        | thunked(&[(host_has!("sse3"), 0), (host_has!("ssse3"), 9)])
}

fn leaf_1_edx() -> u32 {
    // FPU, VME, DE, PSE, TSC, MSR, PAE, MCE, CX8, APIC, SEP, MTRR, PGE, MCA, CMOV, PAT, PSE-36,
    // CLFSH, MMX, FXSR, SSE, SSE2, SS.
    bits(&[
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 19, 23, 24, 25, 26, 27,
    ])
}

fn leaf_7_ebx() -> u32 {
    // FSGSBASE, TSC_ADJUST, BMI1, AVX2, FDP_EXCPTN_ONLY, SMEP, BMI2, ERMS, INVPCID, FCS and FDS
    // deprecated, AVX512F, AVX512DQ, RDSEED, ADX, SMAP, AVX512_IFMA, CLFLUSHOPT, CLWB, AVX512CD,
    // SHA, AVX512BW, AVX512VL.
    bits(&[
        0, 1, 3, 5, 6, 7, 8, 9, 10, 13, 16, 17, 18, 19, 20, 21, 23, 24, 28, 29, 30, 31,
    ])
}

fn leaf_7_ecx() -> u32 {
    // AVX512_VBMI, UMIP, PKU, AVX512_VBMI2, GFNI, VAES, VPCLMULQDQ, AVX512_VNNI, AVX512_BITALG,
    // AVX512_VPOPCNTDQ, RDPID.
    bits(&[1, 2, 3, 6, 8, 9, 10, 11, 12, 14, 22])
}
