//! Conversions between integers and floating-point formats.

use super::element::{get, put};
use super::float::{Env, Rounding};
use super::format::{F16, F32, F64, FloatFormat};
use super::run::{Run, SoftHandler};
use iced_x86::Mnemonic as M;

/// The type of an element.
#[derive(Clone, Copy)]
enum Type {
    Float(FloatFormat),
    /// A signed integer with this number of bits.
    Signed(u32),
    Unsigned(u32),
}

const S32: Type = Type::Signed(32);
const S64: Type = Type::Signed(64);
const U32: Type = Type::Unsigned(32);
const U64: Type = Type::Unsigned(64);
const HALF: Type = Type::Float(F16);
const SINGLE: Type = Type::Float(F32);
const DOUBLE: Type = Type::Float(F64);

impl Type {
    fn size(self) -> usize {
        match self {
            Self::Float(f) => f.size(),
            Self::Signed(bits) | Self::Unsigned(bits) => bits as usize / 8,
        }
    }
}

fn convert(env: &mut Env, from: Type, to: Type, truncate: bool, v: u64) -> u64 {
    let mode = if truncate {
        Rounding::TowardZero
    } else {
        env.rounding
    };
    match (from, to) {
        (Type::Float(from), Type::Float(to)) => env.resize(from, to, v),
        (Type::Float(from), Type::Signed(bits)) => env.float_to_integer(from, v, bits, true, mode),
        (Type::Float(from), Type::Unsigned(bits)) => {
            env.float_to_integer(from, v, bits, false, mode)
        }
        (Type::Signed(bits), Type::Float(to)) => {
            let v = (v << (64 - bits)).cast_signed() >> (64 - bits);
            env.integer_to_float(to, v < 0, v.unsigned_abs())
        }
        (_, Type::Float(to)) => env.integer_to_float(to, false, v),
        _ => v,
    }
}

/// Converts elements to elements of any size.
fn packed(r: &mut Run<'_>, from: Type, to: Type, truncate: bool) {
    let a = r.source(1);
    let count = r.memory_length() / from.size();
    let mut out = [0; 64];
    let mask = r.mask();
    for n in (0..count).filter(|n| mask >> n & 1 != 0) {
        let v = get(&a, from.size(), n);
        let v = convert(&mut r.env, from, to, truncate, v);
        put(&mut out, to.size(), n, v);
    }
    r.set_masked(to.size(), count * to.size(), out);
}

/// Converts the lowest element of the second source; the rest is the first source's.
fn lowest(r: &mut Run<'_>, from: Type, to: Type) {
    let v = if r.is_enabled(0) {
        let v = get(&r.source(2), from.size(), 0);
        convert(&mut r.env, from, to, false, v)
    } else {
        0
    };
    r.set_low(to.size(), v);
}

/// Converts the lowest element to a general register.
fn to_general(r: &mut Run<'_>, from: FloatFormat, signed: bool, truncate: bool) {
    let v = get(&r.source(1), from.size(), 0);
    let bits = if r.i.op0_register().size() == 8 {
        64
    } else {
        32
    };
    let to = if signed {
        Type::Signed(bits)
    } else {
        Type::Unsigned(bits)
    };
    let v = convert(&mut r.env, Type::Float(from), to, truncate, v);
    r.set_scalar(v);
}

/// Converts a general register, or memory, to the lowest element.
fn from_general(r: &mut Run<'_>, to: FloatFormat, signed: bool) {
    let size = if r.is_memory(2) {
        r.memory_length()
    } else {
        r.i.op2_register().size()
    };
    let bits = if size == 8 { 64 } else { 32 };
    let from = if signed {
        Type::Signed(bits)
    } else {
        Type::Unsigned(bits)
    };
    let v = r.scalar(2);
    let v = convert(&mut r.env, from, Type::Float(to), false, v);
    r.set_low(to.size(), v);
}

/// VCVTPS2PH, which never flushes its results to zero.
fn to_halves(r: &mut Run<'_>) {
    let a = r.source(1);
    let count = r.length() / 4;
    let mode = r.env.rounding_of(r.imm());
    let mut env = Env {
        rounding: mode,
        flush_to_zero: false,
        ..r.env
    };
    let mut out = [0; 64];
    for n in (0..count).filter(|&n| r.is_enabled(n)) {
        put(&mut out, 2, n, env.resize(F32, F16, get(&a, 4, n)));
    }
    r.env.flags = env.flags;
    r.set_masked(2, count * 2, out);
}

/// VCVTPH2PS, which takes denormal halves as they are.
fn from_halves(r: &mut Run<'_>) {
    r.env.denormals_are_zero = false;
    packed(r, HALF, SINGLE, false);
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    vectors(m).or_else(|| scalars(m))
}

fn vectors(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vcvtdq2pd => |r| packed(r, S32, DOUBLE, false),
        M::Vcvtdq2ps => |r| packed(r, S32, SINGLE, false),
        M::Vcvtudq2pd => |r| packed(r, U32, DOUBLE, false),
        M::Vcvtudq2ps => |r| packed(r, U32, SINGLE, false),
        M::Vcvtqq2pd => |r| packed(r, S64, DOUBLE, false),
        M::Vcvtqq2ps => |r| packed(r, S64, SINGLE, false),
        M::Vcvtuqq2pd => |r| packed(r, U64, DOUBLE, false),
        M::Vcvtuqq2ps => |r| packed(r, U64, SINGLE, false),
        M::Vcvtpd2dq => |r| packed(r, DOUBLE, S32, false),
        M::Vcvtpd2udq => |r| packed(r, DOUBLE, U32, false),
        M::Vcvtpd2qq => |r| packed(r, DOUBLE, S64, false),
        M::Vcvtpd2uqq => |r| packed(r, DOUBLE, U64, false),
        M::Vcvtps2dq => |r| packed(r, SINGLE, S32, false),
        M::Vcvtps2udq => |r| packed(r, SINGLE, U32, false),
        M::Vcvtps2qq => |r| packed(r, SINGLE, S64, false),
        M::Vcvtps2uqq => |r| packed(r, SINGLE, U64, false),
        M::Vcvttpd2dq => |r| packed(r, DOUBLE, S32, true),
        M::Vcvttpd2udq => |r| packed(r, DOUBLE, U32, true),
        M::Vcvttpd2qq => |r| packed(r, DOUBLE, S64, true),
        M::Vcvttpd2uqq => |r| packed(r, DOUBLE, U64, true),
        M::Vcvttps2dq => |r| packed(r, SINGLE, S32, true),
        M::Vcvttps2udq => |r| packed(r, SINGLE, U32, true),
        M::Vcvttps2qq => |r| packed(r, SINGLE, S64, true),
        M::Vcvttps2uqq => |r| packed(r, SINGLE, U64, true),
        M::Vcvtpd2ps => |r| packed(r, DOUBLE, SINGLE, false),
        M::Vcvtps2pd => |r| packed(r, SINGLE, DOUBLE, false),
        M::Vcvtph2ps => from_halves,
        M::Vcvtps2ph => to_halves,
        _ => return None,
    })
}

fn scalars(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vcvtsd2ss => |r| lowest(r, DOUBLE, SINGLE),
        M::Vcvtss2sd => |r| lowest(r, SINGLE, DOUBLE),
        M::Vcvtss2si => |r| to_general(r, F32, true, false),
        M::Vcvtsd2si => |r| to_general(r, F64, true, false),
        M::Vcvttss2si => |r| to_general(r, F32, true, true),
        M::Vcvttsd2si => |r| to_general(r, F64, true, true),
        M::Vcvtss2usi => |r| to_general(r, F32, false, false),
        M::Vcvtsd2usi => |r| to_general(r, F64, false, false),
        M::Vcvttss2usi => |r| to_general(r, F32, false, true),
        M::Vcvttsd2usi => |r| to_general(r, F64, false, true),
        M::Vcvtsi2ss => |r| from_general(r, F32, true),
        M::Vcvtsi2sd => |r| from_general(r, F64, true),
        M::Vcvtusi2ss => |r| from_general(r, F32, false),
        M::Vcvtusi2sd => |r| from_general(r, F64, false),
        _ => return None,
    })
}
