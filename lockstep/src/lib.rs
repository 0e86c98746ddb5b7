//! Compares the interpreter with processors, instruction by instruction.
//!
//! Random instructions on random state run on this host's processor and in the
//! interpreter, both in one process; all results must be equal. [`class`] says what is compared, [`stems`] finds every
//! encoding of it, [`build`] makes batches of code around the instructions, [`native`] and
//! [`guest`] run them, [`judge`] compares and bisects, [`jobs`]
//! shares the work between processes. docs/lockstep.md tells what has been done.

pub mod batch;
pub mod build;
pub mod class;
pub mod emit;
pub mod expected;
pub mod guest;
mod handlers;
pub mod jobs;
pub mod judge;
pub mod kernel;
pub mod layout;
pub mod map;
pub mod narrow;
pub mod native;
pub mod protected;
pub mod report;
pub mod rng;
pub mod run;
pub mod state;
pub mod stems;
pub mod system;
pub mod values;
pub mod versus;
