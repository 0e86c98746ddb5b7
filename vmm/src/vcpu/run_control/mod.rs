//! Who runs, what stops it, and how the run ends.
//!
//! [`VcpuControl`] pauses, resumes and stops the vCPU threads, [`Doorbell`] interrupts one of them,
//! and [`RunEnd`] holds the outcome of the run until a thread waits for it.

mod doorbell;
#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
mod outcome;
mod vcpus;

pub use doorbell::{Doorbell, Kick};
pub use outcome::{GuestEnd, HaltText, Outcome, ResetPolicy, RunEnd, RunError, RunEvent};
pub use vcpus::{Checkpoint, CheckpointState, RunLoopEnd, VcpuControl};
