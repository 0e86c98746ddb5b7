//! The virtual machine: what all its threads share ([`Board`]), how it is put together
//! ([`Machine`]), and how it ends ([`Outcome`]).

mod board;
mod build;
mod devices;
mod timer;

pub use board::{Board, GuestEnd, Outcome};
pub use build::{CPUS_MAX, Config, Machine, MachineError, Prepared};
pub use devices::{DevicesError, DevicesState, Mute, Sinks};
