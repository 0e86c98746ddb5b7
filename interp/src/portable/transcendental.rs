//! The functions, on finite operands other than zero, to far more bits than the format holds.
//!
//! The rounding that follows is right unless the exact value lies within 2^-250 or so (relative) of
//! the middle between two numbers of the format, or of one of them; exact values are told apart.

use super::extended::{Exact, Extended};
use astro_float_num::{BigFloat, Consts, RoundingMode, Sign};

/// Bits to compute with.
const P: usize = 448;
/// Our rounding comes after; this one need not be exact.
const RM: RoundingMode = RoundingMode::None;
/// Below 2^-70 the first terms of the series are enough.
const SMALL: i64 = -70;

/// The functions with their cache of constants.
pub(crate) struct Functions {
    consts: Option<Consts>,
}

impl std::fmt::Debug for Functions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Functions").finish_non_exhaustive()
    }
}

impl Default for Functions {
    fn default() -> Self {
        Self {
            consts: Consts::new().ok(),
        }
    }
}

fn big(v: Extended) -> BigFloat {
    let (m, e) = v.parts();
    let sign = if v.negative() { Sign::Neg } else { Sign::Pos };
    let mut big = BigFloat::from_word(m, P);
    big.set_exponent(i32::try_from(e).unwrap_or(0));
    big.set_sign(sign);
    big
}

fn number(n: u64) -> BigFloat {
    BigFloat::from_word(n, P)
}

fn mul(a: &BigFloat, b: &BigFloat) -> BigFloat {
    a.mul(b, P, RM)
}

fn add(a: &BigFloat, b: &BigFloat) -> BigFloat {
    a.add(b, P, RM)
}

/// The result, known to be `exact` or to have more bits than it shows.
fn result(v: &BigFloat, exact: bool) -> Option<Exact> {
    let (words, _, sign, exponent, _) = v.as_raw_parts()?;
    let mut top = words.iter().rev();
    let bits = u128::from(*top.next()?) << 64 | u128::from(top.next().copied().unwrap_or(0));
    if bits >> 127 == 0 {
        return None;
    }
    Some(Exact {
        negative: sign == Sign::Neg,
        exponent: exponent.into(),
        bits,
        more: !exact || top.any(|&w| w != 0),
    })
}

/// 2^-200, a nudge for values that are just beside a number.
fn tiny() -> BigFloat {
    let mut v = number(1);
    v.set_exponent(-200);
    v
}

/// Just above `x` or just below it, in magnitude.
fn beside(x: &BigFloat, above: bool) -> BigFloat {
    let one = number(1);
    let factor = if above {
        add(&one, &tiny())
    } else {
        one.sub(&tiny(), P, RM)
    };
    mul(x, &factor)
}

impl Functions {
    fn ln2(&mut self) -> Option<BigFloat> {
        Some(number(2).ln(P, RM, self.consts.as_mut()?))
    }

    /// 2^x - 1 for x from -1 to 1.
    pub(super) fn exp2_less_1(&mut self, x: Extended) -> Option<Exact> {
        if x.parts() == (1 << 63, 1) {
            // 2^1 - 1 is 1, and 2^-1 - 1 is -1/2.
            let mut v = number(1);
            v.set_sign(if x.negative() { Sign::Neg } else { Sign::Pos });
            if x.negative() {
                v.set_exponent(0);
            }
            return result(&v, true);
        }
        let one = number(1);
        let t = mul(&big(x), &self.ln2()?);
        let v = if x.parts().1 < SMALL {
            let third = one.div(&number(3), P, RM);
            let half = one.div(&number(2), P, RM);
            let square = mul(&mul(&t, &t), &mul(&half, &third));
            mul(&t, &add(&add(&one, &mul(&t, &half)), &square))
        } else {
            t.exp(P, RM, self.consts.as_mut()?).sub(&one, P, RM)
        };
        result(&v, false)
    }

    /// y log2(x), x positive.
    pub(super) fn y_log2(&mut self, y: Extended, x: Extended) -> Option<Exact> {
        let (m, e) = x.parts();
        if m == 1 << 63 {
            // A power of two: the product is exact.
            let mut n = number((e - 1).unsigned_abs());
            n.set_sign(if e < 1 { Sign::Neg } else { Sign::Pos });
            return result(&mul(&big(y), &n), true);
        }
        let log = big(x).log2(P, RM, self.consts.as_mut()?);
        result(&mul(&big(y), &log), false)
    }

    /// y log2(x + 1), x above -1.
    pub(super) fn y_log2_plus_1(&mut self, y: Extended, x: Extended) -> Option<Exact> {
        let (one, big_x) = (number(1), big(x));
        let log = if x.parts().1 < SMALL {
            let third = one.div(&number(3), P, RM);
            let half = one.div(&number(2), P, RM);
            let series = add(
                &one.sub(&mul(&big_x, &half), P, RM),
                &mul(&mul(&big_x, &big_x), &third),
            );
            mul(&big_x, &series).div(&self.ln2()?, P, RM)
        } else {
            add(&one, &big_x).log2(P, RM, self.consts.as_mut()?)
        };
        // x + 1 is a power of two for x = 1, 3, -1/2 and so on.
        let sum = add(&one, &big_x);
        let exact = sum.as_raw_parts().is_some_and(|(words, ..)| {
            words
                .split_last()
                .is_some_and(|(top, rest)| *top == 1 << 63 && rest.iter().all(|w| *w == 0))
        });
        if exact && x.parts().1 >= SMALL {
            let n = i64::from(sum.exponent()?) - 1;
            let mut log = number(n.unsigned_abs());
            log.set_sign(if n < 0 { Sign::Neg } else { Sign::Pos });
            return result(&mul(&big(y), &log), true);
        }
        result(&mul(&big(y), &log), false)
    }

    pub(super) fn sin(&mut self, x: Extended) -> Option<Exact> {
        let v = big(x);
        let small = x.parts().1 < SMALL;
        result(
            &if small {
                beside(&v, false)
            } else {
                v.sin(P, RM, self.consts.as_mut()?)
            },
            false,
        )
    }

    pub(super) fn cos(&mut self, x: Extended) -> Option<Exact> {
        let small = x.parts().1 < SMALL;
        let v = if small {
            beside(&number(1), false)
        } else {
            big(x).cos(P, RM, self.consts.as_mut()?)
        };
        result(&v, false)
    }

    pub(super) fn tan(&mut self, x: Extended) -> Option<Exact> {
        let v = big(x);
        let small = x.parts().1 < SMALL;
        result(
            &if small {
                beside(&v, true)
            } else {
                v.tan(P, RM, self.consts.as_mut()?)
            },
            false,
        )
    }

    /// The angle of the point (x, y).
    pub(super) fn atan2(&mut self, y: Extended, x: Extended) -> Option<Exact> {
        let consts = self.consts.as_mut()?;
        let pi = consts.pi(P, RM);
        let q = big(y).div(&big(x), P, RM);
        let mut q = q.abs();
        let size = i64::from(q.exponent()?);
        let angle = if size > 200 {
            // π/2 less something that does not count.
            pi.div(&number(2), P, RM)
        } else if size < -100 {
            q = beside(&q, false);
            q
        } else {
            q.atan(P, RM, consts)
        };
        let mut angle = if x.negative() {
            pi.sub(&angle, P, RM)
        } else {
            angle
        };
        angle.set_sign(if y.negative() { Sign::Neg } else { Sign::Pos });
        result(&angle, false)
    }

    /// `quarters` times π/4.
    pub(super) fn pi(&mut self, quarters: u64, negative: bool) -> Option<Exact> {
        let pi = self.consts.as_mut()?.pi(P, RM);
        let mut v = mul(&pi, &number(quarters)).div(&number(4), P, RM);
        v.set_sign(if negative { Sign::Neg } else { Sign::Pos });
        result(&v, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::cast_possible_truncation, reason = "the exponent fits")]
    fn extended(v: f64) -> Extended {
        let bits = v.to_bits();
        let exponent = (bits >> 52 & 0x7ff) as u16 + 16383 - 1023;
        Extended {
            head: (bits >> 63 << 15) as u16 | exponent,
            significand: 1 << 63 | bits << 11,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "the comparison allows for it")]
    fn value(e: Option<Exact>) -> f64 {
        let r = e.expect("a result").round(0x37f).value;
        let (m, exponent) = r.parts();
        let v = m as f64 / 2_f64.powi(64) * 2_f64.powi(i32::try_from(exponent).expect("small"));
        if r.negative() { -v } else { v }
    }

    fn near(found: Option<Exact>, expected: f64) {
        let found = value(found);
        assert!(
            ((found - expected) / expected).abs() < 4e-16,
            "{found:e} {expected:e}"
        );
    }

    #[test]
    fn functions_agree_with_those_of_f64() {
        let mut f = Functions::default();
        for n in 1..200 {
            let x = f64::from(n) * 0.037 - 3.71;
            let e = extended(x);
            near(f.sin(e), x.sin());
            near(f.cos(e), x.cos());
            near(f.tan(e), x.tan());
            near(f.atan2(extended(0.7), e), 0.7_f64.atan2(x));
            near(
                f.y_log2(extended(1.5), extended(x.abs())),
                1.5 * x.abs().log2(),
            );
            let small = x / 4.0;
            near(
                f.exp2_less_1(extended(small)),
                (small * std::f64::consts::LN_2).exp_m1(),
            );
            near(
                f.y_log2_plus_1(extended(3.0), extended(small / 4.0)),
                3.0 * (small / 4.0).ln_1p() / std::f64::consts::LN_2,
            );
        }
    }

    #[test]
    fn tiny_operands_round_to_the_right_side() {
        let mut f = Functions::default();
        let x = extended(1e-30);
        let (down, up) = (0x77f, 0xb7f);
        assert_eq!(f.sin(x).map(|r| r.round(up).value), Some(x));
        assert_eq!(f.tan(x).map(|r| r.round(down).value), Some(x));
        assert_eq!(f.cos(x).map(|r| r.round(0x37f).value), Some(Extended::ONE));
        let below = Extended {
            head: 0x3ffe,
            significand: u64::MAX,
        };
        assert_eq!(f.cos(x).map(|r| r.round(down).value), Some(below));
    }

    #[test]
    fn exact_results_are_exact() {
        let mut f = Functions::default();
        let log = f
            .y_log2(extended(1.5), extended(1024.0))
            .expect("a result")
            .round(0x37f);
        assert_eq!((log.value, log.flags), (extended(15.0), 0));
        let half = f
            .exp2_less_1(extended(-1.0))
            .expect("a result")
            .round(0x37f);
        assert_eq!((half.value, half.flags), (extended(-0.5), 0));
        let plus = f
            .y_log2_plus_1(extended(2.0), extended(3.0))
            .expect("a result")
            .round(0x37f);
        assert_eq!((plus.value, plus.flags), (extended(4.0), 0));
    }
}
