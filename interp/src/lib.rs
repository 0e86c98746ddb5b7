//! The interpreter: the second way to run the virtual processor.
//!
//! It executes guest code instruction by instruction, with the architecture's exact results, on
//! any host. `decode` turns code into blocks of small pre-resolved operations, `block` caches
//! them, `run` dispatches them, `mmu` and `access` translate and reach guest memory, `events`
//! delivers exceptions and interrupts. What surrounds the processor is behind [`Platform`].

mod access;
mod block;
mod core;
mod counting;
mod debug;
mod decode;
mod events;
mod flags;
mod iret;
mod memory;
mod mix;
mod mmu;
mod op;
mod ops;
mod platform;
mod portable;
mod recording;
mod run;
mod seg;
mod smm;
mod stops;
mod supported;
mod task;
mod thunk;
mod tlb;
mod transaction;
mod word;

pub use memory::{Memory, MemoryError, RegionSpec};
pub use platform::{Accesses, Cause, Step};
pub use platform::{Branch, BranchClass, Counting, Gp, Observe, Pending, Platform};
pub use run::{Exit, Kicker, Stats, Vcpu};
pub use supported::supported_cpuid;
