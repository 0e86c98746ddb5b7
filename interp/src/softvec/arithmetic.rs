//! Integer arithmetic, element by element.

use super::element::{Element, get};
use super::float::low64;
use super::run::{Run, SoftHandler};
use iced_x86::Mnemonic as M;

/// Averages, rounding up.
fn average<T: Into<u32> + TryFrom<u32> + Default>(a: T, b: T) -> T {
    T::try_from((a.into() + b.into() + 1) >> 1).unwrap_or_default()
}

/// The high half of a product of 16-bit words.
fn high(product: i32) -> u16 {
    let [_, _, low, high] = product.to_le_bytes();
    u16::from_le_bytes([low, high])
}

fn high_unsigned(a: u16, b: u16) -> u16 {
    high((u32::from(a) * u32::from(b)).cast_signed())
}

fn high_rounded(a: i16, b: i16) -> i16 {
    let [low, high, ..] = ((((i32::from(a) * i32::from(b)) >> 14) + 1) >> 1).to_le_bytes();
    i16::from_le_bytes([low, high])
}

fn sign<T: Element + PartialOrd>(a: T, b: T, negated: T) -> T {
    if b < T::default() {
        negated
    } else if b == T::default() {
        b
    } else {
        a
    }
}

/// Clamps to the range of a narrower type.
pub(super) fn saturate<T: TryFrom<i64>>(v: i64, min: T, max: T) -> T {
    T::try_from(v).unwrap_or(if v < 0 { min } else { max })
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vpaddb => |r| r.zip(u8::wrapping_add),
        M::Vpaddw => |r| r.zip(u16::wrapping_add),
        M::Vpaddd => |r| r.zip(u32::wrapping_add),
        M::Vpaddq => |r| r.zip(u64::wrapping_add),
        M::Vpsubb => |r| r.zip(u8::wrapping_sub),
        M::Vpsubw => |r| r.zip(u16::wrapping_sub),
        M::Vpsubd => |r| r.zip(u32::wrapping_sub),
        M::Vpsubq => |r| r.zip(u64::wrapping_sub),
        M::Vpaddsb => |r| r.zip(i8::saturating_add),
        M::Vpaddsw => |r| r.zip(i16::saturating_add),
        M::Vpaddusb => |r| r.zip(u8::saturating_add),
        M::Vpaddusw => |r| r.zip(u16::saturating_add),
        M::Vpsubsb => |r| r.zip(i8::saturating_sub),
        M::Vpsubsw => |r| r.zip(i16::saturating_sub),
        M::Vpsubusb => |r| r.zip(u8::saturating_sub),
        M::Vpsubusw => |r| r.zip(u16::saturating_sub),
        M::Vpavgb => |r| r.zip(average::<u8>),
        M::Vpavgw => |r| r.zip(average::<u16>),
        M::Vpmaxsb => |r| r.zip(i8::max),
        M::Vpmaxsw => |r| r.zip(i16::max),
        M::Vpmaxsd => |r| r.zip(i32::max),
        M::Vpmaxsq => |r| r.zip(i64::max),
        M::Vpmaxub => |r| r.zip(u8::max),
        M::Vpmaxuw => |r| r.zip(u16::max),
        M::Vpmaxud => |r| r.zip(u32::max),
        M::Vpmaxuq => |r| r.zip(u64::max),
        M::Vpminsb => |r| r.zip(i8::min),
        M::Vpminsw => |r| r.zip(i16::min),
        M::Vpminsd => |r| r.zip(i32::min),
        M::Vpminsq => |r| r.zip(i64::min),
        M::Vpminub => |r| r.zip(u8::min),
        M::Vpminuw => |r| r.zip(u16::min),
        M::Vpminud => |r| r.zip(u32::min),
        M::Vpminuq => |r| r.zip(u64::min),
        M::Vpabsb => |r| r.map(i8::wrapping_abs),
        M::Vpabsw => |r| r.map(i16::wrapping_abs),
        M::Vpabsd => |r| r.map(i32::wrapping_abs),
        M::Vpabsq => |r| r.map(i64::wrapping_abs),
        M::Vpsignb => |r| r.zip(|a: i8, b| sign(a, b, a.wrapping_neg())),
        M::Vpsignw => |r| r.zip(|a: i16, b| sign(a, b, a.wrapping_neg())),
        M::Vpsignd => |r| r.zip(|a: i32, b| sign(a, b, a.wrapping_neg())),
        M::Vpmullw => |r| r.zip(u16::wrapping_mul),
        M::Vpmulld => |r| r.zip(u32::wrapping_mul),
        M::Vpmullq => |r| r.zip(u64::wrapping_mul),
        M::Vpmulhuw => |r| r.zip(high_unsigned),
        M::Vpmulhw => {
            |r| r.zip(|a: u16, b| high(i32::from(a.cast_signed()) * i32::from(b.cast_signed())))
        }
        M::Vpmulhrsw => |r| r.zip(high_rounded),
        M::Vpmuludq => |r| r.zip(|a: u64, b| (a & 0xffff_ffff) * (b & 0xffff_ffff)),
        M::Vpmuldq => |r| r.zip(|a: i64, b| ((a << 32) >> 32) * ((b << 32) >> 32)),
        M::Vpand | M::Vpandd | M::Vandps => |r| r.zip(|a: u32, b| a & b),
        M::Vpandq | M::Vandpd => |r| r.zip(|a: u64, b| a & b),
        M::Vpandn | M::Vpandnd | M::Vandnps => |r| r.zip(|a: u32, b| !a & b),
        M::Vpandnq | M::Vandnpd => |r| r.zip(|a: u64, b| !a & b),
        M::Vpor | M::Vpord | M::Vorps => |r| r.zip(|a: u32, b| a | b),
        M::Vporq | M::Vorpd => |r| r.zip(|a: u64, b| a | b),
        M::Vpxor | M::Vpxord | M::Vxorps => |r| r.zip(|a: u32, b| a ^ b),
        M::Vpxorq | M::Vxorpd => |r| r.zip(|a: u64, b| a ^ b),
        M::Vpternlogd => |r| ternary(r, 4),
        M::Vpternlogq => |r| ternary(r, 8),
        M::Vpmaddwd => multiply_words,
        M::Vpmaddubsw => multiply_bytes,
        M::Vpdpbusd => |r| add_byte_products(r, wrap),
        M::Vpdpbusds => |r| add_byte_products(r, clamp),
        M::Vpdpwssd => |r| add_word_products(r, wrap),
        M::Vpdpwssds => |r| add_word_products(r, clamp),
        M::Vpmadd52luq => |r| add_products_of_52_bits(r, 0),
        M::Vpmadd52huq => |r| add_products_of_52_bits(r, 52),
        M::Vpsadbw => sum_differences,
        M::Vmpsadbw => sum_blocks,
        M::Vdbpsadbw => sum_pairs,
        M::Vphaddw => |r| horizontal(r, u16::wrapping_add),
        M::Vphaddd => |r| horizontal(r, u32::wrapping_add),
        M::Vphaddsw => |r| horizontal(r, i16::saturating_add),
        M::Vphsubw => |r| horizontal(r, u16::wrapping_sub),
        M::Vphsubd => |r| horizontal(r, u32::wrapping_sub),
        M::Vphsubsw => |r| horizontal(r, i16::saturating_sub),
        M::Vphminposuw => smallest_word,
        _ => return None,
    })
}

/// VPTERNLOG: each result bit is the bit of the immediate that three source bits select.
fn ternary(r: &mut Run<'_>, size: usize) {
    let (a, b, c) = (r.target(), r.source(1), r.source(2));
    let table = r.imm();
    r.each_bits(size, |_, n| {
        let [a, b, c] = [a, b, c].map(|v| get(&v, size, n));
        let row = |index: u8| {
            let chosen = |v: u64, bit: u8| if index & bit != 0 { v } else { !v };
            chosen(a, 4) & chosen(b, 2) & chosen(c, 1)
        };
        (0..8)
            .filter(|n| table >> n & 1 != 0)
            .fold(0, |all, n| all | row(n))
    });
}

fn multiply_words(r: &mut Run<'_>) {
    let (a, b) = (r.source(1), r.source(2));
    r.each(|_, n| {
        let product = |n| i32::from(i16::get(&a, n)) * i32::from(i16::get(&b, n));
        product(2 * n).wrapping_add(product(2 * n + 1))
    });
}

fn multiply_bytes(r: &mut Run<'_>) {
    let (a, b) = (r.source(1), r.source(2));
    r.each(|_, n| {
        let product = |n| i32::from(u8::get(&a, n)) * i32::from(i8::get(&b, n));
        let sum = product(2 * n) + product(2 * n + 1);
        saturate(sum.into(), i16::MIN, i16::MAX)
    });
}

/// The low half of a sum.
fn wrap(sum: i64) -> i32 {
    let [a, b, c, d, ..] = sum.to_le_bytes();
    i32::from_le_bytes([a, b, c, d])
}

fn clamp(sum: i64) -> i32 {
    saturate(sum, i32::MIN, i32::MAX)
}

/// VPDPBUSD and VPDPBUSDS: adds four products of unsigned and signed bytes to each element.
fn add_byte_products(r: &mut Run<'_>, narrow: fn(i64) -> i32) {
    let (target, a, b) = (r.target(), r.source(1), r.source(2));
    r.each(|_, n| {
        let products =
            (4 * n..4 * n + 4).map(|n| i64::from(u8::get(&a, n)) * i64::from(i8::get(&b, n)));
        narrow(i64::from(i32::get(&target, n)) + products.sum::<i64>())
    });
}

/// VPDPWSSD and VPDPWSSDS: adds two products of signed words to each element.
fn add_word_products(r: &mut Run<'_>, narrow: fn(i64) -> i32) {
    let (target, a, b) = (r.target(), r.source(1), r.source(2));
    r.each(|_, n| {
        let products =
            (2 * n..2 * n + 2).map(|n| i64::from(i16::get(&a, n)) * i64::from(i16::get(&b, n)));
        narrow(i64::from(i32::get(&target, n)) + products.sum::<i64>())
    });
}

/// VPMADD52: adds 52 bits of a product, from bit `first` on, to each element.
fn add_products_of_52_bits(r: &mut Run<'_>, first: u32) {
    const LOW: u64 = (1 << 52) - 1;
    let (target, a, b) = (r.target(), r.source(1), r.source(2));
    r.each(|_, n| {
        let product = u128::from(u64::get(&a, n) & LOW) * u128::from(u64::get(&b, n) & LOW);
        u64::get(&target, n).wrapping_add(low64(product >> first) & LOW)
    });
}

fn sum_differences(r: &mut Run<'_>) {
    let (a, b) = (r.source(1), r.source(2));
    r.each(|_, n| {
        let differences = (8 * n..8 * n + 8).map(|n| u8::get(&a, n).abs_diff(u8::get(&b, n)));
        differences.map(u64::from).sum::<u64>()
    });
}

/// Sums four differences of bytes from `at` and `from`.
fn four_differences(a: &[u8], at: usize, b: &[u8], from: usize) -> u16 {
    let pairs = a[at..at + 4].iter().zip(&b[from..from + 4]);
    pairs.map(|(a, b)| u16::from(a.abs_diff(*b))).sum()
}

/// VMPSADBW: a block of the second source against eight of the first, in each lane.
fn sum_blocks(r: &mut Run<'_>) {
    let (a, b) = (r.source(1), r.source(2));
    let imm = usize::from(r.imm());
    r.each(|_, n| {
        let (lane, n) = (n / 8, n % 8);
        let control = imm >> (3 * lane);
        let (from, block) = ((control >> 2 & 1) * 4, (control & 3) * 4);
        let first = 16 * lane;
        four_differences(&a, first + from + n, &b, first + block)
    });
}

/// VDBPSADBW: as VMPSADBW, with a shuffle of the second source.
fn sum_pairs(r: &mut Run<'_>) {
    let (a, b) = (r.source(1), r.source(2));
    let imm = usize::from(r.imm());
    let mut shuffled = [0; 64];
    for n in 0..16 {
        let from = imm >> (2 * (n % 4)) & 3;
        u32::get(&b, n / 4 * 4 + from).put(&mut shuffled, n);
    }
    r.each(|_, n| {
        // Two results share four bytes of the first source.
        let (quad, n) = (n / 4 * 8, n % 4);
        let at = quad + n / 2 * 4;
        four_differences(&a, at, &shuffled, quad + n)
    });
}

fn horizontal<T: Element>(r: &mut Run<'_>, f: fn(T, T) -> T) {
    let (a, b) = (r.source(1), r.source(2));
    let half = 8 / T::SIZE;
    r.each(|_, n| {
        let (lane, n) = (n / (2 * half), n % (2 * half));
        let from = if n < half { &a } else { &b };
        let first = lane * 2 * half + n % half * 2;
        f(T::get(from, first), T::get(from, first + 1))
    });
}

fn smallest_word(r: &mut Run<'_>) {
    let a = r.source(1);
    let words = (0..8_u16).map(|n| (u16::get(&a, n.into()), n));
    let (word, index) = words.min().unwrap_or_default();
    let mut out = [0; 64];
    word.put(&mut out, 0);
    index.put(&mut out, 1);
    r.set_vector(16, out);
}
