//! Rounds and message schedules of SHA-1 and SHA-256.
//!
//! FIPS 180-4; SDM Vol. 2B, "SHA1RNDS4" to "SHA256MSG2".

use super::element::{Element, VectorBytes};
use super::run::{Run, SoftHandler};
use iced_x86::Mnemonic as M;

/// Doublewords of an XMM register, lowest first.
type Words = [u32; 4];

fn words(v: &VectorBytes) -> Words {
    [0, 1, 2, 3].map(|n| u32::get(v, n))
}

/// Sets the destination to a function of its old value and the source.
fn binary(r: &mut Run<'_>, f: fn(Words, Words) -> Words) {
    let result = f(words(&r.target()), words(&r.source(1)));
    set_words(r, result);
}

fn set_words(r: &mut Run<'_>, result: Words) {
    let mut out = [0; 64];
    for (n, word) in result.into_iter().enumerate() {
        word.put(&mut out, n);
    }
    r.set_vector(16, out);
}

fn choose(x: u32, y: u32, z: u32) -> u32 {
    (x & y) ^ (!x & z)
}

fn parity(x: u32, y: u32, z: u32) -> u32 {
    x ^ y ^ z
}

fn majority(x: u32, y: u32, z: u32) -> u32 {
    (x & y) ^ (x & z) ^ (y & z)
}

/// SHA1RNDS4: E of the first round is in the first word of the schedule.
fn four_rounds([mut d, mut c, mut b, mut a]: Words, schedule: Words, imm: u8) -> Words {
    type Function = fn(u32, u32, u32) -> u32;
    let rows: [(Function, u32); 4] = [
        (choose, 0x5a82_7999),
        (parity, 0x6ed9_eba1),
        (majority, 0x8f1b_bcdc),
        (parity, 0xca62_c1d6),
    ];
    let (f, k) = rows[usize::from(imm & 3)];
    let mut e = 0_u32;
    for word in schedule.into_iter().rev() {
        let terms = [a.rotate_left(5), f(b, c, d), e, k, word];
        let sum = terms.into_iter().fold(0, u32::wrapping_add);
        (a, b, c, d, e) = (sum, a, b.rotate_left(30), c, d);
    }
    [d, c, b, a]
}

/// SHA1NEXTE.
fn next_e([.., a]: Words, [s0, s1, s2, s3]: Words) -> Words {
    [s0, s1, s2, s3.wrapping_add(a.rotate_left(30))]
}

/// SHA1MSG1.
fn schedule_1_first([w3, w2, w1, w0]: Words, [.., w5, w4]: Words) -> Words {
    [w5 ^ w3, w4 ^ w2, w3 ^ w1, w2 ^ w0]
}

/// SHA1MSG2.
fn schedule_1_second([x3, x2, x1, x0]: Words, [w15, w14, w13, _]: Words) -> Words {
    let w16 = (x0 ^ w13).rotate_left(1);
    let w17 = (x1 ^ w14).rotate_left(1);
    let w18 = (x2 ^ w15).rotate_left(1);
    let w19 = (x3 ^ w16).rotate_left(1);
    [w19, w18, w17, w16]
}

/// SHA256RNDS2: `sums` are of the schedule and the constants.
fn two_rounds([h, g, d, c]: Words, [f, e, b, a]: Words, sums: Words) -> Words {
    let mut state = [a, b, c, d, e, f, g, h];
    for sum in sums.into_iter().take(2) {
        let [a, b, c, d, e, f, g, h] = state;
        let of_e = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let of_a = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let terms = [h, of_e, choose(e, f, g), sum];
        let first = terms.into_iter().fold(0, u32::wrapping_add);
        let second = of_a.wrapping_add(majority(a, b, c));
        let sum = first.wrapping_add(second);
        state = [sum, a, b, c, d.wrapping_add(first), e, f, g];
    }
    let [a, b, _, _, e, f, ..] = state;
    [f, e, b, a]
}

/// SHA256MSG1.
fn schedule_256_first([w0, w1, w2, w3]: Words, [w4, ..]: Words) -> Words {
    let mix = |w: u32| w.rotate_right(7) ^ w.rotate_right(18) ^ w >> 3;
    [(w0, w1), (w1, w2), (w2, w3), (w3, w4)].map(|(w, next)| w.wrapping_add(mix(next)))
}

/// SHA256MSG2.
fn schedule_256_second([x0, x1, x2, x3]: Words, [.., w14, w15]: Words) -> Words {
    let mix = |w: u32| w.rotate_right(17) ^ w.rotate_right(19) ^ w >> 10;
    let w16 = x0.wrapping_add(mix(w14));
    let w17 = x1.wrapping_add(mix(w15));
    [
        w16,
        w17,
        x2.wrapping_add(mix(w16)),
        x3.wrapping_add(mix(w17)),
    ]
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Sha1rnds4 => |r| {
            let result = four_rounds(words(&r.target()), words(&r.source(1)), r.imm());
            set_words(r, result);
        },
        M::Sha1nexte => |r| binary(r, next_e),
        M::Sha1msg1 => |r| binary(r, schedule_1_first),
        M::Sha1msg2 => |r| binary(r, schedule_1_second),
        M::Sha256rnds2 => |r| {
            let sums = words(&r.v.zmm[0]);
            let result = two_rounds(words(&r.target()), words(&r.source(1)), sums);
            set_words(r, result);
        },
        M::Sha256msg1 => |r| binary(r, schedule_256_first),
        M::Sha256msg2 => |r| binary(r, schedule_256_second),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The message "abc" of FIPS 180, padded to a block, as words.
    const BLOCK: [u32; 16] = [0x6162_6380, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 24];

    fn zip(a: Words, b: Words, f: fn(u32, u32) -> u32) -> Words {
        [0, 1, 2, 3].map(|n| f(a[n], b[n]))
    }

    #[test]
    fn sha_1_instructions_compute_the_digest_of_abc() {
        let mut schedule: Vec<Words> = BLOCK
            .chunks_exact(4)
            .map(|w| [w[3], w[2], w[1], w[0]])
            .collect();
        for n in 4..20 {
            let first = schedule_1_first(schedule[n - 4], schedule[n - 3]);
            let sum = zip(first, schedule[n - 2], |a, b| a ^ b);
            schedule.push(schedule_1_second(sum, schedule[n - 1]));
        }
        let initial = [0x1032_5476, 0x98ba_dcfe, 0xefcd_ab89, 0x6745_2301];
        let e = [0, 0, 0, 0xc3d2_e1f0];
        let (mut before, mut state) = (initial, initial);
        for (n, group) in (0..).zip(&schedule) {
            let with_e = match n {
                0 => zip(*group, e, u32::wrapping_add),
                _ => next_e(before, *group),
            };
            (before, state) = (state, four_rounds(state, with_e, n / 5));
        }
        let [d, c, b, a] = zip(state, initial, u32::wrapping_add);
        let [.., e] = next_e(before, e);
        let digest = [
            0xa999_3e36,
            0x4706_816a,
            0xba3e_2571,
            0x7850_c26c,
            0x9cd0_d89d,
        ];
        assert_eq!([a, b, c, d, e], digest);
    }

    #[test]
    fn sha_256_instructions_compute_the_digest_of_abc() {
        let mut schedule: Vec<Words> = BLOCK
            .chunks_exact(4)
            .map(|w| [w[0], w[1], w[2], w[3]])
            .collect();
        for n in 4..16 {
            let first = schedule_256_first(schedule[n - 4], schedule[n - 3]);
            let ([_, x, y, z], [w, ..]) = (schedule[n - 2], schedule[n - 1]);
            let sum = zip(first, [x, y, z, w], u32::wrapping_add);
            schedule.push(schedule_256_second(sum, schedule[n - 1]));
        }
        // The first 32 bits of the fractions of the cube roots of the first primes.
        let mut primes = (2_u128..).filter(|n| (2..*n).all(|d| n % d != 0));
        let mut constant = || {
            let cube = primes.next().unwrap() << 96;
            let root = (0..36).rev().fold(0_u128, |root, bit| {
                let larger = root | 1 << bit;
                if larger.pow(3) <= cube { larger } else { root }
            });
            u32::try_from(root & 0xffff_ffff).unwrap()
        };
        let initial = [
            [0x9b05_688c, 0x510e_527f, 0xbb67_ae85, 0x6a09_e667],
            [0x5be0_cd19, 0x1f83_d9ab, 0xa54f_f53a, 0x3c6e_f372],
        ];
        let [mut abef, mut cdgh] = initial;
        for group in schedule {
            let [s0, s1, s2, s3] = group.map(|word| word.wrapping_add(constant()));
            cdgh = two_rounds(cdgh, abef, [s0, s1, 0, 0]);
            abef = two_rounds(abef, cdgh, [s2, s3, 0, 0]);
        }
        let [f, e, b, a] = zip(abef, initial[0], u32::wrapping_add);
        let [h, g, d, c] = zip(cdgh, initial[1], u32::wrapping_add);
        let digest = [
            0xba78_16bf,
            0x8f01_cfea,
            0x4141_40de,
            0x5dae_2223,
            0xb003_61a3,
            0x9617_7a9c,
            0xb410_ff61,
            0xf200_15ad,
        ];
        assert_eq!([a, b, c, d, e, f, g, h], digest);
    }
}
