//! Image loaders: they find out what an image is, put it and what it needs into guest memory, and
//! say in which state the first processor enters it. `docs/boot.md` has the table.
//!
//! - [`plan`]: what to load, the choice of the protocol, and [`load`];
//! - `place`: who occupies which guest memory; nothing is written before everything has its place;
//! - `entry`: the processor's state at the entry, the descriptor table, the page tables;
//! - `bios`: what a BIOS would have left in low memory;
//! - one module for each protocol: `flat`, `elf` (with `pvh`), `multiboot`, `linux`.
//!
//! Images are untrusted: sizes, addresses and offsets are checked before use, and an image that is
//! refused leaves guest memory as it was. Loaders use only RAM below the PCI hole, and rely on guest
//! memory being zero: they write what the image holds, never the zeros behind it.

pub mod acpi;
mod bios;
mod bytes;
mod elf;
mod entry;
mod error;
mod flat;
mod linux;
mod multiboot;
mod place;
pub mod plan;
mod pvh;

#[cfg(test)]
mod tests;

pub use error::BootError;
pub use place::Placed;
pub use plan::{Loaded, Mode, Module, Plan, Protocol, detect, load};
