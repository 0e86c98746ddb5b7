//! Every instruction that CPUID can show is executed: a walk over the whole opcode space.

use crate::core::Core;
use crate::features::Features;
use crate::memory::Memory;
use iced_x86::{Code, Decoder, DecoderOptions, Instruction};
use std::collections::BTreeMap;
use std::sync::Arc;

/// How an instruction is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Execution {
    /// CPUID does not show it.
    NotInCpuid,
    /// By a handler of the interpreter.
    Handler,
    /// By a thunk.
    Thunk,
    /// Not at all.
    Missing,
}

/// The instructions that no handler and no thunk executes.
const MISSING: &[Code] = &[];

/// One example of each instruction that `bits`-bit code can hold.
fn examples(bits: u32) -> BTreeMap<u16, Instruction> {
    let mut found = BTreeMap::new();
    let mut bytes = Vec::with_capacity(24);
    for lead in leads(bits) {
        let vex = lead.iter().any(|b| matches!(b, 0x62 | 0xc4));
        for opcode in 0..=255_u8 {
            for modrm in 0..=255_u8 {
                // Memory operands with a SIB byte whose index is not the destination; of registers
                // only the first, but where ModRM is part of the opcode.
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

/// Instructions of `bits`-bit code whose encodings the walk must meet.
fn expected(bits: u32, features: &Features) -> impl Iterator<Item = Code> {
    Code::values().filter(move |code| {
        let info = code.op_code();
        let here = match bits {
            16 => info.mode16() && info.intel_decoder16(),
            32 => info.mode32() && info.intel_decoder32(),
            _ => info.mode64() && info.intel_decoder64(),
        };
        // With WAIT in front it is two instructions, and decoded as such.
        let two = info.op_code_string().starts_with("9B ");
        here && !two
            && info.is_instruction()
            && code.cpuid_features().iter().all(|f| features.has(*f))
    })
}

/// Everything that can stand before an opcode byte.
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
        // Vector indices need addresses of 32 bits.
        let vex: Vec<_> = leads
            .iter()
            .filter(|l| matches!(l[..], [0xc4, 0xe2, ..] | [0x62, 0xf2, ..]))
            .cloned()
            .collect();
        leads.extend(vex.into_iter().map(|l| [&[0x67][..], &l].concat()));
    }
    leads
}

#[test]
fn every_instruction_that_cpuid_can_show_is_executed() {
    let mut missing = Vec::new();
    let mut not_met = Vec::new();
    for (bits, code) in [(16, 2), (32, 4), (64, 8)] {
        let memory = Memory::allocate(&[]).expect("no memory is needed");
        let mut core = Core::new(Arc::new(memory));
        core.features = Features::all();
        core.mode.set_code_size(code);
        let examples = examples(bits);
        let unmet = expected(bits, &core.features).filter(|c| !examples.contains_key(&(*c as u16)));
        not_met.extend(unmet.map(|c| (bits, c)));
        for insn in examples.values() {
            match core.execution(insn) {
                Execution::Missing if !MISSING.contains(&insn.code()) => {
                    missing.push((bits, insn.code()))
                }
                _ => {}
            }
        }
    }
    assert!(missing.is_empty(), "{} missing: {missing:?}", missing.len());
    assert!(not_met.is_empty(), "{} not met: {not_met:?}", not_met.len());
}

#[test]
fn instruction_over_15_bytes_is_too_long_and_not_undefined() {
    use super::block::is_too_long;
    for bits in [16, 32, 64] {
        for more in [0, 1, 40] {
            let prefixes = [vec![0x66; 15], vec![0x90; more]].concat();
            assert!(is_too_long(bits, &prefixes), "{bits} {more}");
            let add = [vec![0x66; 13], vec![0x83, 0xc0, 1], vec![0x90; more]].concat();
            assert!(is_too_long(bits, &add), "{bits} {more}");
            // As at the end of a page.
            let undefined = [vec![0x0f, 0x0a], vec![0x90; more.min(12)]].concat();
            assert!(!is_too_long(bits, &undefined), "{bits} {more}");
            for prefixes in [0, 5, 12] {
                let undefined = [
                    vec![0x66; prefixes],
                    vec![0x0f, 0x0a],
                    vec![0x90; 15 + more],
                ];
                assert!(!is_too_long(bits, &undefined.concat()), "{bits} {more}");
            }
        }
    }
}
