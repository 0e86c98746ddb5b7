//! Who runs, what stops it, and how the run ends.
//!
//! [`VcpuControl`] pauses, resumes and stops the vCPU threads, [`Doorbell`] interrupts one of them,
//! and [`RunEnd`] holds the outcome of the run until a thread waits for it.

mod outcome;

pub use hindsight_run_control::{
    Checkpoint, CheckpointState, Doorbell, Kick, RunLoopEnd, VcpuControl,
};
pub use outcome::{GuestEnd, HaltText, Outcome, ResetPolicy, RunEnd, RunError, RunEvent};
