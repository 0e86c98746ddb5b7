//! The configuration of `hindsight run`: every option, from the command line and from a TOML file.
//!
//! [`RunConfig`] declares each option once, as a field: its documentation is the help text and the
//! comment in a dumped file, its type parses the word on the command line and the value in the file.
//! A group of options is a heading of the help and a table of the file; an option's key is its name
//! on the command line.
//!
//! Precedence, from lowest to highest: [`Default`] of the group, the file of `--config`, an
//! environment variable that the option names, the command line ([`ConfigArgs`]).

mod args;
mod check;
mod choices;
mod dump;
mod file;
mod nearest;
mod option_word;
mod options;
mod paths;
mod schema;
mod values;

pub use args::ConfigArgs;
pub use check::ConflictError;
pub use choices::{EngineArg, ModelsArg, SandboxArg};
pub use dump::dump;
pub use file::{FileError, VERSION, parse_text};
pub use nearest::nearest;
pub use option_word::{OptionValue, OptionWord};
pub use options::{
    BootOptions, ConsoleOptions, DebugOptions, DeterminismOptions, DeviceOptions, LogOptions,
    MachineOptions, RunConfig, RunOptions,
};
pub use paths::FilePath;
pub use schema::{OptionInfo, options};
pub use values::{
    BranchRecord, BtmTarget, DisplayTarget, GuestAddress, ModuleArg, Number, RecordEnd, Size,
};

#[cfg(test)]
mod tests;
