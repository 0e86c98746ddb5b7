//! Commands about the whole machine.

use std::fmt::Write as _;

use super::arguments::{no_arguments, parse_number};
use super::command::{CommandReply, failed};
use crate::debugger::Debugger;

pub(super) fn mem(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    let mut text = String::new();
    for range in debugger.target().memory().ram() {
        let _ = writeln!(text, "{:#x}-{:#x} RAM", range.start, range.end);
    }
    Ok(text)
}

pub(super) fn quit(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    debugger.kill();
    Ok("the machine ends".to_owned())
}

/// Tells the user how to make gdb read the registers again after a command moved the guest.
///
/// gdb does not expect that a monitor command moves the guest, and no reply makes it read the
/// registers.
const FLUSH: &str = "now type `maintenance flush register-cache` (after `target extended-remote`, \
     `starti N` does both)";

pub(super) fn goto(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    let [icount] = arguments else {
        no_arguments(arguments)?;
        let icount = debugger.icount()?;
        return Ok(format!("at instruction {icount}"));
    };
    let icount = parse_number(icount)?;
    let reached = debugger.go_to(icount)?;
    let current = debugger.icount()?;
    if !reached {
        return Err(failed(format!(
            "the run does not get to instruction {icount}; it is at its end now, instruction \
             {current}; {FLUSH}"
        )));
    }
    Ok(format!("at instruction {current}; {FLUSH}"))
}
