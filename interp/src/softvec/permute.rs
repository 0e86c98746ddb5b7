//! Shuffles, permutations, blends and byte shifts.

use super::element::{Element, VectorBytes, get};
use super::run::{Run, SoftHandler};
use iced_x86::{Mnemonic as M, OpKind};

/// VUNPCKL and VUNPCKH: interleaves elements of both sources, in each 16-byte lane.
fn unpack(r: &mut Run<'_>, size: usize, high: bool) {
    let (a, b) = (r.source(1), r.source(2));
    let per_lane = 16 / size;
    let first = if high { per_lane / 2 } else { 0 };
    r.each_bits(size, |_, n| {
        let (lane, n) = (n / per_lane * per_lane, n % per_lane);
        let from = if n % 2 == 0 { &a } else { &b };
        get(from, size, lane + first + n / 2)
    });
}

fn shuffle_bytes(r: &mut Run<'_>) {
    let (a, b) = (r.source(1), r.source(2));
    r.each(|_, n| {
        let control = u8::get(&b, n);
        let from = n / 16 * 16 + usize::from(control & 15);
        if control & 0x80 != 0 {
            0
        } else {
            u8::get(&a, from)
        }
    });
}

/// VPSHUFD, and VPERMILPS with an immediate.
fn shuffle_four(r: &mut Run<'_>) {
    let (a, imm) = (r.source(1), usize::from(r.imm()));
    r.each(|_, n| u32::get(&a, n / 4 * 4 + (imm >> (2 * (n % 4)) & 3)));
}

/// VPSHUFLW and VPSHUFHW.
fn shuffle_words(r: &mut Run<'_>, high: bool) {
    let (a, imm) = (r.source(1), usize::from(r.imm()));
    r.each(|_, n| {
        if (n % 8 >= 4) == high {
            u16::get(&a, n / 4 * 4 + (imm >> (2 * (n % 4)) & 3))
        } else {
            u16::get(&a, n)
        }
    });
}

fn shuffle_singles(r: &mut Run<'_>) {
    let (a, b, imm) = (r.source(1), r.source(2), usize::from(r.imm()));
    r.each(|_, n| {
        let from = if n % 4 < 2 { &a } else { &b };
        u32::get(from, n / 4 * 4 + (imm >> (2 * (n % 4)) & 3))
    });
}

fn shuffle_doubles(r: &mut Run<'_>) {
    let (a, b, imm) = (r.source(1), r.source(2), usize::from(r.imm()));
    r.each(|_, n| {
        let from = if n % 2 == 0 { &a } else { &b };
        u64::get(from, n / 2 * 2 + (imm >> n & 1))
    });
}

/// VPERMILPS.
fn permute_singles_in_lane(r: &mut Run<'_>) {
    if r.i.op_kind(2) == OpKind::Immediate8 {
        shuffle_four(r);
        return;
    }
    let (a, b) = (r.source(1), r.source(2));
    r.each(|_, n| u32::get(&a, n / 4 * 4 + (get(&b, 1, 4 * n) & 3) as usize));
}

/// VPERMILPD.
fn permute_doubles_in_lane(r: &mut Run<'_>) {
    let a = r.source(1);
    if r.i.op_kind(2) == OpKind::Immediate8 {
        let imm = usize::from(r.imm());
        r.each(|_, n| u64::get(&a, n / 2 * 2 + (imm >> n & 1)));
    } else {
        let b = r.source(2);
        r.each(|_, n| u64::get(&a, n / 2 * 2 + usize::from(b[8 * n] >> 1 & 1)));
    }
}

/// Returns the low bits of an index as an element's number, below `count`.
fn index(v: &VectorBytes, size: usize, n: usize, count: usize) -> usize {
    let low = usize::try_from(get(v, size, n) & 0x7f).unwrap_or(0);
    low & (count - 1)
}

/// VPERMQ and VPERMPD: an immediate permutes groups of four.
fn permute_quads(r: &mut Run<'_>) {
    if r.i.op_kind(2) != OpKind::Immediate8 {
        permute(r, 8);
        return;
    }
    let (a, imm) = (r.source(1), usize::from(r.imm()));
    r.each(|_, n| u64::get(&a, n / 4 * 4 + (imm >> (2 * (n % 4)) & 3)));
}

/// VPERMD and its like: the first source has the indices.
fn permute(r: &mut Run<'_>, size: usize) {
    let (indices, a) = (r.source(1), r.source(2));
    let count = r.length() / size;
    r.each_bits(size, |_, n| get(&a, size, index(&indices, size, n, count)));
}

/// VPMULTISHIFTQB: eight bits of a quadword, which wraps, from the bit that each control selects.
fn select_unaligned(r: &mut Run<'_>) {
    let (controls, a) = (r.source(1), r.source(2));
    r.each_bits(1, |_, n| {
        let first = u32::from(u8::get(&controls, n) & 63);
        u64::get(&a, n / 8).rotate_right(first)
    });
}

/// VPERMI2 and VPERMT2: indices into two tables.
fn permute_two(r: &mut Run<'_>, size: usize, indices: &VectorBytes, table: &VectorBytes) {
    let second = r.source(2);
    let count = r.length() / size;
    r.each_bits(size, |_, n| {
        let at = index(indices, size, n, 2 * count);
        let from = if at < count { table } else { &second };
        get(from, size, at % count)
    });
}

fn over_indices(r: &mut Run<'_>, size: usize) {
    let (indices, table) = (r.target(), r.source(1));
    permute_two(r, size, &indices, &table);
}

fn over_table(r: &mut Run<'_>, size: usize) {
    let (indices, table) = (r.source(1), r.target());
    permute_two(r, size, &indices, &table);
}

/// VPERM2F128 and VPERM2I128.
fn permute_halves(r: &mut Run<'_>) {
    let (a, b, imm) = (r.source(1), r.source(2), r.imm());
    r.each(|_, n| {
        let control = imm >> (4 * n);
        let from = if control & 2 == 0 { &a } else { &b };
        if control & 8 != 0 {
            0
        } else {
            u128::get(from, (control & 1).into())
        }
    });
}

/// VSHUFF32X4 and its like: 16-byte parts of both sources.
fn shuffle_parts(r: &mut Run<'_>, size: usize) {
    let (a, b, imm) = (r.source(1), r.source(2), usize::from(r.imm()));
    let parts = r.length() / 16;
    let bits = if parts == 4 { 2 } else { 1 };
    let per_part = 16 / size;
    r.each_bits(size, |_, n| {
        let part = n / per_part;
        let from = if part < parts / 2 { &a } else { &b };
        let chosen = imm >> (bits * part) & (parts - 1);
        get(from, size, chosen * per_part + n % per_part)
    });
}

/// VALIGND and VALIGNQ.
fn align(r: &mut Run<'_>, size: usize) {
    let (a, b) = (r.source(1), r.source(2));
    let count = r.length() / size;
    let by = usize::from(r.imm()) % count;
    r.each_bits(size, |_, n| {
        let at = n + by;
        let from = if at < count { &b } else { &a };
        get(from, size, at % count)
    });
}

fn align_bytes(r: &mut Run<'_>) {
    let (a, b, by) = (r.source(1), r.source(2), usize::from(r.imm()));
    r.each(|_, n| {
        let (lane, at) = (n / 16 * 16, n % 16 + by);
        match at {
            0..16 => u8::get(&b, lane + at),
            16..32 => u8::get(&a, lane + at - 16),
            _ => 0,
        }
    });
}

/// VPSLLDQ and VPSRLDQ.
fn shift_bytes(r: &mut Run<'_>, left: bool) {
    let (a, by) = (r.source(1), u32::from(r.imm()));
    r.each(|_, n| {
        let v = u128::get(&a, n);
        match (by, left) {
            (16.., _) => 0,
            (_, true) => v << (8 * by),
            (_, false) => v >> (8 * by),
        }
    });
}

/// VBLENDPS and its like: the immediate selects elements of the second source.
fn blend(r: &mut Run<'_>, size: usize) {
    let (a, b, imm) = (r.source(1), r.source(2), r.imm());
    r.each_bits(size, |_, n| {
        let from = if imm >> (n % 8) & 1 != 0 { &b } else { &a };
        get(from, size, n)
    });
}

/// VBLENDVPS and its like: the signs of a register select elements.
fn blend_by_sign(r: &mut Run<'_>, size: usize) {
    let (a, b, mask) = (r.source(1), r.source(2), r.source(3));
    r.each_bits(size, |_, n| {
        let set = mask[(n + 1) * size - 1] & 0x80 != 0;
        get(if set { &b } else { &a }, size, n)
    });
}

/// VBLENDM and VPBLENDM: the opmask selects elements.
fn blend_by_mask(r: &mut Run<'_>, size: usize) {
    let (a, b) = (r.source(1), r.source(2));
    let mask = r.mask();
    let zeroing = r.i.zeroing_masking();
    let mut out = [0; 64];
    let length = r.length();
    for n in 0..length / size {
        let v = match (mask >> n & 1 != 0, zeroing) {
            (true, _) => get(&b, size, n),
            (false, false) => get(&a, size, n),
            (false, true) => 0,
        };
        super::element::put(&mut out, size, n, v);
    }
    r.set_vector(length, out);
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vpunpcklbw => |r| unpack(r, 1, false),
        M::Vpunpcklwd => |r| unpack(r, 2, false),
        M::Vpunpckldq | M::Vunpcklps => |r| unpack(r, 4, false),
        M::Vpunpcklqdq | M::Vunpcklpd => |r| unpack(r, 8, false),
        M::Vpunpckhbw => |r| unpack(r, 1, true),
        M::Vpunpckhwd => |r| unpack(r, 2, true),
        M::Vpunpckhdq | M::Vunpckhps => |r| unpack(r, 4, true),
        M::Vpunpckhqdq | M::Vunpckhpd => |r| unpack(r, 8, true),
        M::Vpshufb => shuffle_bytes,
        M::Vpshufd => shuffle_four,
        M::Vpshuflw => |r| shuffle_words(r, false),
        M::Vpshufhw => |r| shuffle_words(r, true),
        M::Vshufps => shuffle_singles,
        M::Vshufpd => shuffle_doubles,
        M::Vpermilps => permute_singles_in_lane,
        M::Vpermilpd => permute_doubles_in_lane,
        M::Vpermq | M::Vpermpd => permute_quads,
        M::Vpermd | M::Vpermps => |r| permute(r, 4),
        M::Vpermb => |r| permute(r, 1),
        M::Vpermw => |r| permute(r, 2),
        M::Vpermi2b => |r| over_indices(r, 1),
        M::Vpermi2w => |r| over_indices(r, 2),
        M::Vpermi2d | M::Vpermi2ps => |r| over_indices(r, 4),
        M::Vpermi2q | M::Vpermi2pd => |r| over_indices(r, 8),
        M::Vpermt2b => |r| over_table(r, 1),
        M::Vpermt2w => |r| over_table(r, 2),
        M::Vpermt2d | M::Vpermt2ps => |r| over_table(r, 4),
        M::Vpermt2q | M::Vpermt2pd => |r| over_table(r, 8),
        M::Vpmultishiftqb => select_unaligned,
        M::Vperm2f128 | M::Vperm2i128 => permute_halves,
        M::Vshuff32x4 | M::Vshufi32x4 => |r| shuffle_parts(r, 4),
        M::Vshuff64x2 | M::Vshufi64x2 => |r| shuffle_parts(r, 8),
        M::Valignd => |r| align(r, 4),
        M::Valignq => |r| align(r, 8),
        M::Vpalignr => align_bytes,
        M::Vpslldq => |r| shift_bytes(r, true),
        M::Vpsrldq => |r| shift_bytes(r, false),
        M::Vblendps | M::Vpblendd => |r| blend(r, 4),
        M::Vblendpd => |r| blend(r, 8),
        M::Vpblendw => |r| blend(r, 2),
        M::Vblendvps => |r| blend_by_sign(r, 4),
        M::Vblendvpd => |r| blend_by_sign(r, 8),
        M::Vpblendvb => |r| blend_by_sign(r, 1),
        M::Vpblendmb => |r| blend_by_mask(r, 1),
        M::Vpblendmw => |r| blend_by_mask(r, 2),
        M::Vpblendmd | M::Vblendmps => |r| blend_by_mask(r, 4),
        M::Vpblendmq | M::Vblendmpd => |r| blend_by_mask(r, 8),
        _ => return None,
    })
}
