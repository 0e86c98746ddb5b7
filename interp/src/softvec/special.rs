//! Floating-point instructions beyond arithmetic: exponents, ranges, repairs and estimates.
//!
//! Estimates are the exact value rounded to nearest even: to 14 fraction bits in VRCP14 and
//! VRSQRT14, and to 12 in VRCPPS and VRSQRTPS, as the portable RCPPS. The manual bounds their
//! relative errors by 2^-14 and 1.5 * 2^-12.

use super::element::get;
use super::estimate;
use super::float::{Env, IE, PE, Rounding, ZE};
use super::format::FloatFormat;
use super::run::{Run, SoftHandler};
use iced_x86::Mnemonic as M;

/// Sets elements to a function of the last source.
fn unary(r: &mut Run<'_>, f: fn(&mut Env, FloatFormat, u64, u8) -> u64) {
    let a = r.source(if r.is_scalar() { 2 } else { 1 });
    let imm = r.imm();
    let format = r.format();
    r.each_float(|r, n| f(&mut r.env, format, get(&a, format.size(), n), imm));
}

fn binary(r: &mut Run<'_>, f: fn(&mut Env, FloatFormat, u64, u64, u8) -> u64) {
    let (a, b) = (r.source(1), r.source(2));
    let imm = r.imm();
    let format = r.format();
    let size = format.size();
    r.each_float(|r, n| f(&mut r.env, format, get(&a, size, n), get(&b, size, n), imm));
}

/// VGETEXP: the exponent as a floating-point number.
fn exponent(env: &mut Env, f: FloatFormat, v: u64, _: u8) -> u64 {
    let v = env.flush(f, v);
    if let Some(nan) = env.nan(f, &[v]) {
        return nan;
    }
    if f.is_infinite(v) {
        return f.infinity();
    }
    if f.is_zero(v) {
        return f.sign() | f.infinity();
    }
    env.check_denormals(f, &[v]);
    let exponent = Env::split(f, v).exponent;
    env.integer_to_float(f, exponent < 0, exponent.unsigned_abs().into())
}

/// VGETMANT: the significand, in the interval and with the sign that the immediate selects.
fn mantissa(env: &mut Env, f: FloatFormat, v: u64, imm: u8) -> u64 {
    let v = env.flush(f, v);
    if let Some(nan) = env.nan(f, &[v]) {
        return nan;
    }
    let sign = if imm & 4 != 0 { 0 } else { v & f.sign() };
    if f.is_zero(v) {
        return sign | f.one();
    }
    if f.is_negative(v) && imm & 8 != 0 {
        return env.invalid(f);
    }
    if f.is_infinite(v) {
        return sign | f.one();
    }
    env.check_denormals(f, &[v]);
    let n = Env::split(f, v);
    let halved = match imm & 3 {
        0 => false,
        1 => n.exponent.rem_euclid(2) == 1,
        2 => true,
        _ => n.significand >> 62 & 1 != 0,
    };
    let fraction = n.significand << 1 >> (64 - f.fraction_bits);
    let biased = f.one() >> f.fraction_bits;
    sign | (biased - u64::from(halved)) << f.fraction_bits | fraction
}

/// VSCALEF: the first number times two to the power of the second's integer part.
fn scale(env: &mut Env, f: FloatFormat, a: u64, b: u64, _: u8) -> u64 {
    let (a, b) = (env.flush(f, a), env.flush(f, b));
    let up = f.is_infinite(b) && !f.is_negative(b);
    let down = f.is_infinite(b) && f.is_negative(b);
    if f.is_nan(a) && !f.is_signaling(a) && f.is_infinite(b) {
        return if up { f.infinity() } else { 0 };
    }
    if let Some(nan) = env.nan(f, &[a, b]) {
        return nan;
    }
    if (f.is_infinite(a) && down) || (f.is_zero(a) && up) {
        return env.invalid(f);
    }
    // A denormal second operand is not flagged.
    env.check_denormals(f, &[a]);
    if f.is_infinite(a) || f.is_zero(a) {
        return a;
    }
    let sign = a & f.sign();
    if f.is_infinite(b) {
        return if up { sign | f.infinity() } else { sign };
    }
    let power = if f.is_zero(b) {
        0
    } else {
        let mut quiet = *env;
        let floor = quiet.float_to_integer(f, b, 32, true, Rounding::Down);
        match i32::try_from(floor.cast_signed() << 32 >> 32) {
            // The indefinite integer stands for all that do not fit.
            Ok(i32::MIN) | Err(_) if f.is_negative(b) => -0x10000,
            Ok(i32::MIN) | Err(_) => 0x10000,
            Ok(n) => n.clamp(-0x10000, 0x10000),
        }
    };
    let n = Env::split(f, a);
    let wide = u128::from(n.significand) << 63;
    env.pack(f, n.negative, n.exponent + power, wide)
}

/// VRANGE: the smaller or larger number, by value or magnitude, with a chosen sign.
fn range(env: &mut Env, f: FloatFormat, a: u64, b: u64, imm: u8) -> u64 {
    if f.is_signaling(a) || f.is_signaling(b) {
        env.flags |= IE;
        let signaling = if f.is_signaling(a) { a } else { b };
        return signaling | f.quiet();
    }
    let magnitude = |v: u64| v & !f.sign();
    let (a, b) = (env.flush(f, a), env.flush(f, b));
    let chosen = if f.is_nan(a) {
        if f.is_nan(b) { a } else { b }
    } else if f.is_nan(b) {
        a
    } else {
        env.check_denormals(f, &[a, b]);
        let (max, absolute) = (imm & 1 != 0, imm & 2 != 0);
        let order = if absolute {
            magnitude(a).cmp(&magnitude(b))
        } else {
            f.order(a, b)
        };
        // Of equal magnitudes, the positive number is the larger one.
        let order = order.then_with(|| f.is_negative(b).cmp(&f.is_negative(a)));
        if order.is_gt() == max { a } else { b }
    };
    match imm >> 2 & 3 {
        0 => magnitude(chosen) | a & f.sign(),
        1 => chosen,
        2 => magnitude(chosen),
        _ => magnitude(chosen) | f.sign(),
    }
}

/// VREDUCE: what rounding to a number of fraction bits drops.
///
/// An inexact rounding is flagged, as the manual's operation has it. AMD family 1AH flags only an
/// inexact subtraction.
fn reduce(env: &mut Env, f: FloatFormat, v: u64, imm: u8) -> u64 {
    let v = env.flush(f, v);
    if let Some(nan) = env.nan(f, &[v]) {
        return nan;
    }
    if f.is_infinite(v) {
        return 0;
    }
    let mode = env.rounding_of(imm);
    let rounded = env.round_scaled(f, v, (imm >> 4).into(), mode, imm & 8 == 0);
    let mut exact = Env {
        rounding: mode,
        flags: 0,
        ..*env
    };
    let rest = exact.sub(f, v, rounded);
    if imm & 8 == 0 {
        env.flags |= exact.flags & PE;
    }
    rest
}

/// Returns the constant of a response of VFIXUPIMM, or one that depends on the source.
fn response(env: &mut Env, f: FloatFormat, number: u64, target: u64, v: u64) -> u64 {
    let half = f.one() - (1 << f.fraction_bits);
    let wide = |bits: u64| {
        let mut nearest = Env {
            rounding: Rounding::NearestEven,
            ..*env
        };
        nearest.resize(super::format::F64, f, bits)
    };
    match number {
        0 => target,
        1 => v,
        2 => f.infinity() | f.quiet() | v,
        3 => f.indefinite(),
        4 => f.sign() | f.infinity(),
        5 => f.infinity(),
        6 => v & f.sign() | f.infinity(),
        7 => f.sign(),
        8 => 0,
        9 => f.sign() | f.one(),
        10 => f.one(),
        11 => half,
        12 => wide(90.0_f64.to_bits()),
        13 => wide(std::f64::consts::FRAC_PI_2.to_bits()),
        14 => f.infinity() - 1,
        _ => f.sign() | (f.infinity() - 1),
    }
}

/// VFIXUPIMM: a table chooses the result by the class of the number.
fn repair(r: &mut Run<'_>) {
    let (target, a, table) = (r.target(), r.source(1), r.source(2));
    let imm = r.imm();
    let f = r.format();
    let size = f.size();
    r.each_float(|r, n| {
        let v = r.env.flush(f, get(&a, size, n));
        let negative = f.is_negative(v);
        // The class, and the flags of bits of the immediate: ZE and IE.
        let (class, zero_divide, invalid) = if f.is_signaling(v) {
            (1, 0, 4)
        } else if f.is_nan(v) {
            (0, 8, 8)
        } else if f.is_zero(v) {
            (2, 0, 1)
        } else if v == f.one() {
            (3, 2, 3)
        } else if f.is_infinite(v) {
            if negative { (4, 8, 5) } else { (5, 8, 7) }
        } else if negative {
            (6, 8, 6)
        } else {
            (7, 8, 8)
        };
        let is_set = |bit: u32| bit < 8 && imm >> bit & 1 != 0;
        if is_set(zero_divide) && matches!(class, 2 | 3) {
            r.env.flags |= ZE;
        }
        if is_set(invalid) {
            r.env.flags |= IE;
        }
        let number = get(&table, size, n) >> (4 * class) & 15;
        response(&mut r.env, f, number, get(&target, size, n), v)
    });
}

/// VRCP14.
fn reciprocal(env: &mut Env, f: FloatFormat, v: u64, _: u8) -> u64 {
    let v = env.flush(f, v);
    let sign = v & f.sign();
    if f.is_nan(v) {
        return v | f.quiet();
    }
    if f.is_zero(v) {
        return sign | f.infinity();
    }
    if f.is_infinite(v) {
        return sign;
    }
    let n = Env::split(f, v);
    let (dividend, divisor) = (1_u128 << 78, u128::from(n.significand));
    let (quotient, rest) = (dividend / divisor, dividend % divisor);
    let up = 2 * rest > divisor || (2 * rest == divisor && quotient & 1 == 1);
    estimated(
        env,
        f,
        sign != 0,
        -n.exponent - 15,
        quotient + u128::from(up),
    )
}

/// VRSQRT14.
fn reciprocal_root(env: &mut Env, f: FloatFormat, v: u64, _: u8) -> u64 {
    let v = env.flush(f, v);
    let sign = v & f.sign();
    if f.is_nan(v) {
        return v | f.quiet();
    }
    if f.is_zero(v) {
        return sign | f.infinity();
    }
    if sign != 0 {
        return f.indefinite();
    }
    if f.is_infinite(v) {
        return 0;
    }
    let n = Env::split(f, v);
    let odd = n.exponent.rem_euclid(2);
    let m = u128::from(n.significand) << odd;
    let root = ((1_u128 << 93) / m).isqrt();
    // Round up from the exact middle between two estimates.
    let middle = 2 * root + 1;
    let up = middle * middle * m < 1 << 95;
    let half = n.exponent.div_euclid(2);
    estimated(env, f, false, -half - 15, root + u128::from(up))
}

/// Packs `v * 2^exponent` without flags, in the nearest rounding.
fn estimated(env: &Env, f: FloatFormat, negative: bool, exponent: i32, v: u128) -> u64 {
    let mut nearest = Env {
        rounding: Rounding::NearestEven,
        ..*env
    };
    nearest.pack(f, negative, exponent + 126, v)
}

fn legacy_estimate(r: &mut Run<'_>, f: fn(u32) -> u32) {
    let a = r.source(if r.is_scalar() { 2 } else { 1 });
    r.each_float(|_, n| {
        let v = u32::try_from(get(&a, 4, n)).unwrap_or(0);
        f(v).into()
    });
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vgetexpps | M::Vgetexppd | M::Vgetexpss | M::Vgetexpsd => |r| unary(r, exponent),
        M::Vgetmantps | M::Vgetmantpd | M::Vgetmantss | M::Vgetmantsd => |r| unary(r, mantissa),
        M::Vscalefps | M::Vscalefpd | M::Vscalefss | M::Vscalefsd => |r| binary(r, scale),
        M::Vrangeps | M::Vrangepd | M::Vrangess | M::Vrangesd => |r| binary(r, range),
        M::Vreduceps | M::Vreducepd | M::Vreducess | M::Vreducesd => |r| unary(r, reduce),
        M::Vfixupimmps | M::Vfixupimmpd | M::Vfixupimmss | M::Vfixupimmsd => repair,
        M::Vrcp14ps | M::Vrcp14pd | M::Vrcp14ss | M::Vrcp14sd => |r| unary(r, reciprocal),
        M::Vrsqrt14ps | M::Vrsqrt14pd | M::Vrsqrt14ss | M::Vrsqrt14sd => {
            |r| unary(r, reciprocal_root)
        }
        M::Vrcpps | M::Vrcpss => |r| legacy_estimate(r, estimate::reciprocal),
        M::Vrsqrtps | M::Vrsqrtss => |r| legacy_estimate(r, estimate::reciprocal_root),
        _ => return None,
    })
}
