//! The ratio of the TSC to the crystal, for leaf 15H.

/// Frequency of the always-running timer in Hz (parameter `CRYSTAL_HZ`).
pub const CRYSTAL_HZ: u32 = 25_000_000;

/// Largest EBX of leaf 15H: it keeps kHz * EBX below 2^32 (rule ART-03).
const NUMERATOR_MAX: u64 = 171_798;

/// EAX and EBX of leaf 15H: the best ratio EBX / EAX of `tsc_hz` to the crystal (rule ART-03).
pub(super) fn ratio(tsc_hz: u64) -> (u32, u32) {
    // Convergents of the continued fraction tsc_hz / CRYSTAL_HZ, then the last semiconvergent.
    let (mut a, mut b) = (tsc_hz, u64::from(CRYSTAL_HZ));
    let (mut p0, mut q0, mut p1, mut q1) = (0_u64, 1_u64, 1_u64, 0_u64);
    while b != 0 {
        let digit = a / b;
        let largest = (NUMERATOR_MAX - p0) / p1.max(1);
        let used = digit.min(largest);
        (p0, q0, p1, q1) = (p1, q1, used * p1 + p0, used * q1 + q0);
        if used < digit {
            let error = |p: u64, q: u64| {
                let exact = u128::from(tsc_hz) * u128::from(q);
                let product = u128::from(CRYSTAL_HZ) * u128::from(p);
                // Relative to q; the comparison below multiplies crosswise.
                (exact.abs_diff(product), q)
            };
            let (new, old) = (error(p1, q1), error(p0, q0));
            if q1 == 0 || (q0 != 0 && old.0 * u128::from(new.1) < new.0 * u128::from(old.1)) {
                (p1, q1) = (p0, q0);
            }
            break;
        }
        (a, b) = (b, a % b);
    }
    let narrow = |v: u64| u32::try_from(v.max(1)).unwrap_or(u32::MAX);
    (narrow(q1), narrow(p1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crystal_ratio_is_within_one_ppm_and_fits_linux() {
        for hz in [
            1_000_000_000,
            2_000_000_000,
            2_599_998_123,
            2_445_406_001,
            3_700_000_019,
            50_000_001,
        ] {
            let (eax, ebx) = ratio(hz);
            assert!(u64::from(ebx) <= NUMERATOR_MAX, "{hz}");
            let result = u128::from(CRYSTAL_HZ) * u128::from(ebx) / u128::from(eax);
            assert!(
                result.abs_diff(u128::from(hz)) * 1_000_000 <= u128::from(hz),
                "{hz}: {eax} {ebx}"
            );
        }
    }
}
