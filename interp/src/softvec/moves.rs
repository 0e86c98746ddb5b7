//! Moves, broadcasts, insertions and extractions.

use super::element::{Element, VectorBytes, get, put};
use super::run::{Run, SoftHandler};
use iced_x86::Mnemonic as M;

/// Bytes of an XMM register.
const XMM: usize = 16;

/// Moves a whole vector, with elements of `size` bytes.
fn whole(r: &mut Run<'_>, size: usize) {
    let a = r.source(1);
    r.set_masked(size, r.length(), a);
}

/// VMOVSS and VMOVSD: loads clear the rest of the register.
fn lowest(r: &mut Run<'_>, size: usize) {
    if r.i.op_count() == 3 {
        let v = get(&r.source(2), size, 0);
        r.set_low(size, v);
        return;
    }
    let a = r.source(1);
    let mut out = [0; 64];
    if r.is_memory(0) {
        out = a;
    } else if r.is_enabled(0) {
        out[..size].copy_from_slice(&a[..size]);
    } else if !r.i.zeroing_masking() {
        out[..size].copy_from_slice(&r.target()[..size]);
    }
    r.set_vector(XMM, out);
}

/// VMOVD and VMOVQ.
fn scalar(r: &mut Run<'_>, size: usize) {
    let v = if r.is_general(1) || r.is_memory(1) {
        r.scalar(1)
    } else {
        get(&r.source(1), size, 0)
    };
    if r.is_general(0) {
        r.set_scalar(v);
        return;
    }
    let mut out = [0; 64];
    put(&mut out, size, 0, v);
    r.set_vector(XMM, out);
}

/// Sets both quadwords of an XMM register.
fn pair(r: &mut Run<'_>, low: u64, high: u64) {
    let mut out = [0; 64];
    low.put(&mut out, 0);
    high.put(&mut out, 1);
    r.set_vector(XMM, out);
}

/// VMOVLPS, VMOVHPS, VMOVHLPS and VMOVLHPS.
fn half(r: &mut Run<'_>, from: usize, to: usize) {
    if r.is_memory(0) {
        let v = u64::get(&r.source(1), to);
        pair(r, v, 0);
        return;
    }
    let (a, b) = (r.source(1), r.source(2));
    let v = u64::get(&b, from);
    if to == 0 {
        pair(r, v, u64::get(&a, 1));
    } else {
        pair(r, u64::get(&a, 0), v);
    }
}

/// Repeats the first `group` bytes of the source.
fn broadcast(r: &mut Run<'_>, size: usize, group: usize) {
    let mut a = [0; 64];
    if r.is_general(1) {
        put(&mut a, 8, 0, r.scalar(1));
    } else {
        a = r.source(1);
    }
    let count = group / size;
    r.each_bits(size, |_, n| get(&a, size, n % count));
}

/// Inserts `group` bytes.
fn insert(r: &mut Run<'_>, size: usize, group: usize) {
    let (mut out, part) = (r.source(1), r.source(2));
    let length = r.length();
    let at = usize::from(r.imm()) % (length / group) * group;
    out[at..at + group].copy_from_slice(&part[..group]);
    r.set_masked(size, length, out);
}

/// Extracts `group` bytes.
fn extract(r: &mut Run<'_>, size: usize, group: usize) {
    let a = r.source(1);
    let at = usize::from(r.imm()) % (r.length() / group) * group;
    let mut out = [0; 64];
    out[..group].copy_from_slice(&a[at..at + group]);
    r.set_masked(size, group, out);
}

/// VPINSR.
fn insert_one(r: &mut Run<'_>, size: usize) {
    let (mut out, v) = (r.source(1), r.scalar(2));
    put(&mut out, size, usize::from(r.imm()) % (XMM / size), v);
    r.set_vector(XMM, out);
}

/// VPEXTR and VEXTRACTPS.
fn extract_one(r: &mut Run<'_>, size: usize) {
    let v = get(&r.source(1), size, usize::from(r.imm()) % (XMM / size));
    r.set_scalar(v);
}

fn insert_float(r: &mut Run<'_>) {
    let imm = r.imm();
    let (mut out, b) = (r.source(1), r.source(2));
    let from = if r.is_memory(2) { 0 } else { imm >> 6 };
    let v = u32::get(&b, from.into());
    v.put(&mut out, (imm >> 4 & 3).into());
    for n in (0..4).filter(|n| imm >> n & 1 != 0) {
        0_u32.put(&mut out, n);
    }
    r.set_vector(XMM, out);
}

/// VMOVDDUP, VMOVSLDUP and VMOVSHDUP.
fn duplicate(r: &mut Run<'_>, size: usize, odd: usize) {
    let a = r.source(1);
    r.each_bits(size, |_, n| get(&a, size, n / 2 * 2 + odd));
}

/// VMASKMOV and VPMASKMOV: the signs of the first source are the mask.
///
/// Elements of memory that are masked off read as zero and are not written.
fn masked(r: &mut Run<'_>, size: usize) {
    let (mask, a) = (r.source(1), r.source(2));
    let mut out: VectorBytes = [0; 64];
    for n in 0..r.length() / size {
        if mask[(n + 1) * size - 1] & 0x80 != 0 {
            put(&mut out, size, n, get(&a, size, n));
        }
    }
    r.set_vector(r.length(), out);
}

/// VPCOMPRESS: the enabled elements follow each other.
fn compress(r: &mut Run<'_>, size: usize) {
    let a = r.source(1);
    let length = r.length();
    let mut out = if r.i.zeroing_masking() || r.is_memory(0) {
        [0; 64]
    } else {
        r.target()
    };
    let enabled = (0..length / size).filter(|&n| r.is_enabled(n));
    for (to, from) in enabled.enumerate() {
        put(&mut out, size, to, get(&a, size, from));
    }
    r.set_vector(length, out);
}

/// VPEXPAND: consecutive elements become the enabled ones.
fn expand(r: &mut Run<'_>, size: usize) {
    let a = r.source(1);
    let mut next = 0;
    r.each_bits(size, |_, _| {
        next += 1;
        get(&a, size, next - 1)
    });
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    plain(m).or_else(|| parts(m))
}

fn plain(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vmovdqu8 => |r| whole(r, 1),
        M::Vmovdqu16 => |r| whole(r, 2),
        M::Vmovaps
        | M::Vmovups
        | M::Vmovntps
        | M::Vmovdqa
        | M::Vmovdqu
        | M::Vmovdqa32
        | M::Vmovdqu32
        | M::Vmovntdq
        | M::Vmovntdqa
        | M::Vlddqu => |r| whole(r, 4),
        M::Vmovapd | M::Vmovupd | M::Vmovntpd | M::Vmovdqa64 | M::Vmovdqu64 => |r| whole(r, 8),
        M::Vmovss => |r| lowest(r, 4),
        M::Vmovsd => |r| lowest(r, 8),
        M::Vmovd => |r| scalar(r, 4),
        M::Vmovq => |r| scalar(r, 8),
        M::Vmovlps | M::Vmovlpd => |r| half(r, 0, 0),
        M::Vmovhps | M::Vmovhpd | M::Vmovlhps => |r| half(r, 0, 1),
        M::Vmovhlps => |r| half(r, 1, 0),
        M::Vmovddup => |r| duplicate(r, 8, 0),
        M::Vmovsldup => |r| duplicate(r, 4, 0),
        M::Vmovshdup => |r| duplicate(r, 4, 1),
        M::Vmaskmovps | M::Vpmaskmovd => |r| masked(r, 4),
        M::Vmaskmovpd | M::Vpmaskmovq => |r| masked(r, 8),
        M::Vpcompressb => |r| compress(r, 1),
        M::Vpcompressw => |r| compress(r, 2),
        M::Vcompressps | M::Vpcompressd => |r| compress(r, 4),
        M::Vcompresspd | M::Vpcompressq => |r| compress(r, 8),
        M::Vpexpandb => |r| expand(r, 1),
        M::Vpexpandw => |r| expand(r, 2),
        M::Vexpandps | M::Vpexpandd => |r| expand(r, 4),
        M::Vexpandpd | M::Vpexpandq => |r| expand(r, 8),
        _ => return None,
    })
}

fn parts(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vpbroadcastb => |r| broadcast(r, 1, 1),
        M::Vpbroadcastw => |r| broadcast(r, 2, 2),
        M::Vpbroadcastd | M::Vbroadcastss => |r| broadcast(r, 4, 4),
        M::Vpbroadcastq | M::Vbroadcastsd => |r| broadcast(r, 8, 8),
        M::Vbroadcastf32x2 | M::Vbroadcasti32x2 => |r| broadcast(r, 4, 8),
        M::Vbroadcastf32x4 | M::Vbroadcasti32x4 => |r| broadcast(r, 4, 16),
        M::Vbroadcastf128 | M::Vbroadcasti128 => |r| broadcast(r, 4, 16),
        M::Vbroadcastf32x8 | M::Vbroadcasti32x8 => |r| broadcast(r, 4, 32),
        M::Vbroadcastf64x2 | M::Vbroadcasti64x2 => |r| broadcast(r, 8, 16),
        M::Vbroadcastf64x4 | M::Vbroadcasti64x4 => |r| broadcast(r, 8, 32),
        M::Vinsertf128 | M::Vinserti128 => |r| insert(r, 4, 16),
        M::Vinsertf32x4 | M::Vinserti32x4 => |r| insert(r, 4, 16),
        M::Vinsertf32x8 | M::Vinserti32x8 => |r| insert(r, 4, 32),
        M::Vinsertf64x2 | M::Vinserti64x2 => |r| insert(r, 8, 16),
        M::Vinsertf64x4 | M::Vinserti64x4 => |r| insert(r, 8, 32),
        M::Vextractf128 | M::Vextracti128 => |r| extract(r, 4, 16),
        M::Vextractf32x4 | M::Vextracti32x4 => |r| extract(r, 4, 16),
        M::Vextractf32x8 | M::Vextracti32x8 => |r| extract(r, 4, 32),
        M::Vextractf64x2 | M::Vextracti64x2 => |r| extract(r, 8, 16),
        M::Vextractf64x4 | M::Vextracti64x4 => |r| extract(r, 8, 32),
        M::Vpinsrb => |r| insert_one(r, 1),
        M::Vpinsrw => |r| insert_one(r, 2),
        M::Vpinsrd => |r| insert_one(r, 4),
        M::Vpinsrq => |r| insert_one(r, 8),
        M::Vpextrb => |r| extract_one(r, 1),
        M::Vpextrw => |r| extract_one(r, 2),
        M::Vpextrd | M::Vextractps => |r| extract_one(r, 4),
        M::Vpextrq => |r| extract_one(r, 8),
        M::Vinsertps => insert_float,
        _ => return None,
    })
}
