//! Commands that change how the stub shows the machine.

use crate::gdb::debugger::Debugger;
use crate::gdb::monitor::{Answer, switch, usage};
use crate::gdb::registers::Mode;

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

pub(super) fn phys(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    if let Some(on) = switch(arguments)? {
        debugger.options.physical = on;
        // gdb keeps what it read.
        return Ok(format!(
            "phys is {}; type `maintenance flush dcache` if gdb shows old contents",
            on_off(on)
        ));
    }
    Ok(format!("phys is {}", on_off(debugger.options.physical)))
}

pub(super) fn step_irq(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    if let Some(on) = switch(arguments)? {
        debugger.options.step_irq = on;
    }
    Ok(format!("step-irq is {}", on_off(debugger.options.step_irq)))
}

pub(super) fn mode(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    match arguments {
        [] => Ok(format!("mode is {}", debugger.options.mode)),
        [name] => {
            let mode: Mode = name.parse().map_err(|()| usage())?;
            debugger.set_mode(mode);
            Ok(format!(
                "mode is {mode}; now type `unset tdesc filename`, so that gdb asks for the registers \
                 anew"
            ))
        }
        _ => Err(usage()),
    }
}
