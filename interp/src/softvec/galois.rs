//! Arithmetic in the Galois field of 2^8 elements: GFNI.
//!
//! SDM Vol. 2A, "GF2P8MULB", "GF2P8AFFINEQB", "GF2P8AFFINEINVQB".

use super::aes;
use super::element::Element;
use super::run::{Run, SoftHandler};
use iced_x86::Mnemonic as M;

/// The multiplicative inverse of each element; that of 0 is 0.
const INVERSE: [u8; 256] = {
    let mut table = [0; 256];
    // Powers of 3 are all nonzero elements; 0xf6 is the inverse of 3.
    let (mut power, mut inverse) = (1_u8, 1_u8);
    let mut n = 0;
    while n < 255 {
        table[power as usize] = inverse;
        power = aes::multiply(power, 3);
        inverse = aes::multiply(inverse, 0xf6);
        n += 1;
    }
    table
};

/// Multiplies a matrix of 8 by 8 bits with a vector of bits. The first row is the highest byte.
fn transform(matrix: u64, v: u8) -> u8 {
    let rows = matrix.to_be_bytes().into_iter().enumerate();
    rows.fold(0, |result, (bit, row)| {
        let parity = (row & v).count_ones() & 1 != 0;
        result | u8::from(parity) << bit
    })
}

/// Transforms each byte of the first source by the quadword of the second, and adds the immediate.
fn affine(r: &mut Run<'_>, f: fn(u8) -> u8) {
    let (a, matrices, sum) = (r.source(1), r.source(2), r.imm());
    r.each(|_, n| transform(u64::get(&matrices, n / 8), f(u8::get(&a, n))) ^ sum);
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Vgf2p8mulb => |r| r.zip(aes::multiply),
        M::Vgf2p8affineqb => |r| affine(r, |v| v),
        M::Vgf2p8affineinvqb => |r| affine(r, |v| INVERSE[usize::from(v)]),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transformed_inverses_are_the_substitution_of_aes() {
        const MATRIX: u64 = 0xf1e3_c78f_1f3e_7cf8;
        let substitution = INVERSE.map(|v| transform(MATRIX, v) ^ 0x63);
        assert_eq!(substitution, aes::SUBSTITUTION);
    }
}
