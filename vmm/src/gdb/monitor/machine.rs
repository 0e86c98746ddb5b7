//! Commands that act on the whole machine.

use super::super::debugger::Debugger;
use super::{Answer, usage};

pub(super) fn quit(debugger: &mut Debugger, arguments: &[&str]) -> Answer {
    if !arguments.is_empty() {
        return Err(usage());
    }
    debugger.kill();
    Ok("the machine ends".to_owned())
}
