//! The command line: `hindsight run`, `exec`, `trace`, `export`, `stat`, `dump`, `diff`, `cpu`, `doctor`, `test`,
//! `demo` and `completions`.

mod command;
mod completions;
pub mod config;
mod cpu;
mod demo;
mod diff;
mod doctor;
mod dump;
mod exec;
mod exit;
mod export;
mod foreign_options;
mod gdb;
mod guest_files;
pub mod logging;
mod man;
pub mod merge;
mod read;
mod report;
mod run;
mod stat;
pub mod test;
mod trace;
mod usage;

pub use command::main;
pub use exit::Status;
pub use run::{OwnedMachine, owned_machine};
