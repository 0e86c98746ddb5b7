//! The virtual machine: how it is built ([`Prepared`]) and run to its end ([`Machine`]).

mod builder;
mod error;
mod features;
mod run;
pub mod start;
mod timer;

pub use builder::{Config, Prepared};
pub use error::MachineError;
pub use run::Machine;

/// Most processors a machine may have.
pub const CPUS_MAX: usize = 64;
