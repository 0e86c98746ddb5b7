//! Code in the legacy modes: real mode, 16- and 32-bit protected mode, virtual-8086 mode, with or
//! without paging.
//!
//! A *blob* is a piece of assembly that runs in one of these modes. It is copied to [`BASE`], which
//! real mode can reach: [`Blob::linear`] and [`Blob::offset`] return the address of a label there.
//! A blob must not depend on its link address: it refers to its data as `label - start`.
//!
//! [`machine`] prepares the tables (GDT, IDT, IVT, three 32-bit TSSs and one 16-bit TSS, page
//! tables) in low memory, where the case may change them. [`LegacyMachine::run`] leaves 64-bit
//! mode, enters the blob, and logs every exception and interrupt with the registers.
//! [`LegacyMachine::actions`] says what to do after an event; at first every event ends the run and
//! returns to 64-bit mode. So a blob ends with UD2, and the last event holds its results.
//!
//! ```ignore
//! blob! {
//!     fn add[16](add_start, add_done; add_stop);
//!     "addw $1, %ax"
//!     "add_done: ud2"
//! }
//! let blob = add();
//! let m = legacy::machine(&blob);
//! let mut start = BlobStart::at(LegacyMode::Real, add_start);
//! start.registers.eax = 41;
//! m.run(&blob, &start);
//! check_eq!(m.last().vector_and_eip(), (6, blob.offset(add_done)), "#UD at the end");
//! check_eq!(m.last().registers.eax, 42, "sum");
//! ```
//!
//! Debug registers keep the values that 64-bit code loaded. No event may occur between the call of
//! [`LegacyMachine::run`] and the first instruction of the blob, so breakpoints belong on the
//! blob's memory.

mod blob;
mod event;
mod layout;
mod machine;
mod start;
mod stubs;
mod switch;
pub mod tables;

pub use blob::{Blob, BlobLabel};
pub use event::{EVENTS, LegacyEvent, LegacyRegs, action};
pub use layout::{BASE, DATA, MACHINE, SEGMENT, STACK, sel};
pub use machine::{AlignedTable, LegacyMachine, machine};
pub use start::{BlobStart, LegacyMode, LegacyPaging};
