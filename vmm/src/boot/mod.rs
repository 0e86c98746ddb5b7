//! Image loaders. They detect an image's format, load it and the structures of its boot protocol
//! into guest memory, and set up the state in which the first vCPU enters it. `docs/guide/boot.md`
//! has the table.
//!
//! - `request`: what to load, and the options;
//! - [`load()`]: chooses the protocol and loads the image;
//! - `placement`: which part occupies which guest memory. Nothing is written before every part has
//!   its address;
//! - `entry`: the vCPU's state at the entry, the descriptor table and the page tables;
//! - `bios`: the structures that a BIOS would leave in low memory;
//! - one module for each protocol: `flat`, `elf`, `pvh`, `multiboot`, `multiboot2`, `linux`. `elf_file` reads ELF
//!   headers, and `start_info` is the structure that ELF and PVH share;
//! - `firmware`: an image that is entered at the reset vector instead of a kernel.
//!
//! Images are untrusted: sizes, addresses and offsets are checked before use, and a refused image
//! leaves guest memory unchanged. Loaders use only RAM below the PCI hole, and require guest memory
//! to be zero: they write what the image holds, but not the zeros that follow it.

pub mod acpi;
mod bios;
mod bytes;
mod elf;
mod elf_file;
mod elf_sections;
mod entry;
mod error;
mod firmware;
mod firmware_vars;
mod flat;
mod linux;
mod load;
mod multiboot;
mod multiboot2;
mod placement;
mod pvh;
mod request;
mod start_info;

#[cfg(test)]
mod tests;

pub use error::{BootError, MemoryHint};
pub use firmware::check as check_firmware;
pub use firmware_vars::{FirmwareVarsError, open_firmware_vars};
pub use linux::has_header as is_linux;
pub use load::{LoadedImage, detect, load};
pub use placement::PlacedPart;
pub use request::{BootModule, EntryMode, LoadRequest, Protocol};
