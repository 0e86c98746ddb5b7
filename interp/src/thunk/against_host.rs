//! Compares every vector instruction in software with the host's, over random operands.

use super::codegen::{self, Bank, Thunk};
use super::host;
use super::vectors::Vectors;
use crate::softvec::SoftInstruction;
use iced_x86::{
    Code, CpuidFeature as F, Decoder, DecoderOptions, EncodingKind, Instruction, Mnemonic as M,
    RflagsBits,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

/// The extensions that are executed in software.
const EXTENSIONS: [F; 27] = [
    F::SSE3,
    F::SSSE3,
    F::SSE4_1,
    F::SSE4_2,
    F::BMI1,
    F::BMI2,
    F::AVX,
    F::AVX2,
    F::FMA,
    F::F16C,
    F::AVX512F,
    F::AVX512CD,
    F::AVX512BW,
    F::AVX512DQ,
    F::AVX512VL,
    F::AVX512_IFMA,
    F::AVX512_VBMI,
    F::AVX512_VBMI2,
    F::AVX512_VNNI,
    F::AVX512_BITALG,
    F::AVX512_VPOPCNTDQ,
    F::AES,
    F::PCLMULQDQ,
    F::GFNI,
    F::SHA,
    F::VAES,
    F::VPCLMULQDQ,
];

/// The precision flag of MXCSR.
const PRECISION: u32 = 1 << 5;

/// A generator of test values.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }
    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[3]
    }

    /// A number with 1 to 11 exponent bits near a boundary, or a special value.
    fn number(&mut self, exponent_bits: u32, fraction_bits: u32) -> u64 {
        let max = (1_u64 << exponent_bits) - 1;
        let bias = max >> 1;
        let near = self.below(12);
        let fractions = u64::from(fraction_bits);
        let exponent = match self.below(16) {
            0..2 => 0,
            2..4 => max,
            4 => 1 + near,
            5 => max - 1 - near,
            6..12 => bias + near - 6,
            12 => bias + fractions.min(bias) - near.min(5),
            13 => bias - bias / 2 + near,
            14 => (bias + 63 - near).min(max),
            _ => self.below(max + 1),
        };
        let all = (1_u64 << fraction_bits) - 1;
        let fraction = match self.below(8) {
            0 | 1 => 0,
            2 => all,
            3 => 1,
            4 => 1 << (fraction_bits - 1),
            5 => all << self.below(fractions) & all,
            _ => self.next() & all,
        };
        let sign = self.below(2) << (exponent_bits + fraction_bits);
        sign | exponent << fraction_bits | fraction
    }

    fn fill(&mut self, bytes: &mut [u8; 64]) {
        let kind = self.below(6);
        for part in bytes.chunks_exact_mut(8) {
            let v = match kind {
                0 | 1 => self.number(11, 52),
                2 | 3 => self.number(8, 23) << 32 | self.number(8, 23),
                4 => (0..4).fold(0, |v, _| v << 16 | self.number(5, 10)),
                _ if self.below(3) == 0 => self.below(130),
                _ => self.next(),
            };
            part.copy_from_slice(&v.to_le_bytes());
        }
        if self.below(8) == 0 {
            // Equal elements.
            let first: [u8; 8] = bytes[..8].try_into().unwrap();
            bytes[16..24].copy_from_slice(&first);
        }
    }

    fn vectors(&mut self) -> Vectors {
        let mut v = Vectors::default();
        for n in 0..32 {
            if n > 0 && self.below(6) == 0 {
                v.zmm[n] = v.zmm[n - 1];
            } else {
                self.fill(&mut v.zmm[n]);
            }
        }
        for k in &mut v.k {
            *k = self.next() | if self.next() & 1 == 0 { self.next() } else { 0 };
        }
        for g in &mut v.gpr {
            *g = match self.below(3) {
                0 => self.below(20),
                _ => self.next(),
            };
        }
        self.fill(&mut v.buffer);
        v.flags = 0x202;
        v.run_mxcsr = 0x1f80 | u32::try_from(self.below(4)).unwrap() << 13;
        if self.below(3) == 0 {
            v.run_mxcsr |= 1 << 6;
        }
        if self.below(3) == 0 {
            v.run_mxcsr |= 1 << 15;
        }
        v
    }

    /// An encoding with the fixed fields of VEX or EVEX, and random operands.
    fn encoding(&mut self, evex: bool, map: u8, fixed: u8, length: u8, opcode: u8) -> Vec<u8> {
        let (w, pp) = ((fixed & 4) << 5, fixed & 3);
        let modrm = if self.below(3) == 0 {
            self.byte() & 0x38 | 3
        } else {
            self.byte() | 0xc0
        };
        let extended = if self.below(2) == 0 {
            0xf0
        } else {
            self.byte() & 0xf0
        };
        let mut bytes = if evex {
            let mask = if self.below(2) == 0 {
                0
            } else {
                self.byte() & 7
            };
            let zeroing = self.byte() & 0x80;
            let broadcast = self.byte() & 0x10;
            let second = w | (self.byte() & 0x78) | 4 | pp;
            let third = zeroing | length << 5 | broadcast | (self.byte() & 8) | mask;
            vec![0x62, extended | map, second, third]
        } else {
            let second = w | (self.byte() & 0x78) | (length & 1) << 2 | pp;
            vec![0xc4, (extended & 0xe0) | map, second]
        };
        bytes.extend([opcode, modrm, self.byte()]);
        bytes.extend([0; 8]);
        // Fields that do not name an operand must have fixed values: try these too.
        if self.below(2) == 0 {
            bytes[2] |= 0x78;
            if evex {
                bytes[3] |= 8;
            }
        }
        if evex && self.below(4) == 0 {
            bytes[3] &= 0x68;
        }
        bytes
    }
}

/// Whether the comparison applies to an instruction.
fn is_compared(i: &Instruction) -> bool {
    let elsewhere = matches!(
        i.mnemonic(),
        M::Vzeroall
            | M::Vzeroupper
            | M::Vldmxcsr
            | M::Vstmxcsr
            | M::Vmaskmovdqu
            | M::Tzcnt
            | M::Fisttp
    );
    !i.is_invalid()
        && !elsewhere
        && !i.is_vsib()
        && !(0..i.op_count()).any(|n| i.op_register(n).is_mm())
        && matches!(
            i.encoding(),
            EncodingKind::Legacy | EncodingKind::VEX | EncodingKind::EVEX
        )
        && !i.cpuid_features().is_empty()
        && i.cpuid_features().iter().all(|f| EXTENSIONS.contains(f))
}

fn thunk(bank: &mut Bank, i: &Instruction, software: bool) -> Option<Thunk> {
    let (bytes, chosen) = codegen::redirect(i)?;
    codegen::build(bank, i, &bytes, chosen, software)
}

fn is_estimate(m: M) -> bool {
    let name = format!("{m:?}");
    name.starts_with("Vrcp") || name.starts_with("Vrsqrt")
}

fn is_reduction(m: M) -> bool {
    matches!(m, M::Vreduceps | M::Vreducepd | M::Vreducess | M::Vreducesd)
}

/// Returns the flags in RFLAGS that an instruction changes to defined values.
fn defined_flags(i: &Instruction) -> u64 {
    let changed = i.rflags_modified() & !i.rflags_undefined();
    let positions = [
        (RflagsBits::CF, 0),
        (RflagsBits::PF, 2),
        (RflagsBits::AF, 4),
        (RflagsBits::ZF, 6),
        (RflagsBits::SF, 7),
        (RflagsBits::OF, 11),
    ];
    let set = positions.iter().filter(|(bit, _)| changed & bit != 0);
    set.fold(0, |all, (_, position)| all | 1 << position)
}

/// Returns what differs between two runs of an instruction.
fn difference(i: &Instruction, t: &Thunk, before: &Vectors, a: &Vectors, b: &Vectors) -> String {
    let mut found = String::new();
    let mut add = |name: &str, old: &dyn Display, a: &dyn Display, b: &dyn Display| {
        found += &format!("\n  {name}: before {old}\n    host {a}\n    soft {b}");
    };
    let hex = |bytes: &[u8]| {
        let words = bytes.rchunks(4).map(|w| {
            let digits = w.iter().rev().map(|b| format!("{b:02x}"));
            digits.collect::<String>()
        });
        words.collect::<Vec<_>>().join("_")
    };
    for n in (0..32).filter(|&n| a.zmm[n] != b.zmm[n]) {
        let [old, a, b] = [before, a, b].map(|v| hex(&v.zmm[n]));
        add(&format!("zmm{n}"), &old, &a, &b);
    }
    for n in (0..8).filter(|&n| a.k[n] != b.k[n]) {
        add(&format!("k{n}"), &before.k[n], &a.k[n], &b.k[n]);
    }
    for n in (0..16).filter(|&n| a.gpr[n] != b.gpr[n]) {
        add(&format!("gpr{n}"), &before.gpr[n], &a.gpr[n], &b.gpr[n]);
    }
    if a.run_mxcsr != b.run_mxcsr {
        add("mxcsr", &before.run_mxcsr, &a.run_mxcsr, &b.run_mxcsr);
    }
    let defined = defined_flags(i);
    let flags = |v: &Vectors| v.flags & defined;
    if flags(a) != flags(b) {
        add("flags", &flags(before), &flags(a), &flags(b));
    }
    if let Some(m) = t.memory.filter(|m| m.write) {
        let (elements, size) = m
            .masking
            .map_or((1, m.size), |k| (k.elements(before), k.element));
        for n in (0..m.size / size).filter(|n| elements >> n & 1 != 0) {
            let at = n * size..(n + 1) * size;
            let [old, a, b] = [before, a, b].map(|v| hex(&v.buffer[at.clone()]));
            if a != b {
                add(&format!("memory element {n}"), &old, &a, &b);
            }
        }
    }
    found
}

/// Returns encodings with legacy prefixes: the prefix, REX, and the opcode map.
fn legacy_encoding(random: &mut Random, fixed: u8, map: u8, opcode: u8) -> Vec<u8> {
    let mut bytes = match fixed & 3 {
        0 => vec![],
        1 => vec![0x66],
        2 => vec![0xf3],
        _ if random.below(4) == 0 => vec![0x66, 0xf2],
        _ => vec![0xf2],
    };
    bytes.push(0x40 | fixed << 1 & 8 | random.byte() & 7);
    bytes.push(0x0f);
    match map {
        2 => bytes.push(0x38),
        3 => bytes.push(0x3a),
        _ => {}
    }
    let register = if random.below(3) == 0 { 3 } else { 0xc0 };
    bytes.extend([opcode, register | random.byte() & 0x3f, random.byte()]);
    if register == 3 {
        let modrm = bytes.len() - 2;
        bytes[modrm] &= 0x3b;
    }
    bytes.extend([0; 8]);
    bytes
}

/// Walks over all encodings; calls `f` with instructions that are compared.
fn each_encoding(
    random: &mut Random,
    repeats: usize,
    mut f: impl FnMut(&mut Random, &Instruction),
) {
    let kinds = [(0, 1), (1, 2), (2, 4)];
    let lengths = kinds.map(|(kind, lengths)| (0..lengths).map(move |length| (kind, length)));
    for (kind, length) in lengths.into_iter().flatten() {
        for (map, fixed) in (1..4).flat_map(|map| (0..8).map(move |fixed| (map, fixed))) {
            for opcode in (0..=255).flat_map(|n| std::iter::repeat_n(n, repeats)) {
                let bytes = match kind {
                    0 => legacy_encoding(random, fixed, map, opcode),
                    kind => random.encoding(kind == 2, map, fixed, length, opcode),
                };
                let i = Decoder::new(64, &bytes, DecoderOptions::NONE).decode();
                if is_compared(&i) {
                    f(random, &i);
                }
            }
        }
    }
}

#[test]
fn every_vector_encoding_has_an_implementation_in_software() {
    let expected: BTreeSet<_> = Code::values()
        .filter(|code| {
            code.op_code().mode64() && {
                let mut i = Instruction::default();
                i.set_code(*code);
                let mmx = format!("{code:?}").contains("_mm_");
                !mmx && is_compared(&i)
                    && !code
                        .op_code()
                        .op_kinds()
                        .iter()
                        .any(|k| format!("{k:?}").contains("vsib"))
            }
        })
        .map(|code| format!("{code:?}"))
        .collect();
    let mut met = BTreeSet::new();
    let mut missing = BTreeSet::new();
    each_encoding(&mut Random(1), 120, |_, i| {
        if met.insert(format!("{:?}", i.code())) && SoftInstruction::of(i).is_none() {
            missing.insert(format!("{:?}", i.code()));
        }
    });
    assert!(missing.is_empty(), "not implemented: {missing:?}");
    let unmet: Vec<_> = expected.difference(&met).collect();
    assert!(unmet.is_empty(), "not met: {unmet:?}");
}

#[test]
fn software_computes_what_the_host_computes() {
    if !host::has_zmm() {
        println!("skipped: the host has no AVX-512");
        return;
    }
    let mut failures: BTreeMap<String, (usize, String)> = BTreeMap::new();
    let mut compared = 0;
    let mut bank = Bank::default();
    each_encoding(&mut Random(0x9e37_79b9), 20, |random, i| {
        let reduces = is_reduction(i.mnemonic());
        if is_estimate(i.mnemonic()) || !host::executes(i) {
            return;
        }
        let (Some(hard), Some(soft)) = (thunk(&mut bank, i, false), thunk(&mut bank, i, true))
        else {
            return;
        };
        for _ in 0..6 {
            let before = random.vectors();
            let (mut a, mut b) = (before.clone(), before.clone());
            hard.call(&mut a);
            soft.call(&mut b);
            if reduces {
                // Hosts disagree on whether an inexact rounding is flagged.
                a.run_mxcsr |= PRECISION;
                b.run_mxcsr |= PRECISION;
            }
            compared += 1;
            let found = difference(i, &hard, &before, &a, &b);
            if !found.is_empty() {
                let entry = failures.entry(format!("{:?}", i.mnemonic()));
                let (count, _) = entry
                    .or_insert_with(|| (0, format!("{i}, MXCSR {:#x}{found}", before.run_mxcsr)));
                *count += 1;
            }
        }
    });
    println!("{compared} comparisons");
    assert!(compared > 10_000);
    for (mnemonic, (count, example)) in &failures {
        println!("{mnemonic}: {count} times, such as {example}");
    }
    assert!(failures.is_empty(), "{:?}", failures.keys());
}

#[test]
fn dot_products_wrap_or_saturate_where_the_mask_is_set() {
    // The last byte but one of VPDPBUSD, VPDPBUSDS, VPDPWSSD and VPDPWSSDS zmm0 {k1}, zmm1, zmm2;
    // the accumulator and the sources; the result.
    let rows = [
        (0x50, 0x7fff_ffff, 0xffff_ffff, 0x7f7f_7f7f, 0x8001_fa03),
        (0x51, 0x7fff_ffff, 0xffff_ffff, 0x7f7f_7f7f, 0x7fff_ffff),
        (0x50, 0, 0xff00_0080, 0xff55_aa80, 0xffff_bf01),
        (0x51, 0x8000_0000, 0x0000_0001, 0x0000_00ff, 0x8000_0000),
        (0x52, 0x8000_0000, 0x8000_8000, 0x7fff_7fff, 0x0001_0000),
        (0x53, 0x8000_0000, 0x8000_8000, 0x7fff_7fff, 0x8000_0000),
        (0x52, 0xffff_ffff, 0x8000_8000, 0x8000_8000, 0x7fff_ffff),
        (0x53, 0, 0x8000_8000, 0x8000_8000, 0x7fff_ffff),
    ];
    let mut bank = Bank::default();
    for (opcode, sum, a, b, expected) in rows {
        let code = [0x62, 0xf2, 0x75, 0x49, opcode, 0xc2];
        let i = Decoder::new(64, &code, DecoderOptions::NONE).decode();
        let soft = thunk(&mut bank, &i, true).unwrap();
        let mut v = Vectors::default();
        v.k[1] = 0x8001;
        for (register, value) in v.zmm.iter_mut().zip([sum, a, b]) {
            for element in register.chunks_exact_mut(4) {
                element.copy_from_slice(&u32::to_le_bytes(value));
            }
        }
        soft.call(&mut v);
        for (n, element) in v.zmm[0].chunks_exact(4).enumerate() {
            let expected = if n % 15 == 0 { expected } else { sum };
            assert_eq!(element, u32::to_le_bytes(expected), "{i}, element {n}");
        }
    }
}

/// The code of an instruction on zmm0, zmm1 and zmm2 or an immediate; the quadwords of the three
/// registers before, all elements alike; the lowest quadword of zmm0 after.
const KNOWN: [(&[u8], [u64; 3], u64); 17] = [
    // VPMADD52LUQ and VPMADD52HUQ.
    (
        &[0x62, 0xf2, 0xf5, 0x48, 0xb4, 0xc2],
        [10, 1 << 52 | 3, 5],
        25,
    ),
    (&[0x62, 0xf2, 0xf5, 0x48, 0xb5, 0xc2], [1, 1 << 51, 6], 4),
    // VPSHLDQ, VPSHRDQ, VPSHLDVQ, VPSHRDVQ and VPSHLDVW.
    (
        &[0x62, 0xf3, 0xf5, 0x48, 0x71, 0xc2, 8],
        [0, HIGH, LOW],
        0x2233_4455_6677_8899,
    ),
    (
        &[0x62, 0xf3, 0xf5, 0x48, 0x73, 0xc2, 8],
        [0, HIGH, LOW],
        0x0111_2233_4455_6677,
    ),
    (
        &[0x62, 0xf2, 0xf5, 0x48, 0x71, 0xc2],
        [HIGH, LOW, 72],
        0x2233_4455_6677_8899,
    ),
    (
        &[0x62, 0xf2, 0xf5, 0x48, 0x73, 0xc2],
        [HIGH, LOW, 72],
        0x0111_2233_4455_6677,
    ),
    (
        &[0x62, 0xf2, 0xf5, 0x48, 0x70, 0xc2],
        [0x1234, 0xabcd, 20],
        0x234a,
    ),
    // VPMULTISHIFTQB.
    (
        &[0x62, 0xf2, 0xf5, 0x48, 0x83, 0xc2],
        [0, 0x0034_3840_0804_003c, 0xfedc_ba98_7654_3210],
        0x10ed_fe10_3221_100f,
    ),
    // VPERMB, VPERMT2B and VPERMI2B.
    (
        &[0x62, 0xf2, 0x75, 0x48, 0x8d, 0xc2],
        [0, 0x0001_0203_0405_0607, HIGH],
        0x8877_6655_4433_2211,
    ),
    (
        &[0x62, 0xf2, 0x75, 0x48, 0x7d, 0xc2],
        [HIGH, 0x4000_4101_4202_4303, LOW],
        0x0188_ff77_ee66_dd55,
    ),
    (
        &[0x62, 0xf2, 0x75, 0x48, 0x75, 0xc2],
        [0x4000_4101_4202_4303, HIGH, LOW],
        0x0188_ff77_ee66_dd55,
    ),
    // VPCOMPRESSB and VPEXPANDB, with {k1}{z}.
    (
        &[0x62, 0xf2, 0x7d, 0xc9, 0x63, 0xc8],
        [LOW, HIGH, 0],
        0x1133_6688,
    ),
    (
        &[0x62, 0xf2, 0x7d, 0xc9, 0x62, 0xc1],
        [LOW, HIGH, 0],
        0x5500_6600_0077_0088,
    ),
    // VPOPCNTB, VPOPCNTW and VPOPCNTQ.
    (
        &[0x62, 0xf2, 0x7d, 0x48, 0x54, 0xc1],
        [0, 0xff01_8000_7f03_f0aa, 0],
        0x0801_0100_0702_0404,
    ),
    (
        &[0x62, 0xf2, 0xfd, 0x48, 0x54, 0xc1],
        [0, 0x00ff_8001_0000_ffff, 0],
        0x0008_0002_0000_0010,
    ),
    (&[0x62, 0xf2, 0xfd, 0x48, 0x55, 0xc1], [0, u64::MAX, 0], 64),
    // VGF2P8MULB: the examples of FIPS 197.
    (
        &[0x62, 0xf2, 0x75, 0x48, 0xcf, 0xc2],
        [0, 0x5757_5757_5757_5757, 0x8313_8313_8313_8313],
        0xc1fe_c1fe_c1fe_c1fe,
    ),
];
const HIGH: u64 = 0x1122_3344_5566_7788;
const LOW: u64 = 0x99aa_bbcc_ddee_ff01;

#[test]
fn instructions_compute_known_answers() {
    let mut bank = Bank::default();
    for (code, registers, expected) in KNOWN {
        let i = Decoder::new(64, code, DecoderOptions::NONE).decode();
        let soft = thunk(&mut bank, &i, true).unwrap();
        let mut v = Vectors::default();
        v.k[1] = 0b1010_0101;
        for (register, value) in v.zmm.iter_mut().zip(registers) {
            for element in register.chunks_exact_mut(8) {
                element.copy_from_slice(&value.to_le_bytes());
            }
        }
        soft.call(&mut v);
        let found = u64::from_le_bytes(v.zmm[0][..8].try_into().unwrap());
        assert_eq!(found, expected, "{i}: {found:#x}");
    }
}

#[test]
fn vpshufbitqmb_selects_bits_of_each_quadword() {
    // VPSHUFBITQMB k1, zmm1, zmm2.
    let code = [0x62, 0xf2, 0x75, 0x48, 0x8f, 0xca];
    let i = Decoder::new(64, &code, DecoderOptions::NONE).decode();
    let soft = thunk(&mut Bank::default(), &i, true).unwrap();
    let mut v = Vectors::default();
    let rows = [0x8000_0000_0000_0001_u64, 0x7f40_3f00_0101_0101];
    for (register, value) in v.zmm[1..].iter_mut().zip(rows) {
        register[56..].copy_from_slice(&value.to_le_bytes());
    }
    soft.call(&mut v);
    assert_eq!(v.k[1], 0xf0 << 56);
}

#[test]
fn estimates_are_as_close_as_the_manual_says() {
    let mut random = Random(7);
    let rcp = [0x62, 0xf2, 0xfd, 0x48, 0x4c, 0xc1];
    let rsqrt = [0x62, 0xf2, 0xfd, 0x48, 0x4e, 0xc1];
    let mut bank = Bank::default();
    for (code, exact) in [
        (rcp, f64::recip as fn(f64) -> f64),
        (rsqrt, |v| 1.0 / v.sqrt()),
    ] {
        let i = Decoder::new(64, &code, DecoderOptions::NONE).decode();
        let soft = thunk(&mut bank, &i, true).unwrap();
        for _ in 0..20_000 {
            let mut v = random.vectors();
            v.run_mxcsr = 0x1f80;
            soft.call(&mut v);
            assert_eq!(v.run_mxcsr, 0x1f80, "no flags");
            for n in 0..8 {
                let at = 8 * n..8 * n + 8;
                let read = |r: &[u8; 64]| f64::from_le_bytes(r[at.clone()].try_into().unwrap());
                let (result, expected) = (read(&v.zmm[0]), exact(read(&v.zmm[1])));
                let close = (result - expected).abs() <= expected.abs() * 2_f64.powi(-14);
                let same = result == expected || (result.is_nan() && expected.is_nan());
                let tiny = expected.is_subnormal();
                assert!(close || same || tiny, "{result:e} for {expected:e}");
            }
        }
    }
}
