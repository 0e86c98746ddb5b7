//! `hindsight run`.

mod command;
mod consoles;
mod devices;
mod files;
mod input;
mod machine;
mod parent;
mod report;

pub use command::{RunArgs, run};
pub use devices::open as open_devices;
pub use machine::{decide, deterministic_machine, prepare};
