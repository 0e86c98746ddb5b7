//! Compares the interpreter with processors, instruction by instruction.
//!
//! Random instructions on random state run in the interpreter and on a processor; all results must
//! be equal. [`user`] compares user-mode instructions with this host's processor, in this process.
//! [`system`] compares system instructions with KVM. `docs/internals/testing.md` says how to run
//! both, and `docs/reports/lockstep.md` what has been covered.

mod asm;
mod host_cpu;
mod kernel_parts;
mod layout;
mod mapping;
mod platform;
pub mod progress;
pub mod report;
mod rng;
pub mod system;
pub mod tally;
pub mod user;
mod workers;
