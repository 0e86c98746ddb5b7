//! Guest memory: one memfd, mapped as one region for each range of the layout.

mod allocate;
mod dma;
pub mod layout;
mod machine;
pub mod page_walk;
mod pages;
mod ram;
mod size;

pub use allocate::{HUGE_PAGE, RamError, allocate};
pub use machine::MachineMemory;
pub use pages::{nonzero_pages, offset_to_address};
pub use ram::{GuestRam, interp_memory};
pub use size::ByteSize;
