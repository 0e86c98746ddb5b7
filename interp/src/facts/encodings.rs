//! Enumerates the whole opcode space, for tests.

use iced_x86::{Decoder, DecoderOptions, Instruction};
use std::collections::BTreeMap;

/// Returns one example of each instruction that can occur in `bits`-bit code.
pub(crate) fn examples(bits: u32) -> BTreeMap<u16, Instruction> {
    let mut found = BTreeMap::new();
    let mut bytes = Vec::with_capacity(24);
    for lead in leads(bits) {
        let vex = lead.iter().any(|b| matches!(b, 0x62 | 0xc4));
        for opcode in 0..=255_u8 {
            for modrm in 0..=255_u8 {
                // Memory operands have a SIB byte whose index is not the destination. Of the
                // registers, only the first is used, unless ModRM is part of the opcode.
                let memory = modrm < 0xc0;
                if (memory && modrm & 0xc7 != 4) || (vex && !memory && modrm & 7 != 0) {
                    continue;
                }
                bytes.clear();
                bytes.extend_from_slice(&lead);
                bytes.extend_from_slice(&[opcode, modrm, 0x38 | modrm >> 3 & 1]);
                bytes.extend_from_slice(&[0; 11]);
                let insn = Decoder::new(bits, &bytes, DecoderOptions::NONE).decode();
                if !insn.is_invalid() {
                    found.entry(insn.code() as u16).or_insert(insn);
                }
            }
        }
    }
    found
}

/// Returns all sequences of prefixes and escapes that can precede an opcode byte.
fn leads(bits: u32) -> Vec<Vec<u8>> {
    let mut leads = Vec::new();
    let rex: &[&[u8]] = if bits == 64 { &[&[], &[0x48]] } else { &[&[]] };
    for prefix in [
        &[][..],
        &[0x66],
        &[0xf2],
        &[0xf3],
        &[0x9b],
        &[0x67],
        &[0x66, 0xf2],
        &[0x66, 0xf3],
    ] {
        for rex in rex {
            for map in [&[][..], &[0x0f], &[0x0f, 0x38], &[0x0f, 0x3a]] {
                leads.push([prefix, rex, map].concat());
            }
        }
    }
    for pp in 0..4_u8 {
        for w in [0, 0x80] {
            for map in 1..=3 {
                for l in [0, 4] {
                    for v in [0x78, 0x68] {
                        leads.push(vec![0xc4, 0xe0 | map, w | v | l | pp]);
                    }
                }
                for l in [0, 0x20, 0x40, 0x10, 0x30] {
                    for k in [0, 1] {
                        leads.push(vec![0x62, 0xf0 | map, w | 0x7c | pp, 0x08 | l | k]);
                    }
                }
            }
        }
    }
    if bits == 16 {
        // VSIB operands need 32-bit addresses.
        let vex: Vec<_> = leads
            .iter()
            .filter(|l| matches!(l[..], [0xc4, 0xe2, ..] | [0x62, 0xf2, ..]))
            .cloned()
            .collect();
        leads.extend(vex.into_iter().map(|l| [&[0x67][..], &l].concat()));
    }
    leads
}
