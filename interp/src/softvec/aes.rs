//! AES rounds and carry-less multiplication, in each 16-byte lane.
//!
//! FIPS 197; SDM Vol. 2, "AESENC", "AESKEYGENASSIST", "PCLMULQDQ".

use super::element::{Element, VectorBytes};
use super::run::{Run, SoftHandler};
use iced_x86::Mnemonic as M;

/// Multiplies in GF(2^8) with the polynomial x^8 + x^4 + x^3 + x + 1.
pub(super) const fn multiply(mut a: u8, mut b: u8) -> u8 {
    let mut product = 0;
    while b != 0 {
        if b & 1 != 0 {
            product ^= a;
        }
        a = a << 1 ^ if a & 0x80 != 0 { 0x1b } else { 0 };
        b >>= 1;
    }
    product
}

/// The substitution of bytes: the inverse in GF(2^8), and an affine map.
pub(super) const SUBSTITUTION: [u8; 256] = {
    let mut table = [0x63; 256];
    // Powers of 3 are all nonzero elements; 0xf6 is the inverse of 3.
    let (mut power, mut inverse) = (1_u8, 1_u8);
    let mut n = 0;
    while n < 255 {
        let i = inverse;
        let mixed = i ^ i.rotate_left(1) ^ i.rotate_left(2) ^ i.rotate_left(3) ^ i.rotate_left(4);
        table[power as usize] = mixed ^ 0x63;
        power = multiply(power, 3);
        inverse = multiply(inverse, 0xf6);
        n += 1;
    }
    table
};

const INVERSE_SUBSTITUTION: [u8; 256] = {
    let mut table = [0; 256];
    let mut n = 0_u8;
    loop {
        table[SUBSTITUTION[n as usize] as usize] = n;
        match n.checked_add(1) {
            Some(next) => n = next,
            None => break table,
        }
    }
};

/// A state: four columns of four bytes.
type State = [u8; 16];

fn substitute(s: State, table: &[u8; 256]) -> State {
    s.map(|b| table[usize::from(b)])
}

/// Rotates row `n` left by `n` columns, times `step`.
fn shift_rows(s: State, step: usize) -> State {
    std::array::from_fn(|n| s[(n + 4 * step * (n % 4)) % 16])
}

/// Multiplies each column by a matrix whose rows are rotations of `row`.
fn mix_columns(s: State, row: [u8; 4]) -> State {
    std::array::from_fn(|n| {
        let column = n / 4 * 4;
        (0..4).fold(0, |sum, k| {
            sum ^ multiply(s[column + k], row[(k + 4 - n % 4) % 4])
        })
    })
}

fn encrypt(s: State) -> State {
    substitute(shift_rows(s, 1), &SUBSTITUTION)
}

fn decrypt(s: State) -> State {
    substitute(shift_rows(s, 3), &INVERSE_SUBSTITUTION)
}

fn mix(s: State) -> State {
    mix_columns(s, [2, 3, 1, 1])
}

fn unmix(s: State) -> State {
    mix_columns(s, [14, 11, 13, 9])
}

fn lane(v: &VectorBytes, n: usize) -> State {
    u128::get(v, n).to_le_bytes()
}

/// Applies a round to the first source, and adds the second.
fn round(r: &mut Run<'_>, f: fn(State) -> State) {
    let (a, b) = (r.source(1), r.source(2));
    r.each(|_, n| u128::from_le_bytes(f(lane(&a, n))) ^ u128::get(&b, n));
}

fn generate_key(r: &mut Run<'_>) {
    let (s, constant) = (lane(&r.source(1), 0), u32::from(r.imm()));
    let substituted = substitute(s, &SUBSTITUTION);
    let word = |n: usize| {
        let bytes = [0, 1, 2, 3].map(|k| substituted[4 * n + k]);
        u32::from_le_bytes(bytes)
    };
    let words = [
        word(1),
        word(1).rotate_right(8) ^ constant,
        word(3),
        word(3).rotate_right(8) ^ constant,
    ];
    let mut out = [0; 64];
    for (n, word) in words.into_iter().enumerate() {
        word.put(&mut out, n);
    }
    r.set_vector(16, out);
}

fn multiply_without_carry(r: &mut Run<'_>) {
    let (a, b) = (r.source(1), r.source(2));
    let imm = usize::from(r.imm());
    r.each(|_, n| {
        let a = u128::from(u64::get(&a, 2 * n + (imm & 1)));
        let b = u64::get(&b, 2 * n + (imm >> 4 & 1));
        let bits = (0..64).filter(|bit| b >> bit & 1 != 0);
        bits.fold(0, |sum, bit| sum ^ a << bit)
    });
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vaesenc => |r| round(r, |s| mix(encrypt(s))),
        M::Vaesenclast => |r| round(r, encrypt),
        M::Vaesdec => |r| round(r, |s| unmix(decrypt(s))),
        M::Vaesdeclast => |r| round(r, decrypt),
        M::Vaesimc => |r| {
            let s = lane(&r.source(1), 0);
            let mut out = [0; 64];
            out[..16].copy_from_slice(&unmix(s));
            r.set_vector(16, out);
        },
        M::Vaeskeygenassist => generate_key,
        M::Vpclmulqdq => multiply_without_carry,
        _ => return None,
    })
}
