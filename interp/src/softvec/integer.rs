//! Shifts, rotations, comparisons, counts and changes of size of integers.

use super::element::{Element, VectorBytes, get, put};
use super::float::low64;
use super::run::{Run, SoftHandler};
use iced_x86::{Mnemonic as M, OpKind};

/// What a shift does.
#[derive(Clone, Copy)]
enum Shift {
    Left,
    Right,
    Arithmetic,
    RotateLeft,
    RotateRight,
}

/// Extends the sign of a value of `size` bytes.
fn signed(v: u64, size: usize) -> i64 {
    let unused = 64 - 8 * size;
    (v << unused).cast_signed() >> unused
}

fn shift(kind: Shift, size: usize, v: u64, count: u64) -> u64 {
    let bits = 8 * size as u64;
    let mask = u64::MAX >> (64 - bits);
    let shifted = match kind {
        Shift::Left | Shift::Right if count >= bits => 0,
        Shift::Left => v << count,
        Shift::Right => v >> count,
        Shift::Arithmetic => (signed(v, size) >> count.min(bits - 1)).cast_unsigned(),
        Shift::RotateLeft | Shift::RotateRight => {
            let left = match kind {
                Shift::RotateLeft => count % bits,
                _ => (bits - count % bits) % bits,
            };
            if left == 0 {
                v
            } else {
                v << left | v >> (bits - left)
            }
        }
    };
    shifted & mask
}

/// Shifts all elements by an immediate, or by the low quadword of the second source.
fn by_one(r: &mut Run<'_>, size: usize, kind: Shift) {
    let a = r.source(1);
    let count = if r.i.op_kind(2) == OpKind::Immediate8 {
        r.imm().into()
    } else {
        get(&r.source(2), 8, 0)
    };
    r.each_bits(size, |_, n| shift(kind, size, get(&a, size, n), count));
}

/// Shifts each element by the element of the second source.
fn by_each(r: &mut Run<'_>, size: usize, kind: Shift) {
    let (a, b) = (r.source(1), r.source(2));
    r.each_bits(size, |_, n| {
        shift(kind, size, get(&a, size, n), get(&b, size, n))
    });
}

/// Returns the low half of `high` and `low` together, shifted right by up to one half.
fn shifted_pair(size: usize, high: u64, low: u64, by: u64) -> u64 {
    low64((u128::from(high) << (8 * size) | u128::from(low)) >> by)
}

/// Shifts an element left, and the highest bits of `low` into it; the count wraps.
fn shift_left_from(size: usize, v: u64, low: u64, count: u64) -> u64 {
    let bits = 8 * size as u64;
    shifted_pair(size, v, low, bits - count % bits)
}

/// Shifts an element right, and the lowest bits of `high` into it; the count wraps.
fn shift_right_from(size: usize, v: u64, high: u64, count: u64) -> u64 {
    shifted_pair(size, high, v, count % (8 * size as u64))
}

/// A shift of an element of `size` bytes that takes bits from another one.
type PairShift = fn(size: usize, v: u64, other: u64, count: u64) -> u64;

/// VPSHLD and VPSHRD: the count is an immediate.
fn pairs_by_one(r: &mut Run<'_>, size: usize, f: PairShift) {
    let (a, b, count) = (r.source(1), r.source(2), u64::from(r.imm()));
    r.each_bits(size, |_, n| {
        f(size, get(&a, size, n), get(&b, size, n), count)
    });
}

/// VPSHLDV and VPSHRDV: the destination is shifted by the second source.
fn pairs_by_each(r: &mut Run<'_>, size: usize, f: PairShift) {
    let (target, a, b) = (r.target(), r.source(1), r.source(2));
    r.each_bits(size, |_, n| {
        let [v, other, count] = [&target, &a, &b].map(|from| get(from, size, n));
        f(size, v, other, count)
    });
}

/// VPCMPEQ and VPCMPGT.
fn compare<T: Element>(r: &mut Run<'_>, f: fn(&T, &T) -> bool) {
    let (a, b) = (r.source(1), r.source(2));
    r.set_comparison(T::SIZE, |_, n| f(&T::get(&a, n), &T::get(&b, n)));
}

/// VPCMP and VPCMPU, whose predicate is the immediate.
fn compare_by<T: Element + Ord>(r: &mut Run<'_>) {
    let predicate = r.imm() & 7;
    let (a, b) = (r.source(1), r.source(2));
    r.set_comparison(T::SIZE, |_, n| {
        let (a, b) = (T::get(&a, n), T::get(&b, n));
        match predicate {
            0 => a == b,
            1 => a < b,
            2 => a <= b,
            3 => false,
            4 => a != b,
            5 => a >= b,
            6 => a > b,
            _ => true,
        }
    });
}

/// VPTESTM and VPTESTNM.
fn test(r: &mut Run<'_>, size: usize, any: bool) {
    let (a, b) = (r.source(1), r.source(2));
    r.set_comparison(size, |_, n| {
        (get(&a, size, n) & get(&b, size, n) != 0) == any
    });
}

/// VPSHUFBITQMB: each byte of the second source selects a bit of the quadword in the first.
fn select_bits(r: &mut Run<'_>) {
    let (a, controls) = (r.source(1), r.source(2));
    r.set_comparison(1, |_, n| {
        u64::get(&a, n / 8) >> (u8::get(&controls, n) & 63) & 1 != 0
    });
}

/// VPOPCNT.
fn count_ones(r: &mut Run<'_>, size: usize) {
    let a = r.source(1);
    r.each_bits(size, |_, n| get(&a, size, n).count_ones().into());
}

/// VPMOVSX and VPMOVZX: extends elements of `from` bytes.
fn extend(r: &mut Run<'_>, from: usize, to: usize, sign: bool) {
    let a = r.source(1);
    r.each_bits(to, |_, n| {
        let v = get(&a, from, n);
        if sign {
            signed(v, from).cast_unsigned()
        } else {
            v
        }
    });
}

/// How elements are made smaller.
#[derive(Clone, Copy)]
enum Narrow {
    Truncate,
    Signed,
    Unsigned,
}

fn narrowed(v: u64, from: usize, to: usize, how: Narrow) -> u64 {
    let bits = 8 * to;
    match how {
        Narrow::Truncate => v,
        Narrow::Signed => {
            let max = i64::MAX >> (64 - bits);
            signed(v, from).clamp(-max - 1, max).cast_unsigned()
        }
        Narrow::Unsigned => v.min(u64::MAX >> (64 - bits)),
    }
}

/// VPMOVWB and its like; the destination may be memory.
fn narrow(r: &mut Run<'_>, from: usize, to: usize, how: Narrow) {
    let a = r.source(1);
    let count = r.length() / from;
    let mut out = [0; 64];
    for n in 0..count {
        put(&mut out, to, n, narrowed(get(&a, from, n), from, to, how));
    }
    r.set_masked(to, count * to, out);
}

/// VPACK: saturates the elements of both sources, in each 16-byte lane.
fn pack(r: &mut Run<'_>, from: usize, sign: bool) {
    let (a, b) = (r.source(1), r.source(2));
    let to = from / 2;
    let half = 16 / from;
    r.each_bits(to, |_, n| {
        let (lane, n) = (n / (2 * half), n % (2 * half));
        let source = if n < half { &a } else { &b };
        let v = signed(get(source, from, lane * half + n % half), from);
        if sign {
            narrowed(v.cast_unsigned(), 8, to, Narrow::Signed)
        } else {
            narrowed(v.max(0).cast_unsigned(), 8, to, Narrow::Unsigned)
        }
    });
}

/// VPCONFLICT: the elements before each one that equal it.
fn conflicts(r: &mut Run<'_>, size: usize) {
    let a = r.source(1);
    r.each_bits(size, |_, n| {
        let own = get(&a, size, n);
        let equal = (0..n).filter(|&m| get(&a, size, m) == own);
        equal.fold(0, |all, m| all | 1 << m)
    });
}

/// VPMOVB2M and its like: the sign bits.
fn signs(r: &mut Run<'_>, size: usize) {
    let a: VectorBytes = r.source(1);
    let bits = (0..r.length() / size).filter(|&n| signed(get(&a, size, n), size) < 0);
    let bits = bits.fold(0, |all, n| all | 1 << n);
    r.set_scalar(bits);
}

/// VPMOVM2B and its like.
fn spread(r: &mut Run<'_>, size: usize) {
    let bits = r.scalar(1);
    r.each_bits(size, |_, n| if bits >> n & 1 != 0 { u64::MAX } else { 0 });
}

fn broadcast_mask(r: &mut Run<'_>, size: usize, mask: u64) {
    let bits = r.scalar(1) & mask;
    r.each_bits(size, |_, _| bits);
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    shifts(m)
        .or_else(|| pair_shifts(m))
        .or_else(|| sizes(m))
        .or_else(|| comparisons(m))
}

fn shifts(m: M) -> Option<SoftHandler> {
    use Shift::{Arithmetic, Left, Right, RotateLeft, RotateRight};
    Some(match m {
        M::Vpsllw => |r| by_one(r, 2, Left),
        M::Vpslld => |r| by_one(r, 4, Left),
        M::Vpsllq => |r| by_one(r, 8, Left),
        M::Vpsrlw => |r| by_one(r, 2, Right),
        M::Vpsrld => |r| by_one(r, 4, Right),
        M::Vpsrlq => |r| by_one(r, 8, Right),
        M::Vpsraw => |r| by_one(r, 2, Arithmetic),
        M::Vpsrad => |r| by_one(r, 4, Arithmetic),
        M::Vpsraq => |r| by_one(r, 8, Arithmetic),
        M::Vprold => |r| by_one(r, 4, RotateLeft),
        M::Vprolq => |r| by_one(r, 8, RotateLeft),
        M::Vprord => |r| by_one(r, 4, RotateRight),
        M::Vprorq => |r| by_one(r, 8, RotateRight),
        M::Vpsllvw => |r| by_each(r, 2, Left),
        M::Vpsllvd => |r| by_each(r, 4, Left),
        M::Vpsllvq => |r| by_each(r, 8, Left),
        M::Vpsrlvw => |r| by_each(r, 2, Right),
        M::Vpsrlvd => |r| by_each(r, 4, Right),
        M::Vpsrlvq => |r| by_each(r, 8, Right),
        M::Vpsravw => |r| by_each(r, 2, Arithmetic),
        M::Vpsravd => |r| by_each(r, 4, Arithmetic),
        M::Vpsravq => |r| by_each(r, 8, Arithmetic),
        M::Vprolvd => |r| by_each(r, 4, RotateLeft),
        M::Vprolvq => |r| by_each(r, 8, RotateLeft),
        M::Vprorvd => |r| by_each(r, 4, RotateRight),
        M::Vprorvq => |r| by_each(r, 8, RotateRight),
        _ => return None,
    })
}

fn pair_shifts(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vpshldw => |r| pairs_by_one(r, 2, shift_left_from),
        M::Vpshldd => |r| pairs_by_one(r, 4, shift_left_from),
        M::Vpshldq => |r| pairs_by_one(r, 8, shift_left_from),
        M::Vpshrdw => |r| pairs_by_one(r, 2, shift_right_from),
        M::Vpshrdd => |r| pairs_by_one(r, 4, shift_right_from),
        M::Vpshrdq => |r| pairs_by_one(r, 8, shift_right_from),
        M::Vpshldvw => |r| pairs_by_each(r, 2, shift_left_from),
        M::Vpshldvd => |r| pairs_by_each(r, 4, shift_left_from),
        M::Vpshldvq => |r| pairs_by_each(r, 8, shift_left_from),
        M::Vpshrdvw => |r| pairs_by_each(r, 2, shift_right_from),
        M::Vpshrdvd => |r| pairs_by_each(r, 4, shift_right_from),
        M::Vpshrdvq => |r| pairs_by_each(r, 8, shift_right_from),
        _ => return None,
    })
}

fn sizes(m: M) -> Option<SoftHandler> {
    use Narrow::{Signed, Truncate, Unsigned};
    Some(match m {
        M::Vpmovsxbw => |r| extend(r, 1, 2, true),
        M::Vpmovsxbd => |r| extend(r, 1, 4, true),
        M::Vpmovsxbq => |r| extend(r, 1, 8, true),
        M::Vpmovsxwd => |r| extend(r, 2, 4, true),
        M::Vpmovsxwq => |r| extend(r, 2, 8, true),
        M::Vpmovsxdq => |r| extend(r, 4, 8, true),
        M::Vpmovzxbw => |r| extend(r, 1, 2, false),
        M::Vpmovzxbd => |r| extend(r, 1, 4, false),
        M::Vpmovzxbq => |r| extend(r, 1, 8, false),
        M::Vpmovzxwd => |r| extend(r, 2, 4, false),
        M::Vpmovzxwq => |r| extend(r, 2, 8, false),
        M::Vpmovzxdq => |r| extend(r, 4, 8, false),
        M::Vpmovwb => |r| narrow(r, 2, 1, Truncate),
        M::Vpmovdb => |r| narrow(r, 4, 1, Truncate),
        M::Vpmovdw => |r| narrow(r, 4, 2, Truncate),
        M::Vpmovqb => |r| narrow(r, 8, 1, Truncate),
        M::Vpmovqw => |r| narrow(r, 8, 2, Truncate),
        M::Vpmovqd => |r| narrow(r, 8, 4, Truncate),
        M::Vpmovswb => |r| narrow(r, 2, 1, Signed),
        M::Vpmovsdb => |r| narrow(r, 4, 1, Signed),
        M::Vpmovsdw => |r| narrow(r, 4, 2, Signed),
        M::Vpmovsqb => |r| narrow(r, 8, 1, Signed),
        M::Vpmovsqw => |r| narrow(r, 8, 2, Signed),
        M::Vpmovsqd => |r| narrow(r, 8, 4, Signed),
        M::Vpmovuswb => |r| narrow(r, 2, 1, Unsigned),
        M::Vpmovusdb => |r| narrow(r, 4, 1, Unsigned),
        M::Vpmovusdw => |r| narrow(r, 4, 2, Unsigned),
        M::Vpmovusqb => |r| narrow(r, 8, 1, Unsigned),
        M::Vpmovusqw => |r| narrow(r, 8, 2, Unsigned),
        M::Vpmovusqd => |r| narrow(r, 8, 4, Unsigned),
        M::Vpacksswb => |r| pack(r, 2, true),
        M::Vpackssdw => |r| pack(r, 4, true),
        M::Vpackuswb => |r| pack(r, 2, false),
        M::Vpackusdw => |r| pack(r, 4, false),
        M::Vpmovb2m => |r| signs(r, 1),
        M::Vpmovw2m => |r| signs(r, 2),
        M::Vpmovd2m => |r| signs(r, 4),
        M::Vpmovq2m => |r| signs(r, 8),
        M::Vpmovmskb => |r| signs(r, 1),
        M::Vmovmskps => |r| signs(r, 4),
        M::Vmovmskpd => |r| signs(r, 8),
        M::Vpmovm2b => |r| spread(r, 1),
        M::Vpmovm2w => |r| spread(r, 2),
        M::Vpmovm2d => |r| spread(r, 4),
        M::Vpmovm2q => |r| spread(r, 8),
        M::Vpbroadcastmb2q => |r| broadcast_mask(r, 8, 0xff),
        M::Vpbroadcastmw2d => |r| broadcast_mask(r, 4, 0xffff),
        _ => return None,
    })
}

fn comparisons(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vpcmpeqb => |r| compare(r, u8::eq),
        M::Vpcmpeqw => |r| compare(r, u16::eq),
        M::Vpcmpeqd => |r| compare(r, u32::eq),
        M::Vpcmpeqq => |r| compare(r, u64::eq),
        M::Vpcmpgtb => |r| compare(r, i8::gt),
        M::Vpcmpgtw => |r| compare(r, i16::gt),
        M::Vpcmpgtd => |r| compare(r, i32::gt),
        M::Vpcmpgtq => |r| compare(r, i64::gt),
        M::Vpcmpb => compare_by::<i8>,
        M::Vpcmpw => compare_by::<i16>,
        M::Vpcmpd => compare_by::<i32>,
        M::Vpcmpq => compare_by::<i64>,
        M::Vpcmpub => compare_by::<u8>,
        M::Vpcmpuw => compare_by::<u16>,
        M::Vpcmpud => compare_by::<u32>,
        M::Vpcmpuq => compare_by::<u64>,
        M::Vptestmb => |r| test(r, 1, true),
        M::Vptestmw => |r| test(r, 2, true),
        M::Vptestmd => |r| test(r, 4, true),
        M::Vptestmq => |r| test(r, 8, true),
        M::Vptestnmb => |r| test(r, 1, false),
        M::Vptestnmw => |r| test(r, 2, false),
        M::Vptestnmd => |r| test(r, 4, false),
        M::Vptestnmq => |r| test(r, 8, false),
        M::Vpconflictd => |r| conflicts(r, 4),
        M::Vpconflictq => |r| conflicts(r, 8),
        M::Vpshufbitqmb => select_bits,
        M::Vpopcntb => |r| count_ones(r, 1),
        M::Vpopcntw => |r| count_ones(r, 2),
        M::Vpopcntd => |r| count_ones(r, 4),
        M::Vpopcntq => |r| count_ones(r, 8),
        M::Vplzcntd => |r| r.map(|a: u32| a.leading_zeros()),
        M::Vplzcntq => |r| r.map(|a: u64| a.leading_zeros().into()),
        _ => return None,
    })
}
