//! All encodings of the compared instructions, by class and opcode.
//!
//! Every opcode byte of every map is decoded with every mandatory prefix, width and ModRM group;
//! what belongs to a class is kept as a *stem*, which the generator completes at random. So each
//! opcode of a class comes as often as any other.

#![expect(
    clippy::cast_possible_truncation,
    reason = "opcode and ModRM bytes are counted in wider types"
)]

use crate::class::{Class, Kind, kind};
use crate::rng::Rng;
use iced_x86::{Code, Decoder, DecoderOptions, Instruction};
use std::collections::BTreeMap;

/// How the opcode is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    Legacy,
    Vex,
    Evex,
}

/// What fixes an instruction's opcode.
#[derive(Clone, Copy, Debug)]
pub struct Stem {
    space: Space,
    /// 0 to 3: one byte, 0FH, 0F38H, 0F3AH.
    map: u8,
    opcode: u8,
    /// 0 none, 1 66H, 2 F3H, 3 F2H.
    pp: u8,
    wide: bool,
    /// Vector length.
    ll: u8,
    /// mod = 3.
    register: bool,
    reg: u8,
    /// The rm field belongs to the opcode.
    rm: Option<u8>,
}

/// The stems of a class.
#[derive(Debug)]
pub struct Stems {
    class: Class,
    by_code: Vec<(Code, Vec<Stem>)>,
}

const MANDATORY: [u8; 4] = [0, 0x66, 0xf3, 0xf2];

/// Opcodes whose whole ModRM byte is part of them.
fn whole_modrm(s: Stem) -> bool {
    s.space == Space::Legacy
        && match s.map {
            0 => (0xd8..=0xdf).contains(&s.opcode),
            1 => matches!(s.opcode, 0x01 | 0xae | 0xc7),
            _ => false,
        }
}

fn prefix(map: u8, opcode: u8) -> bool {
    map == 0
        && matches!(
            opcode,
            0x0f | 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x62 | 0x64..=0x67
                | 0xc4 | 0xc5 | 0xf0 | 0xf2 | 0xf3
        )
}

impl Stems {
    /// All stems of a class.
    pub fn of(class: Class) -> Self {
        let mut by_code: BTreeMap<u32, (Code, Vec<Stem>)> = BTreeMap::new();
        each(class.bits(), |stem, insn, kind| {
            // Processors differ in whether 66H counts with branches.
            let differs = kind == Kind::Branch && stem.pp == 1;
            if class.has(kind, insn) && !differs {
                by_code
                    .entry(insn.code() as u32)
                    .or_insert_with(|| (insn.code(), Vec::new()))
                    .1
                    .push(stem);
            }
        });
        Self {
            class,
            by_code: by_code.into_values().collect(),
        }
    }

    /// The opcodes of the class.
    pub fn codes(&self) -> impl Iterator<Item = Code> {
        self.by_code.iter().map(|c| c.0)
    }

    /// A random instruction of the class, with everything but addresses.
    pub fn generate(&self, rng: &mut Rng) -> (Instruction, Vec<u8>) {
        loop {
            let (code, stems) = rng.pick(&self.by_code);
            for attempt in 0..40 {
                let stem = rng.pick(stems);
                let bytes = stem.complete(rng, self.class, attempt > 10);
                let mut decoder =
                    Decoder::with_ip(self.class.bits(), &bytes, 0, DecoderOptions::NONE);
                let insn = decoder.decode();
                let fits = insn.code() == *code
                    && kind(&insn).is_some_and(|k| self.class.has(k, &insn))
                    && (self.class != Class::Lock || locked(&insn));
                if fits {
                    let len = insn.len();
                    return (insn, bytes[..len].to_vec());
                }
            }
        }
    }
}

fn locked(i: &Instruction) -> bool {
    i.has_lock_prefix() || i.mnemonic() == iced_x86::Mnemonic::Xchg
}

/// Decodes every encoding and tells what is compared.
fn each(bits: u32, mut tell: impl FnMut(Stem, &Instruction, Kind)) {
    let mut insn = Instruction::default();
    let mut one = |stem: Stem| {
        let bytes = stem.bytes(bits, 0, 0, &[0; 16]);
        Decoder::with_ip(bits, &bytes, 0, DecoderOptions::NONE).decode_out(&mut insn);
        if let Some(kind) = kind(&insn) {
            tell(stem, &insn, kind);
        }
    };
    for space in [Space::Legacy, Space::Vex, Space::Evex] {
        let maps = if space == Space::Legacy { 0..4 } else { 1..4 };
        for map in maps {
            for opcode in 0..=255 {
                if space == Space::Legacy && prefix(map, opcode) {
                    continue;
                }
                for pp in 0..4 {
                    opcode_forms(space, map, opcode, pp, bits, &mut one);
                }
            }
        }
    }
}

fn opcode_forms(space: Space, map: u8, opcode: u8, pp: u8, bits: u32, one: &mut impl FnMut(Stem)) {
    let lengths = match space {
        Space::Legacy => 1,
        Space::Vex => 2,
        Space::Evex => 3,
    };
    let widths: u8 = if space == Space::Legacy && bits == 32 {
        1
    } else {
        2
    };
    for (wide, ll) in (0..widths).flat_map(|w| (0..lengths).map(move |l| (w != 0, l))) {
        let stem = Stem {
            space,
            map,
            opcode,
            pp,
            wide,
            ll,
            register: false,
            reg: 0,
            rm: None,
        };
        for reg in 0..8 {
            one(Stem { reg, ..stem });
            if whole_modrm(stem) {
                for rm in 0..8 {
                    one(Stem {
                        reg,
                        register: true,
                        rm: Some(rm),
                        ..stem
                    });
                }
            } else {
                one(Stem {
                    reg,
                    register: true,
                    ..stem
                });
            }
        }
    }
}

impl Stem {
    /// The encoding; `x` holds the extension bits R, X, B and R' (bit 3 to 0), `v` the second
    /// source and EVEX's z, b, V' and aaa above, `tail` ModRM and what follows.
    fn bytes(self, bits: u32, x: u8, v: u16, tail: &[u8]) -> Vec<u8> {
        let mut b = Vec::with_capacity(24);
        let not = |bit: u8, at: u8| if x >> bit & 1 == 0 { 1 << at } else { 0 };
        let w = u8::from(self.wide) << 7;
        let vvvv = (!v as u8 & 15) << 3;
        match self.space {
            Space::Legacy => {
                if self.pp != 0 {
                    b.push(MANDATORY[usize::from(self.pp)]);
                }
                let rex = w >> 4 | (x >> 1 & 7);
                if bits == 64 && rex != 0 {
                    b.push(0x40 | rex);
                }
                b.extend_from_slice(match self.map {
                    0 => &[],
                    1 => &[0x0f],
                    2 => &[0x0f, 0x38],
                    _ => &[0x0f, 0x3a],
                });
            }
            Space::Vex => {
                let p0 = not(3, 7) | not(2, 6) | not(1, 5) | self.map;
                b.extend([0xc4, p0, w | vvvv | self.ll << 2 | self.pp]);
            }
            Space::Evex => {
                let p0 = not(3, 7) | not(2, 6) | not(1, 5) | not(0, 4) | self.map;
                let high = if v >> 4 & 1 == 0 { 8 } else { 0 };
                let p2 = (v >> 8) as u8 & 0x97 | self.ll << 5 | high;
                b.extend([0x62, p0, w | vvvv | 4 | self.pp, p2]);
            }
        }
        b.push(self.opcode);
        let modrm = self.reg << 3 | self.rm.unwrap_or(tail[0] & 7);
        b.push(if self.register {
            modrm | 0xc0
        } else {
            modrm | tail[0] & 0xc0
        });
        b.extend(&tail[1..]);
        b
    }

    /// A random encoding. `plain`: without a second source, which many must not have.
    fn complete(self, rng: &mut Rng, class: Class, plain: bool) -> Vec<u8> {
        let bits = class.bits();
        let mut tail = [0; 16];
        for chunk in tail.chunks_mut(8) {
            chunk.copy_from_slice(&rng.bits().to_le_bytes()[..]);
        }
        let mode = *rng.pick(&[0, 0x40, 0x40, 0x80]);
        tail[0] = tail[0] & 0x3f | mode;
        let mut x = if rng.one_in(2) { rng.byte() & 15 } else { 0 };
        let mut v = rng.bits() as u16;
        if plain {
            v = if rng.one_in(2) { 0 } else { v & 0x0700 };
        } else if rng.one_in(2) {
            v &= 0x071f;
        }
        if bits == 32 {
            x = 0;
            v &= 0x9707;
        }
        let mut stem = self;
        if rng.one_in(8) && self.space == Space::Legacy {
            stem.wide = false;
        }
        let body = stem.bytes(bits, x, v, &tail);
        let mut b = prefixes(rng, class, self.space == Space::Legacy);
        b.extend(body);
        b
    }
}

/// Prefixes that do not belong to the opcode.
fn prefixes(rng: &mut Rng, class: Class, legacy: bool) -> Vec<u8> {
    let mut b = Vec::new();
    let often = if class == Class::Address { 2 } else { 24 };
    if class == Class::Lock && legacy && !rng.one_in(8) || class == Class::Fault && rng.one_in(32) {
        b.push(0xf0);
    }
    if class == Class::String && rng.one_in(2) {
        b.push(*rng.pick(&[0xf2, 0xf3]));
    }
    if rng.one_in(often) {
        // FS is the host's own in 64-bit mode, and GS only of use where its base is set.
        let list: &[u8] = if class == Class::Address {
            &[0x65, 0x65, 0x26, 0x2e, 0x36, 0x3e]
        } else {
            &[0x26, 0x2e, 0x36, 0x3e]
        };
        b.push(*rng.pick(list));
    }
    if class.bits() == 64 && rng.one_in(often) {
        b.push(0x67);
    }
    b
}
