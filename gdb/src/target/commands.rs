//! Commands of gdb's `monitor` that a machine brings itself.

use thiserror::Error;

use super::error::TargetError;

/// One command, as `monitor help` lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandHelp {
    /// Its name.
    pub name: &'static str,
    /// Its arguments, as in `[on|off]`; empty if it has none.
    pub arguments: &'static str,
    /// What it does, in one line that starts with a verb.
    pub help: &'static str,
}

impl CommandHelp {
    /// The name with the arguments.
    pub fn usage(&self) -> String {
        match self.arguments {
            "" => self.name.to_owned(),
            arguments => format!("{} {arguments}", self.name),
        }
    }
}

/// Why a command did nothing.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommandError {
    /// The arguments are not those of the command. The user sees its usage.
    #[error("wrong arguments")]
    Usage,
    /// The command failed. One sentence that names the thing and what the user can do about it.
    #[error("{0}")]
    Failed(String),
}

impl From<TargetError> for CommandError {
    fn from(error: TargetError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Commands about the machine, such as the state of its devices.
///
/// They come after the server's own commands, and must not have their names.
pub trait MachineCommands {
    /// The commands, in the order in which `monitor help` lists them.
    fn list(&self) -> &'static [CommandHelp];

    /// Runs one of them while the machine is paused, for the vCPU that the client has selected.
    /// Returns the text for the user, without the last newline.
    ///
    /// # Errors
    ///
    /// When the arguments are wrong or the command fails.
    fn run(&mut self, name: &str, vcpu: usize, arguments: &[&str]) -> Result<String, CommandError>;
}
