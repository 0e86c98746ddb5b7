//! The type of the server's monitor commands.

use crate::debugger::{DebugError, Debugger};
use crate::target::{CommandError, CommandHelp};

/// What a command returns: the text for the user.
pub(super) type CommandReply = Result<String, CommandError>;

/// A command of the server.
pub(super) struct MonitorCommand {
    pub(super) help: CommandHelp,
    pub(super) run: fn(&mut Debugger, &[&str]) -> CommandReply,
}

impl MonitorCommand {
    pub(super) const fn new(
        name: &'static str,
        arguments: &'static str,
        help: &'static str,
        run: fn(&mut Debugger, &[&str]) -> CommandReply,
    ) -> Self {
        let help = CommandHelp {
            name,
            arguments,
            help,
        };
        Self { help, run }
    }
}

impl From<DebugError> for CommandError {
    fn from(error: DebugError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// An error with this sentence.
pub(super) fn failed(text: impl Into<String>) -> CommandError {
    CommandError::Failed(text.into())
}
