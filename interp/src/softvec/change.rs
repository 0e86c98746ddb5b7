//! Conversions of floating-point numbers to integers and other formats, and roundings to integers.

use super::float::{Env, FiniteNumber, IE, PE, Rounding, low64, round_off};
use super::format::{F16, FloatFormat};

impl Env {
    /// Converts between formats.
    pub(super) fn resize(&mut self, from: FloatFormat, to: FloatFormat, v: u64) -> u64 {
        let v = self.flush(from, v);
        if from.is_nan(v) {
            if from.is_signaling(v) {
                self.flags |= IE;
            }
            return nan_payload(from, to, v);
        }
        let negative = from.is_negative(v);
        if from.is_infinite(v) {
            return to.with_sign(negative, to.infinity());
        }
        if from.is_zero(v) {
            return to.with_sign(negative, 0);
        }
        // VCVTPH2PS does not flag denormal halves.
        if from != F16 {
            self.check_denormals(from, &[v]);
        }
        let n = Self::split(from, v);
        self.pack(to, negative, n.exponent, u128::from(n.significand) << 63)
    }

    /// Converts an integer, given as sign and magnitude.
    pub(super) fn integer_to_float(
        &mut self,
        to: FloatFormat,
        negative: bool,
        magnitude: u64,
    ) -> u64 {
        if magnitude == 0 {
            return 0;
        }
        self.pack(to, negative, 126, u128::from(magnitude))
    }

    /// Converts to an integer of `bits` bits.
    ///
    /// Returns the indefinite integer and flags an invalid operation if it does not fit.
    pub(super) fn float_to_integer(
        &mut self,
        from: FloatFormat,
        v: u64,
        bits: u32,
        signed: bool,
        mode: Rounding,
    ) -> u64 {
        let mask = u64::MAX >> (64 - bits);
        let indefinite = if signed { 1 << (bits - 1) } else { mask };
        let v = self.flush(from, v);
        if from.is_nan(v) || from.is_infinite(v) {
            self.flags |= IE;
            return indefinite;
        }
        if from.is_zero(v) {
            return 0;
        }
        let n = Self::split(from, v);
        let (magnitude, inexact) = match integer_part(n, mode) {
            Some(found) => found,
            None => {
                self.flags |= IE;
                return indefinite;
            }
        };
        let limit = match (signed, n.negative) {
            (true, false) => u128::from(mask >> 1),
            (true, true) => u128::from(mask >> 1) + 1,
            (false, false) => u128::from(mask),
            (false, true) => 0,
        };
        if magnitude > limit {
            self.flags |= IE;
            return indefinite;
        }
        if inexact {
            self.flags |= PE;
        }
        let magnitude = low64(magnitude);
        mask & if n.negative {
            magnitude.wrapping_neg()
        } else {
            magnitude
        }
    }

    /// Rounds to a multiple of `2^-scale`; the precision exception is optional.
    pub(super) fn round_scaled(
        &mut self,
        f: FloatFormat,
        v: u64,
        scale: i32,
        mode: Rounding,
        flags_inexact: bool,
    ) -> u64 {
        let v = self.flush(f, v);
        if let Some(nan) = self.nan(f, &[v]) {
            return nan;
        }
        if f.is_infinite(v) || f.is_zero(v) {
            return v;
        }
        let mut n = Self::split(f, v);
        n.exponent += scale;
        let Some((magnitude, inexact)) = integer_part(n, mode) else {
            return v;
        };
        if inexact && flags_inexact {
            self.flags |= PE;
        }
        if magnitude == 0 {
            return f.with_sign(n.negative, 0);
        }
        let mut exact = Self {
            flush_to_zero: false,
            ..*self
        };
        exact.pack(f, n.negative, 126 - scale, magnitude)
    }
}

/// Rounds a number's magnitude to an integer, which may be inexact.
///
/// Returns `None` if it has more than 64 bits.
fn integer_part(n: FiniteNumber, mode: Rounding) -> Option<(u128, bool)> {
    if n.exponent > 63 {
        return None;
    }
    // 2^(exponent - 63) is at most 1: drop the fraction bits, and keep one for rounding.
    let wide = u128::from(n.significand) << 1;
    let drop = (64 - n.exponent).cast_unsigned();
    Some(if drop > 100 {
        round_off(1, 100, n.negative, mode)
    } else {
        round_off(wide, drop, n.negative, mode)
    })
}

/// Converts a NaN to another format, and makes it quiet.
fn nan_payload(from: FloatFormat, to: FloatFormat, v: u64) -> u64 {
    let fraction = v & from.fraction();
    let fraction = if to.fraction_bits >= from.fraction_bits {
        fraction << (to.fraction_bits - from.fraction_bits)
    } else {
        fraction >> (from.fraction_bits - to.fraction_bits)
    };
    to.with_sign(from.is_negative(v), to.infinity() | to.quiet() | fraction)
}
