//! The harness that runs asserting guest payloads: `hindsight test`.
//!
//! A payload is a guest image that reports on the serial line and writes its verdict to the debug
//! exit port. An image with an ELF section `.hindsight.cases` declares its cases. Each case runs at
//! each of its privilege levels in a child process of its own, so that a guest that hangs, floods
//! the serial line or crashes the VMM costs only its own line of the report. An image without that
//! section is one case.
//!
//! [`image`] opens the images, [`case`] parses the case records, [`select`] makes jobs of them,
//! [`needs`] finds which of them this host cannot run, [`runner`] builds the command of the child,
//! [`child`] supervises it, [`serial`] parses the guest's output, [`verdict`] judges, and
//! [`report`] prints. Images and their output are untrusted, and bounded here.

pub mod builtin;
pub mod case;
mod case_section;
pub mod child;
pub mod image;
pub mod needs;
pub mod pool;
pub mod report;
pub mod runner;
pub mod select;
pub mod serial;
pub mod verdict;

pub use needs::Capabilities;

/// The payloads built into this program: name and image, ordered by name.
pub const BUILTIN_PAYLOADS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/payloads.rs"));
