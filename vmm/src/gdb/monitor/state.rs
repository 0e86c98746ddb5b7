//! Commands that show a processor's state.

use super::super::debugger::Debugger;
use super::super::registers::Place;
use super::{Answer, MonitorError, number, usage};
use crate::vcpu::report::LastState;

pub(super) fn regs(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    if !arguments.is_empty() {
        return Err(usage());
    }
    let cpu = debugger.current;
    let memory = debugger.board().memory.clone();
    let state = debugger.state(cpu)?.clone();
    Ok(LastState::new(cpu, state, &memory).to_string())
}

/// An MSR by its number, or by the name of its register.
fn msr_index(debugger: &Debugger, text: &str) -> Result<u32, MonitorError> {
    if let Some(register) = debugger.layout().find(text)
        && let Place::Msr(index) = register.place
    {
        return Ok(index);
    }
    u32::try_from(number(text)?).map_err(|_| MonitorError::NotANumber(text.to_owned()))
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
