//! Floating-point arithmetic on bits, with the rounding and the flags of MXCSR.
//!
//! SDM Vol. 1, "SSE and SSE2 Instructions" in "SIMD Floating-Point Exceptions", and "Operating on
//! SNaNs and QNaNs". All exceptions are masked: the caller raises unmasked ones from the flags. A
//! result is tiny if it is so after rounding with an unbounded exponent.

use super::format::FloatFormat;

/// Invalid operation; the following constants are the other flags of MXCSR.
pub(super) const IE: u32 = 1;
pub(super) const DE: u32 = 1 << 1;
pub(super) const ZE: u32 = 1 << 2;
pub(super) const OE: u32 = 1 << 3;
pub(super) const UE: u32 = 1 << 4;
pub(super) const PE: u32 = 1 << 5;

/// A rounding mode, numbered as in MXCSR.RC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rounding {
    NearestEven,
    Down,
    Up,
    TowardZero,
}

impl Rounding {
    pub(super) fn from_bits(bits: u32) -> Self {
        match bits & 3 {
            0 => Self::NearestEven,
            1 => Self::Down,
            2 => Self::Up,
            _ => Self::TowardZero,
        }
    }
}

/// The control bits of MXCSR, and the flags that were raised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Env {
    pub(super) rounding: Rounding,
    pub(super) denormals_are_zero: bool,
    pub(super) flush_to_zero: bool,
    pub(super) flags: u32,
}

/// A nonzero number: `significand * 2^(exponent - 63)`, with bit 63 of the significand set.
#[derive(Clone, Copy, Debug)]
pub(super) struct FiniteNumber {
    pub(super) negative: bool,
    pub(super) exponent: i32,
    pub(super) significand: u64,
}

/// Shifts right; the lowest bit of the result is set if any bit was lost.
fn shift_right_jam(v: u128, by: u32) -> u128 {
    match by {
        0 => v,
        1..=127 => v >> by | u128::from(v << (128 - by) != 0),
        _ => u128::from(v != 0),
    }
}

/// Drops low bits and rounds; returns the rounded value and whether it is inexact.
pub(super) fn round_off(v: u128, drop: u32, negative: bool, mode: Rounding) -> (u128, bool) {
    let whole = v >> drop;
    let rest = v & ((1 << drop) - 1);
    let half = 1_u128 << (drop - 1);
    let up = match mode {
        Rounding::NearestEven => rest > half || (rest == half && whole & 1 == 1),
        Rounding::Down => negative && rest != 0,
        Rounding::Up => !negative && rest != 0,
        Rounding::TowardZero => false,
    };
    (whole + u128::from(up), rest != 0)
}

/// Returns the low half.
pub(super) fn low64(v: u128) -> u64 {
    u64::try_from(v & u128::from(u64::MAX)).unwrap_or(0)
}

impl Env {
    /// Returns a number's operand: a denormal is made zero if DAZ is set.
    pub(super) fn flush(&self, f: FloatFormat, v: u64) -> u64 {
        if self.denormals_are_zero && f.is_denormal(v) {
            v & f.sign()
        } else {
            v
        }
    }

    /// Splits a finite nonzero number.
    pub(super) fn split(f: FloatFormat, v: u64) -> FiniteNumber {
        let biased = (v & f.infinity()) >> f.fraction_bits;
        let fraction = v & f.fraction();
        let (exponent, significand) = if biased == 0 {
            let zeros = fraction.leading_zeros();
            let top = 63 - zeros.cast_signed();
            let lowest = 1 - f.bias() - f.fraction_bits.cast_signed();
            (lowest + top, fraction << zeros)
        } else {
            let exponent = i32::try_from(biased).unwrap_or(0) - f.bias();
            let one = fraction | 1 << f.fraction_bits;
            (exponent, one << (63 - f.fraction_bits))
        };
        FiniteNumber {
            negative: f.is_negative(v),
            exponent,
            significand,
        }
    }

    /// Rounds `significand * 2^(exponent - 126)`, which is not zero, to a format.
    ///
    /// The significand's lowest bit stands for all bits below it.
    pub(super) fn pack(
        &mut self,
        f: FloatFormat,
        negative: bool,
        exponent: i32,
        significand: u128,
    ) -> u64 {
        let zeros = significand.leading_zeros().cast_signed();
        let exponent = exponent + 1 - zeros;
        let v = match zeros {
            0 => shift_right_jam(significand, 1),
            n => significand << (n - 1),
        };
        let drop = 126 - f.fraction_bits;
        let lowest = 1 - f.bias();
        let (mut rounded, inexact) = round_off(v, drop, negative, self.rounding);
        let mut unbounded = exponent;
        if rounded >> (f.fraction_bits + 1) != 0 {
            rounded >>= 1;
            unbounded += 1;
        }
        if unbounded < lowest {
            if self.flush_to_zero {
                self.flags |= UE | PE;
                return f.with_sign(negative, 0);
            }
            let down = (lowest - exponent).cast_unsigned();
            let v = shift_right_jam(v, down);
            let (rounded, inexact) = round_off(v, drop, negative, self.rounding);
            if inexact {
                self.flags |= UE | PE;
            }
            return f.with_sign(negative, low64(rounded));
        }
        if unbounded > f.bias() {
            self.flags |= OE | PE;
            let away = match self.rounding {
                Rounding::NearestEven => true,
                Rounding::Down => negative,
                Rounding::Up => !negative,
                Rounding::TowardZero => false,
            };
            return f.with_sign(negative, f.infinity() - u64::from(!away));
        }
        if inexact {
            self.flags |= PE;
        }
        let biased = u64::from((unbounded + f.bias()).cast_unsigned());
        f.with_sign(
            negative,
            biased << f.fraction_bits | low64(rounded) & f.fraction(),
        )
    }

    /// Returns the result if an operand is a NaN: the first one, made quiet.
    pub(super) fn nan(&mut self, f: FloatFormat, operands: &[u64]) -> Option<u64> {
        let first = operands.iter().find(|v| f.is_nan(**v))?;
        if operands.iter().any(|v| f.is_signaling(*v)) {
            self.flags |= IE;
        }
        Some(first | f.quiet())
    }

    /// Flags an invalid operation; returns its result.
    pub(super) fn invalid(&mut self, f: FloatFormat) -> u64 {
        self.flags |= IE;
        f.indefinite()
    }

    /// Flags a denormal operand.
    pub(super) fn check_denormals(&mut self, f: FloatFormat, operands: &[u64]) {
        if operands.iter().any(|v| f.is_denormal(*v)) {
            self.flags |= DE;
        }
    }

    /// Returns the zero that is the sum of two numbers of opposite signs.
    fn cancelled(&self, f: FloatFormat) -> u64 {
        f.with_sign(self.rounding == Rounding::Down, 0)
    }

    /// Adds two values `v * 2^(exponent - 125)` that are not zero.
    fn sum(&mut self, f: FloatFormat, a: (bool, i32, u128), b: (bool, i32, u128)) -> u64 {
        let exponent = a.1.max(b.1);
        let align = |v: (bool, i32, u128)| {
            shift_right_jam(v.2, (exponent - v.1).cast_unsigned()).cast_signed()
        };
        let (x, y) = (align(a), align(b));
        if a.0 == b.0 {
            return self.pack(f, a.0, exponent + 1, x.unsigned_abs() + y.unsigned_abs());
        }
        if x == y {
            return self.cancelled(f);
        }
        let negative = if x > y { a.0 } else { b.0 };
        self.pack(f, negative, exponent + 1, x.abs_diff(y))
    }

    pub(super) fn add(&mut self, f: FloatFormat, a: u64, b: u64) -> u64 {
        let (a, b) = (self.flush(f, a), self.flush(f, b));
        if let Some(nan) = self.nan(f, &[a, b]) {
            return nan;
        }
        if f.is_infinite(a) && f.is_infinite(b) && a != b {
            return self.invalid(f);
        }
        self.check_denormals(f, &[a, b]);
        if f.is_infinite(a) || f.is_infinite(b) {
            return if f.is_infinite(a) { a } else { b };
        }
        match (f.is_zero(a), f.is_zero(b)) {
            (true, true) if a == b => a,
            (true, true) => self.cancelled(f),
            (true, false) => self.repack(f, b),
            (false, true) => self.repack(f, a),
            (false, false) => {
                let wide = |v| {
                    let n = Self::split(f, v);
                    (n.negative, n.exponent, u128::from(n.significand) << 62)
                };
                self.sum(f, wide(a), wide(b))
            }
        }
    }

    pub(super) fn sub(&mut self, f: FloatFormat, a: u64, b: u64) -> u64 {
        let b = if f.is_nan(b) { b } else { b ^ f.sign() };
        self.add(f, a, b)
    }

    /// Rounds a finite number of the same format: a denormal may be flushed to zero.
    fn repack(&mut self, f: FloatFormat, v: u64) -> u64 {
        let n = Self::split(f, v);
        let wide = u128::from(n.significand) << 63;
        self.pack(f, n.negative, n.exponent, wide)
    }

    pub(super) fn mul(&mut self, f: FloatFormat, a: u64, b: u64) -> u64 {
        let (a, b) = (self.flush(f, a), self.flush(f, b));
        if let Some(nan) = self.nan(f, &[a, b]) {
            return nan;
        }
        let infinite = f.is_infinite(a) || f.is_infinite(b);
        let zero = f.is_zero(a) || f.is_zero(b);
        if infinite && zero {
            return self.invalid(f);
        }
        self.check_denormals(f, &[a, b]);
        let sign = (a ^ b) & f.sign();
        if infinite {
            return sign | f.infinity();
        }
        if zero {
            return sign;
        }
        let (x, y) = (Self::split(f, a), Self::split(f, b));
        let product = u128::from(x.significand) * u128::from(y.significand);
        self.pack(f, sign != 0, x.exponent + y.exponent, product)
    }

    pub(super) fn div(&mut self, f: FloatFormat, a: u64, b: u64) -> u64 {
        let (a, b) = (self.flush(f, a), self.flush(f, b));
        if let Some(nan) = self.nan(f, &[a, b]) {
            return nan;
        }
        let (zeros, infinite) = (
            (f.is_zero(a), f.is_zero(b)),
            (f.is_infinite(a), f.is_infinite(b)),
        );
        if zeros == (true, true) || infinite == (true, true) {
            return self.invalid(f);
        }
        let sign = (a ^ b) & f.sign();
        if zeros.1 && !infinite.0 {
            self.flags |= ZE;
            return sign | f.infinity();
        }
        self.check_denormals(f, &[a, b]);
        if infinite.0 {
            return sign | f.infinity();
        }
        if infinite.1 || zeros.0 {
            return sign;
        }
        let (x, y) = (Self::split(f, a), Self::split(f, b));
        let dividend = u128::from(x.significand) << 63;
        let divisor = u128::from(y.significand);
        let sticky = u128::from(dividend % divisor != 0);
        let quotient = (dividend / divisor) << 63 | sticky;
        self.pack(f, sign != 0, x.exponent - y.exponent, quotient)
    }

    pub(super) fn sqrt(&mut self, f: FloatFormat, a: u64) -> u64 {
        let a = self.flush(f, a);
        if let Some(nan) = self.nan(f, &[a]) {
            return nan;
        }
        if f.is_zero(a) {
            return a;
        }
        if f.is_negative(a) {
            return self.invalid(f);
        }
        if f.is_infinite(a) {
            return a;
        }
        self.check_denormals(f, &[a]);
        let n = Self::split(f, a);
        let odd = n.exponent.rem_euclid(2);
        let radicand = u128::from(n.significand) << (63 + odd);
        let root = radicand.isqrt();
        let sticky = u128::from(root * root != radicand);
        self.pack(f, false, n.exponent.div_euclid(2), root << 63 | sticky)
    }

    /// Computes `a * b + c` with one rounding.
    pub(super) fn fma(&mut self, f: FloatFormat, a: u64, b: u64, c: u64) -> u64 {
        let (a, b, c) = (self.flush(f, a), self.flush(f, b), self.flush(f, c));
        let infinite = f.is_infinite(a) || f.is_infinite(b);
        let zero = f.is_zero(a) || f.is_zero(b);
        if let Some(nan) = self.nan(f, &[a, b, c]) {
            return nan;
        }
        let sign = (a ^ b) & f.sign();
        let opposite = f.is_infinite(c) && sign != c & f.sign();
        if infinite && (zero || opposite) {
            return self.invalid(f);
        }
        self.check_denormals(f, &[a, b, c]);
        if infinite {
            return sign | f.infinity();
        }
        if f.is_infinite(c) {
            return c;
        }
        match (zero, f.is_zero(c)) {
            (true, true) if sign == c & f.sign() => c,
            (true, true) => self.cancelled(f),
            (true, false) => self.repack(f, c),
            (false, true) => self.mul_quietly(f, a, b),
            (false, false) => {
                let (x, y, z) = (Self::split(f, a), Self::split(f, b), Self::split(f, c));
                // The lowest 22 bits of the product are zero.
                let product = (u128::from(x.significand) * u128::from(y.significand)) >> 1;
                let addend = u128::from(z.significand) << 62;
                self.sum(
                    f,
                    (sign != 0, x.exponent + y.exponent, product),
                    (z.negative, z.exponent, addend),
                )
            }
        }
    }

    /// Multiplies two nonzero finite numbers whose denormals have been flagged.
    fn mul_quietly(&mut self, f: FloatFormat, a: u64, b: u64) -> u64 {
        let (x, y) = (Self::split(f, a), Self::split(f, b));
        let product = u128::from(x.significand) * u128::from(y.significand);
        self.pack(
            f,
            x.negative != y.negative,
            x.exponent + y.exponent,
            product,
        )
    }
}
