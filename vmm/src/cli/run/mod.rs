//! `hindsight run`.

mod command;
mod confine;
mod consoles;
mod devices;
mod files;
mod input;
mod machine;
mod network;
mod parent;
mod report;

pub use command::{RunArgs, run, run_traced};
pub use devices::open as open_devices;
pub use machine::{decide, deterministic_machine, prepare};
