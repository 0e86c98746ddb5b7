//! All encodings of the compared instructions, by class and opcode.
//!
//! Every opcode byte of every map is decoded with every mandatory prefix, width and ModRM group. An
//! encoding that belongs to a class becomes a *stem*, which the generator completes at random. So
//! each opcode of a class is as frequent as any other.

#![expect(
    clippy::cast_possible_truncation,
    reason = "opcode and ModRM bytes are counted in wider types"
)]

use crate::rng::Rng;
use crate::user::class::InsnClass;
use crate::user::kind::{InsnKind, kind, results_depend_on_host};
use crate::user::reference::TierComparison;
use iced_x86::{Code, Decoder, DecoderOptions, Instruction};
use std::collections::BTreeMap;

/// The encoding space of an opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EncodingSpace {
    Legacy,
    Vex,
    Evex,
}

/// The fields of an encoding that decide its opcode.
#[derive(Clone, Copy, Debug)]
struct Stem {
    space: EncodingSpace,
    /// Opcode map, 0 to 3: one byte, 0FH, 0F38H, 0F3AH.
    map: u8,
    opcode: u8,
    /// Mandatory prefix: 0 none, 1 66H, 2 F3H, 3 F2H.
    pp: u8,
    /// REX.W, VEX.W or EVEX.W.
    wide: bool,
    /// Vector length.
    ll: u8,
    /// ModRM.mod is 3.
    register: bool,
    reg: u8,
    /// ModRM.rm, if it belongs to the opcode.
    rm: Option<u8>,
}

/// The stems of a class.
#[derive(Debug)]
pub struct Stems {
    class: InsnClass,
    by_code: Vec<(Code, Vec<Stem>)>,
}

const MANDATORY: [u8; 4] = [0, 0x66, 0xf3, 0xf2];

/// Whether the whole ModRM byte belongs to the opcode.
fn opcode_has_modrm(s: Stem) -> bool {
    s.space == EncodingSpace::Legacy
        && match s.map {
            0 => (0xd8..=0xdf).contains(&s.opcode),
            1 => matches!(s.opcode, 0x01 | 0xae | 0xc7),
            _ => false,
        }
}

fn is_prefix(map: u8, opcode: u8) -> bool {
    map == 0
        && matches!(
            opcode,
            0x0f | 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x62 | 0x64..=0x67
                | 0xc4 | 0xc5 | 0xf0 | 0xf2 | 0xf3
        )
}

impl Stems {
    /// All stems of a class.
    pub fn of(class: InsnClass) -> Self {
        let mut by_code: BTreeMap<u32, (Code, Vec<Stem>)> = BTreeMap::new();
        for_each_stem(class.bits(), |stem, insn, kind| {
            // Processors differ in whether 66H changes the operand size of near branches.
            let differs = kind == InsnKind::Branch && stem.pp == 1;
            if class.contains(kind, insn) && !differs {
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

    /// The stems of a class whose results `comparison` can compare.
    pub fn compared(class: InsnClass, comparison: TierComparison) -> Self {
        let mut stems = Self::of(class);
        if comparison == TierComparison::Software {
            stems
                .by_code
                .retain(|(code, _)| !results_depend_on_host(code.mnemonic()));
        }
        stems
    }

    /// The opcodes of the class.
    pub fn codes(&self) -> impl Iterator<Item = Code> {
        self.by_code.iter().map(|c| c.0)
    }

    /// A random instruction of the class, whose addresses the caller must still fix.
    pub(super) fn generate(&self, rng: &mut Rng) -> (Instruction, Vec<u8>) {
        loop {
            let (code, stems) = rng.pick(&self.by_code);
            for attempt in 0..40 {
                let stem = rng.pick(stems);
                let bytes = stem.complete(rng, self.class, attempt > 10);
                let mut decoder =
                    Decoder::with_ip(self.class.bits(), &bytes, 0, DecoderOptions::NONE);
                let insn = decoder.decode();
                let fits = insn.code() == *code
                    && kind(&insn).is_some_and(|k| self.class.contains(k, &insn))
                    && (self.class != InsnClass::Lock || is_locked(&insn));
                if fits {
                    let len = insn.len();
                    return (insn, bytes[..len].to_vec());
                }
            }
        }
    }
}

fn is_locked(i: &Instruction) -> bool {
    i.has_lock_prefix() || i.mnemonic() == iced_x86::Mnemonic::Xchg
}

/// Decodes every encoding and calls `f` for those that are compared.
fn for_each_stem(bits: u32, mut f: impl FnMut(Stem, &Instruction, InsnKind)) {
    let mut insn = Instruction::default();
    let mut decode = |stem: Stem| {
        let bytes = stem.bytes(bits, 0, 0, &[0; 16]);
        Decoder::with_ip(bits, &bytes, 0, DecoderOptions::NONE).decode_out(&mut insn);
        if let Some(kind) = kind(&insn) {
            f(stem, &insn, kind);
        }
    };
    for space in [
        EncodingSpace::Legacy,
        EncodingSpace::Vex,
        EncodingSpace::Evex,
    ] {
        let maps = if space == EncodingSpace::Legacy {
            0..4
        } else {
            1..4
        };
        for map in maps {
            for opcode in 0..=255 {
                if space == EncodingSpace::Legacy && is_prefix(map, opcode) {
                    continue;
                }
                for pp in 0..4 {
                    let opcode = Opcode {
                        space,
                        map,
                        byte: opcode,
                        pp,
                    };
                    opcode.for_each_form(bits, &mut decode);
                }
            }
        }
    }
}

/// An opcode byte with its map and mandatory prefix.
struct Opcode {
    space: EncodingSpace,
    map: u8,
    byte: u8,
    pp: u8,
}

impl Opcode {
    /// Calls `f` for every width, vector length and ModRM group.
    fn for_each_form(&self, bits: u32, f: &mut impl FnMut(Stem)) {
        let lengths = match self.space {
            EncodingSpace::Legacy => 1,
            EncodingSpace::Vex => 2,
            EncodingSpace::Evex => 3,
        };
        let widths: u8 = if self.space == EncodingSpace::Legacy && bits == 32 {
            1
        } else {
            2
        };
        for (wide, ll) in (0..widths).flat_map(|w| (0..lengths).map(move |l| (w != 0, l))) {
            let memory = Stem {
                space: self.space,
                map: self.map,
                opcode: self.byte,
                pp: self.pp,
                wide,
                ll,
                register: false,
                reg: 0,
                rm: None,
            };
            let register = Stem {
                register: true,
                ..memory
            };
            for reg in 0..8 {
                f(Stem { reg, ..memory });
                if opcode_has_modrm(memory) {
                    for rm in 0..8 {
                        let rm = Some(rm);
                        f(Stem {
                            reg,
                            rm,
                            ..register
                        });
                    }
                } else {
                    f(Stem { reg, ..register });
                }
            }
        }
    }
}

impl Stem {
    /// The encoding.
    ///
    /// `x` holds the extension bits R, X, B and R' (bit 3 to 0). `v` holds the second source, and
    /// above it EVEX's z, b, V' and aaa. `tail` is ModRM and what follows it.
    fn bytes(self, bits: u32, x: u8, v: u16, tail: &[u8]) -> Vec<u8> {
        let mut b = Vec::with_capacity(24);
        let not = |bit: u8, at: u8| if x >> bit & 1 == 0 { 1 << at } else { 0 };
        let w = u8::from(self.wide) << 7;
        let vvvv = (!v as u8 & 15) << 3;
        match self.space {
            EncodingSpace::Legacy => {
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
            EncodingSpace::Vex => {
                let p0 = not(3, 7) | not(2, 6) | not(1, 5) | self.map;
                b.extend([0xc4, p0, w | vvvv | self.ll << 2 | self.pp]);
            }
            EncodingSpace::Evex => {
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

    /// A random encoding; `plain` leaves the second source out, which many opcodes must not have.
    fn complete(self, rng: &mut Rng, class: InsnClass, plain: bool) -> Vec<u8> {
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
        if rng.one_in(8) && self.space == EncodingSpace::Legacy {
            stem.wide = false;
        }
        let body = stem.bytes(bits, x, v, &tail);
        let mut b = prefixes(rng, class, self.space == EncodingSpace::Legacy);
        b.extend(body);
        b
    }
}

/// Prefixes that do not belong to the opcode.
fn prefixes(rng: &mut Rng, class: InsnClass, legacy: bool) -> Vec<u8> {
    let mut b = Vec::new();
    let often = if class == InsnClass::Address { 2 } else { 24 };
    let lock = class == InsnClass::Lock && legacy && !rng.one_in(8);
    if lock || class == InsnClass::Fault && rng.one_in(32) {
        b.push(0xf0);
    }
    if class == InsnClass::String && rng.one_in(2) {
        b.push(*rng.pick(&[0xf2, 0xf3]));
    }
    if rng.one_in(often) {
        // In 64-bit mode the host uses FS itself, and GS is useful only in the class that sets its
        // base.
        let list: &[u8] = if class == InsnClass::Address {
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
