//! Instructions as AT&T text.

use std::fmt::Write as _;

use hindsight_cpu::state::CpuState;
use iced_x86::{Decoder, DecoderOptions, Formatter, GasFormatter, Instruction};

use super::arguments::parse_number;
use super::command::{CommandReply, failed};
use crate::debugger::Debugger;
use crate::modes;
use crate::target::CommandError;

/// The longest instruction, in bytes.
const INSTRUCTION_BYTES_MAX: usize = 15;

/// How many instructions are shown unless the user says otherwise.
const COUNT_DEFAULT: u64 = 10;

/// Maximum number of instructions that are shown.
const COUNT_MAX: usize = 1000;

fn format(instruction: &Instruction) -> String {
    let mut text = String::new();
    GasFormatter::new().format(instruction, &mut text);
    text
}

/// The instruction at RIP with its bytes, of which `code` holds the first ones; `None` if they are
/// no instruction.
pub(super) fn instruction(state: &CpuState, code: &[u8]) -> Option<String> {
    let bits = modes::code_bits(state);
    let decoded = Decoder::with_ip(bits, code, state.rip, DecoderOptions::NONE).decode();
    if decoded.is_invalid() {
        return None;
    }
    let bytes = code.iter().take(decoded.len());
    let bytes: Vec<String> = bytes.map(|byte| format!("{byte:02x}")).collect();
    Some(format!("{} [{}]", format(&decoded), bytes.join(" ")))
}

pub(super) fn disas(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    let vcpu = debugger.selected;
    let state = debugger.state(vcpu)?;
    let (bits, pc) = (modes::code_bits(state), modes::linear_pc(state, state.rip));
    let (at, count) = match arguments {
        [] => (pc, COUNT_DEFAULT),
        [at] => (parse_number(at)?, COUNT_DEFAULT),
        [at, count] => (parse_number(at)?, parse_number(count)?),
        _ => return Err(CommandError::Usage),
    };
    let count = usize::try_from(count).unwrap_or(COUNT_MAX).min(COUNT_MAX);
    let code = debugger.read_memory(vcpu, at, count * INSTRUCTION_BYTES_MAX);
    let code = code.map_err(|_| failed(format!("{at:#x} is not mapped to memory")))?;
    let mut decoder = Decoder::with_ip(bits, &code, at, DecoderOptions::NONE);
    let mut text = String::new();
    for instruction in decoder.iter().take(count) {
        let _ = writeln!(text, "{:#x}: {}", instruction.ip(), format(&instruction));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_is_decoded_in_the_mode_of_the_vcpu() {
        let mut state = CpuState::reset();
        let code = [0x48, 0xff, 0xc0];
        assert_eq!(instruction(&state, &code).unwrap(), "dec %ax [48]");
        (state.cr0, state.efer) = (0x8000_0011, 0x500);
        state.seg[1].access |= 1 << 13;
        assert_eq!(instruction(&state, &code).unwrap(), "inc %rax [48 ff c0]");
        assert_eq!(instruction(&state, &[0x48]), None);
    }
}
