//! Guest memory as one vCPU addresses it, and the MSRs that [`CpuState`](hindsight_cpu::state::CpuState)
//! holds. Nothing in here reaches a device.

mod linear;
pub(crate) mod page_tables;
mod state_msrs;

pub use linear::{LinearMemory, MemoryPiece};
pub use state_msrs::{read_state_msr, write_state_msr};
