//! The debugger's side of a machine: it pauses the machine, accesses the paused vCPUs and guest
//! memory, and resumes.

mod access;
mod core;
mod error;
mod memory;
mod resume;
mod reverse;
mod trace;

pub use core::{DebugStop, Debugger};
pub use error::DebugError;
