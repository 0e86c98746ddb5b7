//! The estimates of RCPPS and RSQRTPS: the exact value rounded to 12 fraction bits.

const SIGN: u32 = 1 << 31;
const INFINITY: u32 = 0xff << 23;
const QUIET: u32 = 1 << 22;
const DEFAULT_NAN: u32 = 0xffc0_0000;

/// A NaN made quiet; none for numbers.
fn nan(v: u32) -> Option<u32> {
    (v & !SIGN > INFINITY).then_some(v | QUIET)
}

/// 1/x. Denormal operands count as zero, and results that would be denormal are zero.
pub(crate) fn reciprocal(v: u32) -> u32 {
    if let Some(nan) = nan(v) {
        return nan;
    }
    let (sign, exponent) = (v & SIGN, v >> 23 & 0xff);
    match exponent {
        0 => sign | INFINITY,
        0xff => sign,
        _ => {
            // x = m * 2^(exponent - 127 - 23), with m from 2^23 below 2^24; 1/x in units of 2^-12
            // of its binade is 2^36/m, which is above 2^12 unless m is 2^23.
            let m = u64::from(v & 0x7f_ffff | 1 << 23);
            let (scaled, down) = if m == 1 << 23 {
                (1 << 12, 0)
            } else {
                (round(1 << 36, m), 1)
            };
            // 2^36/m may round up to 2^13.
            pack(sign, 254 - i64::from(exponent) - down, scaled)
        }
    }
}

/// `n / d` rounded to nearest, ties to even.
fn round(n: u64, d: u64) -> u64 {
    let (q, r) = (n / d, n % d);
    q + u64::from(2 * r > d || (2 * r == d && q & 1 == 1))
}

/// A number from its biased exponent and 12 fraction bits below the leading one.
fn pack(sign: u32, exponent: i64, scaled: u64) -> u32 {
    let carry = scaled >> 13;
    let exponent = exponent + i64::from(carry != 0);
    let fraction = u32::try_from(scaled >> carry & 0xfff).unwrap_or(0) << 11;
    match u32::try_from(exponent) {
        Ok(0) | Err(_) => sign,
        Ok(e) => sign | e << 23 | fraction,
    }
}

/// 1/sqrt(x). Denormal operands count as zero.
pub(crate) fn reciprocal_root(v: u32) -> u32 {
    if let Some(nan) = nan(v) {
        return nan;
    }
    let (sign, exponent) = (v & SIGN, v >> 23 & 0xff);
    match exponent {
        0 => sign | INFINITY,
        _ if sign != 0 => DEFAULT_NAN,
        0xff => 0,
        _ => {
            // x = m * 2^(2k), with m in units of 2^-23 from 1 below 4.
            let odd = (exponent + 1) & 1;
            let m = u128::from(v & 0x7f_ffff | 1 << 23) << odd;
            let half = (i64::from(exponent) - 127 - i64::from(odd)) / 2;
            if m == 1 << 23 {
                return pack(0, 127 - half, 1 << 12);
            }
            // 1/sqrt(m) is above 1/2 and below 1: in units of 2^-13 the root of 2^49/m.
            let root = u128::from((1_u64 << 49) / u64::try_from(m).unwrap_or(1)).isqrt();
            // Round up from the exact middle between root and root + 1: (2 root + 1)^2 m < 2^51.
            let middle = 2 * root + 1;
            let up = middle * middle * m < 1 << 51;
            let scaled = u64::try_from(root).unwrap_or(0) + u64::from(up);
            pack(0, 127 - half - 1, scaled)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(found: u32, exact: f64) -> f64 {
        ((f64::from(f32::from_bits(found)) - exact) / exact).abs()
    }

    fn samples() -> impl Iterator<Item = u32> {
        (0x0100_0000..0x7e00_0000_u32).step_by(0x1_2345)
    }

    #[test]
    fn relative_error_is_below_two_to_the_minus_13() {
        for v in samples() {
            let x = f64::from(f32::from_bits(v));
            assert!(error(reciprocal(v), 1.0 / x) <= 2_f64.powi(-13), "1/{x:e}");
            assert!(
                error(reciprocal_root(v), 1.0 / x.sqrt()) <= 2_f64.powi(-13),
                "rsqrt {x:e}"
            );
        }
    }

    #[test]
    fn powers_of_two_are_exact() {
        for (x, r) in [(1.0_f32, 1.0_f32), (4.0, 0.25), (0.125, 8.0)] {
            assert_eq!(reciprocal(x.to_bits()), r.to_bits());
            assert_eq!(reciprocal((-x).to_bits()), (-r).to_bits());
        }
        for (x, r) in [(1.0_f32, 1.0_f32), (4.0, 0.5), (0.0625, 4.0)] {
            assert_eq!(reciprocal_root(x.to_bits()), r.to_bits());
        }
    }

    #[test]
    fn special_operands_give_what_the_manual_says() {
        assert_eq!(
            reciprocal(0x8000_0001),
            0xff80_0000,
            "a denormal counts as zero"
        );
        assert_eq!(reciprocal(0x7f00_0000), 0, "a tiny result is zero");
        assert_eq!(reciprocal(0xff80_0000), 0x8000_0000, "minus infinity");
        assert_eq!(reciprocal(0x7f80_0001), 0x7fc0_0001, "a signalling NaN");
        assert_eq!(reciprocal_root(0x8000_0000), 0xff80_0000, "minus zero");
        assert_eq!(
            reciprocal_root(0xbf80_0000),
            DEFAULT_NAN,
            "a negative number"
        );
        assert_eq!(reciprocal_root(0x7f80_0000), 0, "infinity");
    }
}
