//! `hindsight run`.

mod command;
mod confine;
mod consoles;
mod devices;
mod display;
mod files;
mod hook;
mod input;
mod machine;
mod network;
mod parent;
mod report;

pub(super) use command::run_with;
pub use command::{RunArgs, run};
pub(super) use confine::Confinement;
pub use devices::{DeviceLinks, open as open_devices};
pub(super) use hook::RunHook;
pub use machine::{OwnedMachine, decide, deterministic_machine, owned_machine, prepare};
pub(super) use network::Links;
