//! The interpreter: the second way to run the virtual processor.
//!
//! It executes guest code instruction by instruction, with the architecture's exact results, on
//! any host. `decode` turns code into blocks of small pre-resolved operations, `code` caches
//! them, `run` dispatches them, `mmu` and `access` translate and reach guest memory, `events`
//! delivers exceptions and interrupts. What surrounds the processor is behind [`Platform`].

mod access;
mod boundary;
mod branch_buffer;
mod branches;
mod code;
mod core;
mod counters;
mod counting;
mod debug;
mod debug_state;
mod decode;
mod descriptor;
mod ds;
mod events;
mod exit;
mod fault;
mod features;
mod flags;
mod fp_error;
mod interpreter;
mod iret;
mod memory;
mod mmu;
mod mode;
mod ops;
mod platform;
mod platform_slot;
mod portable;
mod progress;
mod registers;
mod run;
mod seg;
mod smm;
mod stops;
mod supported;
mod task;
mod thunk;
mod transaction;
mod translate;
mod width;

pub use interpreter::{Exit, Kicker, Stats, Vcpu};
pub use memory::{Memory, MemoryError, RegionSpec};
pub use platform::{
    AbortCause, Accesses, Branch, BranchClass, Bus, Counting, GpFault, InterruptSource, MsrHandler,
    Observe, Observer, Pending, Platform, RetiredCounts, Ring, TransactionEvent,
};
pub use supported::supported_cpuid;
