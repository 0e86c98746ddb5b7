//! Who runs: pauses, resumes and stops vCPU threads, and changes their engine.
//!
//! [`VcpuControl`] has the state that all vCPU threads of a machine share, [`Doorbell`] interrupts
//! one of them. A crate of its own, so that loom and ThreadSanitizer build only this.

mod doorbell;
mod engine;
#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
mod sync;
mod vcpus;

pub use doorbell::{Doorbell, Kick};
pub use engine::Engine;
pub use vcpus::{Checkpoint, CheckpointState, RunLoopEnd, VcpuControl};
