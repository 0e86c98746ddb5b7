//! Commands that show a processor's state.

use std::fmt::Write as _;

use crate::gdb::debugger::Debugger;
use crate::gdb::monitor::{Answer, MonitorError, number, usage};
use crate::vcpu::crash::FinalState;

pub(super) fn regs(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    match arguments {
        [] => {}
        [group] => return of_group(debugger, group),
        _ => return Err(usage()),
    }
    let cpu = debugger.current;
    let memory = debugger.board().ram.map.clone();
    let state = debugger.state(cpu)?.clone();
    Ok(FinalState::new(cpu, state, &memory).to_string())
}

/// The registers of a group of the target description.
fn of_group(debugger: &mut Debugger, group: &str) -> Answer {
    let cpu = debugger.current;
    let mut registers = debugger.layout().all().to_vec();
    registers.retain(|register| register.group() == Some(group));
    if registers.is_empty() {
        return Err(MonitorError::Bad(format!(
            "no registers of a group {group} here: there are system, msr, lbr and pmu"
        )));
    }
    let mut text = String::new();
    for register in registers {
        let mut value = [0; 8];
        let bytes = debugger.read_register(cpu, &register)?;
        let len = bytes.len().min(value.len());
        value[..len].copy_from_slice(&bytes[..len]);
        let value = u64::from_le_bytes(value);
        let _ = writeln!(text, "{:20} {value:#x}", register.name);
    }
    Ok(text)
}

/// An MSR by its number, or by the name of its register.
fn msr_index(debugger: &Debugger, text: &str) -> Result<u32, MonitorError> {
    let register = debugger.layout().find(text);
    if let Some(index) = register.and_then(|register| register.place.msr()) {
        return Ok(index);
    }
    let index = number(text).ok().and_then(|index| index.try_into().ok());
    index.ok_or_else(|| {
        MonitorError::Bad(format!(
            "{text} is neither an MSR's number (decimal, or hexadecimal with 0x) nor a register \
             that is one: `monitor regs msr` and `system` list these"
        ))
    })
}

pub(super) fn msr(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    let cpu = debugger.current;
    match arguments {
        [index] => {
            let index = msr_index(debugger, index)?;
            let value = debugger.read_msr(cpu, index)?;
            let value = value.ok_or_else(|| {
                MonitorError::Bad(format!("{index:#x}: this processor has no such MSR"))
            })?;
            Ok(format!("{index:#x} = {value:#x}"))
        }
        [index, value] => {
            let index = msr_index(debugger, index)?;
            let value = number(value)?;
            debugger.write_msr(cpu, index, value)?;
            Ok(format!("{index:#x} = {value:#x}"))
        }
        _ => Err(usage()),
    }
}
