//! Deterministic mode: one thread runs all vCPUs in turn, on a clock that only they advance.
//!
//! One retired instruction is one tick of the clock. A turn is a fixed number of instructions. A
//! halt ends it early, and a timer that becomes due interrupts it, so that the timer fires at its
//! instruction. When all vCPUs are halted, the clock jumps to the next timer. Nothing here may
//! depend on the host's time or on another thread, except the end of the run, and input that is
//! recorded in a log.
//!
//! [`DeterministicMachine`] runs in its owner's thread. `hindsight run` uses [`thread()`].
//! [`Timeline`] adds checkpoints, by which a machine can return to any instruction of its run.

mod checkpoint;
mod debug;
pub mod input;
mod machine;
mod owner;
mod save;
mod stop;
mod thread;
mod timeline;
mod turn;

pub use machine::{DeterministicMachine, RTC_EPOCH, TSC_HZ};
pub use stop::{RunStop, StopHandle};
pub use thread::thread;
pub use timeline::{CheckpointLimits, Timeline};
pub use turn::QUANTUM;
