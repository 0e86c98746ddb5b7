//! `vRun` in the extended protocol: gdb's `run N` and `starti N` go to instruction N of the run.
//!
//! gdb asks `vKill` first, and expects a stop with everything new after `vRun`: its caches are right then,
//! as they are not after a monitor command that moves the guest.

use crate::debugger::{DebugStop, Debugger};
use crate::framing;
use crate::monitor::parse_number;
use crate::target::StopCause;

/// The instruction that the arguments of `vRun` name; the first one of the run if there are none.
///
/// # Errors
///
/// A text for the user.
pub(super) fn parse(arguments: &str) -> Result<u64, String> {
    let mut words = Vec::new();
    // The first one is the program.
    for digits in arguments.split(';').skip(1) {
        let word = framing::unhex(digits).and_then(|bytes| String::from_utf8(bytes).ok());
        words.push(word.ok_or("malformed vRun packet")?);
    }
    match &words[..] {
        [] => Ok(0),
        [icount] => parse_number(icount).map_err(|error| error.to_string()),
        _ => Err("type one number: the instruction to go to".to_owned()),
    }
}

impl Debugger {
    /// Goes to an instruction of the run, or to its end if that is earlier, as to the begin of a new
    /// session: without breakpoints of the client.
    ///
    /// # Errors
    ///
    /// A text for the user.
    pub(super) fn restart_at(&mut self, icount: u64) -> Result<DebugStop, String> {
        self.go_to(icount).map_err(|error| error.to_string())?;
        self.breakpoints.clear();
        self.pending.clear();
        self.reset_actions();
        self.last_stop = DebugStop {
            vcpu: 0,
            cause: Some(StopCause::Stepped),
        };
        Ok(self.last_stop.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_names_at_most_one_instruction() {
        assert_eq!(parse(""), Ok(0));
        assert_eq!(parse(";313030"), Ok(100));
        assert_eq!(parse("2f78;30783130"), Ok(16));
        assert!(parse(";313030;31").unwrap_err().starts_with("type one"));
        assert!(parse(";7a").unwrap_err().contains("not a number"));
        assert!(parse(";3").is_err());
    }
}
