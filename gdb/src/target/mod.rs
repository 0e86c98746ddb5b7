//! What a virtual machine monitor implements to be debugged.
//!
//! [`DebugTarget`] is required. [`ReverseExecution`], [`BranchTrace`] and [`MachineCommands`] are
//! abilities that a machine may have; a client is offered exactly those.

mod abilities;
mod commands;
mod error;
mod machine;
mod memory;
mod notifier;
mod stop;

pub use abilities::{BranchTrace, RecordedBranches, ReverseExecution, TRACE_LIMIT_DEFAULT};
pub use commands::{CommandError, CommandHelp, MachineCommands};
pub use error::{ResumeError, TargetError, Unavailable};
pub use machine::DebugTarget;
pub use memory::PhysicalMemory;
pub use notifier::Notifier;
pub use stop::{CrashSignal, GuestCrash, StopCause, VcpuResume, VcpuStop};
