//! Features of this host's processor that decide what a batch holds.

#![expect(unsafe_code, reason = "the auxiliary vector is read by a C function")]

use std::arch::is_x86_feature_detected as host_has;

/// AT_HWCAP2: user code may execute WRGSBASE.
const HWCAP2_FSGSBASE: u64 = 1 << 1;

/// Whether user code may write the base of GS.
pub(crate) fn has_fsgsbase() -> bool {
    // SAFETY: getauxval only reads the auxiliary vector, which nothing writes.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & HWCAP2_FSGSBASE != 0 }
}

/// Whether the host has what AVX-512 needs in the interpreter.
pub(crate) fn has_avx512() -> bool {
    host_has!("avx512f") && host_has!("avx512bw")
}

/// Whether the host has AVX.
pub(crate) fn has_avx() -> bool {
    host_has!("avx")
}
