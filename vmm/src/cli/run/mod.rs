//! `hindsight run`.

mod command;
mod confine;
mod consoles;
mod files;
mod input;
mod machine;
mod parent;
mod report;

pub use command::{RunArgs, run};
pub use machine::deterministic_machine;
