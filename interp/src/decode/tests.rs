//! Every instruction that CPUID can show is executed: a walk over the whole opcode space.

use crate::core::Core;
use crate::facts::encodings::examples;
use crate::features::Features;
use crate::memory::Memory;
use iced_x86::Code;
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
