//! The virtual machine: building it ([`PreparedMachine`]) and running it ([`Machine`]).

mod builder;
mod error;
mod features;
mod run;
pub mod start;
mod timer;

pub use builder::{MachineConfig, PreparedMachine};
pub use error::MachineError;
pub use run::Machine;

/// The largest number of vCPUs of a machine.
pub const CPUS_MAX: usize = 64;
