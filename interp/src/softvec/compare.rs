//! Comparisons and classifications of floating-point numbers, and tests that set flags.

use super::element::get;
use super::float::{Env, IE};
use super::format::FloatFormat;
use super::run::{Run, SoftHandler};
use iced_x86::Mnemonic as M;
use std::cmp::Ordering;

const LESS: u8 = 1;
const EQUAL: u8 = 2;
const GREATER: u8 = 4;
const UNORDERED: u8 = 8;

/// The relations that satisfy each predicate; predicate 16 and those after it repeat them.
const PREDICATES: [u8; 16] = [
    EQUAL,
    LESS,
    LESS | EQUAL,
    UNORDERED,
    UNORDERED | LESS | GREATER,
    UNORDERED | GREATER | EQUAL,
    UNORDERED | GREATER,
    LESS | EQUAL | GREATER,
    UNORDERED | EQUAL,
    UNORDERED | LESS,
    UNORDERED | LESS | EQUAL,
    0,
    LESS | GREATER,
    GREATER | EQUAL,
    GREATER,
    UNORDERED | LESS | EQUAL | GREATER,
];

/// Returns how two numbers compare; flags quiet NaNs too if `signals`.
fn relation(env: &mut Env, f: FloatFormat, a: u64, b: u64, signals: bool) -> u8 {
    let (a, b) = (env.flush(f, a), env.flush(f, b));
    if f.is_nan(a) || f.is_nan(b) {
        if signals || f.is_signaling(a) || f.is_signaling(b) {
            env.flags |= IE;
        }
        return UNORDERED;
    }
    env.check_denormals(f, &[a, b]);
    match f.order(a, b) {
        Ordering::Less => LESS,
        Ordering::Equal => EQUAL,
        Ordering::Greater => GREATER,
    }
}

/// VCMPPS and its like.
fn compare(r: &mut Run<'_>) {
    let (a, b) = (r.source(1), r.source(2));
    let predicate = r.imm() & 31;
    let accepted = PREDICATES[usize::from(predicate & 15)];
    let signals = matches!(predicate & 3, 1 | 2) != (predicate >= 16);
    let format = r.format();
    let size = format.size();
    let test = |r: &mut Run<'_>, n: usize| {
        let (a, b) = (get(&a, size, n), get(&b, size, n));
        relation(&mut r.env, format, a, b, signals) & accepted != 0
    };
    if r.is_scalar() && !r.is_opmask(0) {
        let v = if test(r, 0) { u64::MAX } else { 0 };
        r.set_low(size, v);
    } else {
        r.set_comparison(size, test);
    }
}

/// VCOMISS and VUCOMISS.
fn compare_to_flags(r: &mut Run<'_>, format: FloatFormat, signals: bool) {
    let size = format.size();
    let (a, b) = (get(&r.source(0), size, 0), get(&r.source(1), size, 0));
    let found = relation(&mut r.env, format, a, b, signals);
    let unordered = found == UNORDERED;
    r.set_flags(
        unordered || found == EQUAL,
        unordered,
        unordered || found == LESS,
    );
}

/// VPTEST, VTESTPS and VTESTPD: `mask` has the bits of each quadword that count.
fn test(r: &mut Run<'_>, mask: u64) {
    let (a, b) = (r.source(0), r.source(1));
    let any = |f: fn(u64, u64) -> u64| {
        (0..r.length() / 8).any(|n| f(get(&a, 8, n), get(&b, 8, n)) & mask != 0)
    };
    let (zero, carry) = (!any(|a, b| a & b), !any(|a, b| !a & b));
    r.set_flags(zero, false, carry);
}

/// VFPCLASS: whether a number is of one of the classes in the immediate.
fn classify(r: &mut Run<'_>) {
    let (a, classes) = (r.source(1), r.imm());
    let f = r.format();
    let size = f.size();
    r.set_comparison(size, |r, n| {
        let v = r.env.flush(f, get(&a, size, n));
        let negative = f.is_negative(v);
        let finite = !f.is_nan(v) && !f.is_infinite(v);
        let is = [
            f.is_nan(v) && !f.is_signaling(v),
            f.is_zero(v) && !negative,
            f.is_zero(v) && negative,
            f.is_infinite(v) && !negative,
            f.is_infinite(v) && negative,
            f.is_denormal(v),
            finite && negative && !f.is_zero(v),
            f.is_signaling(v),
        ];
        (0..8).any(|class| classes >> class & 1 != 0 && is[class])
    });
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    use super::format::{F32, F64};
    Some(match m {
        M::Vcmpps | M::Vcmppd | M::Vcmpss | M::Vcmpsd => compare,
        M::Vcomiss => |r| compare_to_flags(r, F32, true),
        M::Vcomisd => |r| compare_to_flags(r, F64, true),
        M::Vucomiss => |r| compare_to_flags(r, F32, false),
        M::Vucomisd => |r| compare_to_flags(r, F64, false),
        M::Vptest => |r| test(r, u64::MAX),
        M::Vtestps => |r| test(r, 0x8000_0000_8000_0000),
        M::Vtestpd => |r| test(r, 1 << 63),
        M::Vfpclassps | M::Vfpclasspd | M::Vfpclassss | M::Vfpclasssd => classify,
        _ => return None,
    })
}
