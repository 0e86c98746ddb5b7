//! Commands that change what the client shows and how it steps.

use super::arguments::parse_switch;
use super::command::CommandReply;
use crate::debugger::Debugger;
use crate::registers::CodeModel;
use crate::target::CommandError;

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

pub(super) fn phys(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    let Some(on) = parse_switch(arguments)? else {
        return Ok(format!("phys is {}", on_off(debugger.settings.physical)));
    };
    debugger.settings.physical = on;
    // gdb caches the memory that it has read.
    Ok(format!(
        "phys is {}; type `maintenance flush dcache` if gdb shows old contents",
        on_off(on)
    ))
}

pub(super) fn step_irq(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    if let Some(on) = parse_switch(arguments)? {
        debugger.settings.step_into_interrupts = on;
    }
    let on = debugger.settings.step_into_interrupts;
    Ok(format!("step-irq is {}", on_off(on)))
}

pub(super) fn mode(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    match arguments {
        [] => Ok(format!("mode is {}", debugger.layout().model())),
        [name] => {
            let model = CodeModel::parse(name).ok_or(CommandError::Usage)?;
            debugger.set_code_model(model);
            Ok(format!(
                "mode is {model}; now type `unset tdesc filename`, so that gdb requests the new \
                 registers"
            ))
        }
        _ => Err(CommandError::Usage),
    }
}
