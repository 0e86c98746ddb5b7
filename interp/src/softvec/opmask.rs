//! Instructions of the opmask registers.

use super::run::{Run, SoftHandler};
use iced_x86::Mnemonic as M;

/// Returns the mask of the lowest `bits` bits.
fn all(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

fn binary(r: &mut Run<'_>, bits: u32, f: fn(u64, u64) -> u64) {
    let v = f(r.scalar(1), r.scalar(2)) & all(bits);
    r.set_scalar(v);
}

fn unary(r: &mut Run<'_>, bits: u32, f: fn(u64) -> u64) {
    let v = f(r.scalar(1)) & all(bits);
    r.set_scalar(v);
}

fn add(a: u64, b: u64) -> u64 {
    a.wrapping_add(b)
}

fn shift(r: &mut Run<'_>, bits: u32, left: bool) {
    let by = u32::from(r.imm());
    let v = r.scalar(1) & all(bits);
    let shifted = if left {
        v.checked_shl(by)
    } else {
        v.checked_shr(by)
    };
    let v = shifted.filter(|_| by < bits).unwrap_or(0) & all(bits);
    r.set_scalar(v);
}

/// KUNPCK: the first source is the high half.
fn unpack(r: &mut Run<'_>, bits: u32) {
    let half = bits / 2;
    let v = (r.scalar(1) & all(half)) << half | r.scalar(2) & all(half);
    r.set_scalar(v);
}

/// KORTEST.
fn or_test(r: &mut Run<'_>, bits: u32) {
    let v = (r.scalar(0) | r.scalar(1)) & all(bits);
    r.set_flags(v == 0, false, v == all(bits));
}

fn test(r: &mut Run<'_>, bits: u32) {
    let (a, b) = (r.scalar(0), r.scalar(1));
    let (both, only) = (a & b & all(bits), !a & b & all(bits));
    r.set_flags(both == 0, false, only == 0);
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    logic(m).or_else(|| others(m))
}

fn logic(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Kandb => |r| binary(r, 8, |a, b| a & b),
        M::Kandw => |r| binary(r, 16, |a, b| a & b),
        M::Kandd => |r| binary(r, 32, |a, b| a & b),
        M::Kandq => |r| binary(r, 64, |a, b| a & b),
        M::Kandnb => |r| binary(r, 8, |a, b| !a & b),
        M::Kandnw => |r| binary(r, 16, |a, b| !a & b),
        M::Kandnd => |r| binary(r, 32, |a, b| !a & b),
        M::Kandnq => |r| binary(r, 64, |a, b| !a & b),
        M::Korb => |r| binary(r, 8, |a, b| a | b),
        M::Korw => |r| binary(r, 16, |a, b| a | b),
        M::Kord => |r| binary(r, 32, |a, b| a | b),
        M::Korq => |r| binary(r, 64, |a, b| a | b),
        M::Kxorb => |r| binary(r, 8, |a, b| a ^ b),
        M::Kxorw => |r| binary(r, 16, |a, b| a ^ b),
        M::Kxord => |r| binary(r, 32, |a, b| a ^ b),
        M::Kxorq => |r| binary(r, 64, |a, b| a ^ b),
        M::Kxnorb => |r| binary(r, 8, |a, b| !(a ^ b)),
        M::Kxnorw => |r| binary(r, 16, |a, b| !(a ^ b)),
        M::Kxnord => |r| binary(r, 32, |a, b| !(a ^ b)),
        M::Kxnorq => |r| binary(r, 64, |a, b| !(a ^ b)),
        M::Kaddb => |r| binary(r, 8, add),
        M::Kaddw => |r| binary(r, 16, add),
        M::Kaddd => |r| binary(r, 32, add),
        M::Kaddq => |r| binary(r, 64, add),
        _ => return None,
    })
}

fn others(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Knotb => |r| unary(r, 8, |a| !a),
        M::Knotw => |r| unary(r, 16, |a| !a),
        M::Knotd => |r| unary(r, 32, |a| !a),
        M::Knotq => |r| unary(r, 64, |a| !a),
        M::Kmovb => |r| unary(r, 8, |a| a),
        M::Kmovw => |r| unary(r, 16, |a| a),
        M::Kmovd => |r| unary(r, 32, |a| a),
        M::Kmovq => |r| unary(r, 64, |a| a),
        M::Kshiftlb => |r| shift(r, 8, true),
        M::Kshiftlw => |r| shift(r, 16, true),
        M::Kshiftld => |r| shift(r, 32, true),
        M::Kshiftlq => |r| shift(r, 64, true),
        M::Kshiftrb => |r| shift(r, 8, false),
        M::Kshiftrw => |r| shift(r, 16, false),
        M::Kshiftrd => |r| shift(r, 32, false),
        M::Kshiftrq => |r| shift(r, 64, false),
        M::Kunpckbw => |r| unpack(r, 16),
        M::Kunpckwd => |r| unpack(r, 32),
        M::Kunpckdq => |r| unpack(r, 64),
        M::Kortestb => |r| or_test(r, 8),
        M::Kortestw => |r| or_test(r, 16),
        M::Kortestd => |r| or_test(r, 32),
        M::Kortestq => |r| or_test(r, 64),
        M::Ktestb => |r| test(r, 8),
        M::Ktestw => |r| test(r, 16),
        M::Ktestd => |r| test(r, 32),
        M::Ktestq => |r| test(r, 64),
        _ => return None,
    })
}
