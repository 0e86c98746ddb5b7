//! Commands that show and change registers.

use std::fmt::Write as _;

use hindsight_cpu::register_dump::RegisterDump;
use hindsight_cpu::state::Activity;

use super::arguments::{no_arguments, parse_number};
use super::command::{CommandReply, failed};
use super::disassembly;
use crate::debugger::Debugger;
use crate::modes;
use crate::registers::{RegisterInfo, RegisterLocation};
use crate::target::CommandError;

pub(super) fn regs(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    let vcpu = debugger.selected;
    match arguments {
        [] => {}
        [group] => {
            let text = list(debugger, |register| register.group() == Some(group))?;
            return text.ok_or_else(|| {
                failed(format!(
                    "no registers of a group {group}: there are system, msr, lbr and pmu"
                ))
            });
        }
        _ => return Err(CommandError::Usage),
    }
    let linear = debugger.linear_memory(vcpu)?;
    let state = linear.state;
    let activity = match state.activity {
        Activity::WaitForSipi => return Ok(format!("cpu {vcpu}: waits for a start-up IPI")),
        Activity::Halted => "halted before",
        _ => "stopped at",
    };
    let code = linear.read(modes::linear_pc(state, state.rip), 15);
    let mut text = format!("cpu {vcpu}: {activity} {:#x}", state.rip);
    if let Some(instruction) = disassembly::instruction(state, &code) {
        let _ = write!(text, ": {instruction}");
    }
    Ok(format!("{text}\n{}", RegisterDump(state)))
}

/// The registers that are `selected`, one a line; `None` if there are none.
fn list(
    debugger: &mut Debugger,
    selected: impl Fn(&RegisterInfo) -> bool,
) -> Result<Option<String>, CommandError> {
    let vcpu = debugger.selected;
    let mut registers = debugger.layout().all().to_vec();
    registers.retain(selected);
    let mut text = String::new();
    for register in &registers {
        let value = debugger.read_register_u64(vcpu, register)?;
        let _ = writeln!(text, "{:20} {value:#x}", register.name);
    }
    Ok(Some(text).filter(|text| !text.is_empty()))
}

pub(super) fn pmu(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    let text = list(debugger, |register| register.group() == Some("pmu"))?;
    Ok(text.unwrap_or_else(|| "this vCPU has no performance counters\n".to_owned()))
}

pub(super) fn tsc(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    let text = list(debugger, |register| {
        matches!(register.location, RegisterLocation::Msr(_)) && register.name.starts_with("tsc")
    })?;
    Ok(text.unwrap_or_else(|| "this vCPU has no time-stamp counter\n".to_owned()))
}

/// The index of an MSR, by its number or by the name of its register.
fn msr_index(debugger: &Debugger, text: &str) -> Result<u32, CommandError> {
    let register = debugger.layout().find(text);
    if let Some(index) = register.and_then(|register| register.location.msr()) {
        return Ok(index);
    }
    let index = parse_number(text).ok();
    index
        .and_then(|index| index.try_into().ok())
        .ok_or_else(|| {
            failed(format!(
                "{text} is neither the number of an MSR (decimal, or hexadecimal with 0x) nor the \
                 name of a register that is one: `monitor regs msr` and `system` list these"
            ))
        })
}

pub(super) fn msr(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    let vcpu = debugger.selected;
    match arguments {
        [index] => {
            let index = msr_index(debugger, index)?;
            let value = debugger.read_msr(vcpu, index)?;
            let value =
                value.ok_or_else(|| failed(format!("this processor has no MSR {index:#x}")))?;
            Ok(format!("{index:#x} = {value:#x}"))
        }
        [index, value] => {
            let index = msr_index(debugger, index)?;
            let value = parse_number(value)?;
            debugger.write_msr(vcpu, index, value)?;
            Ok(format!("{index:#x} = {value:#x}"))
        }
        _ => Err(CommandError::Usage),
    }
}
