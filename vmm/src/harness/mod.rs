//! The harness that runs asserting guest payloads, `hindsight test`.
//!
//! A payload is a guest image that reports on the serial line and writes its verdict to the debug
//! exit port. An image with an ELF section `.hindsight.cases` names the cases it holds; every
//! (case, privilege level) runs in a child process of its own, so that a guest which hangs, floods
//! the serial line or brings the VMM down costs only its own line. An image without that section is
//! one case.
//!
//! The way of a case: [`image`] finds the records, [`case`] parses them, [`select`] makes jobs of
//! them, [`needs`] says which of them this host cannot run, [`runner`] builds the command of the
//! child, [`child`] supervises it, [`serial`] reads what the guest says, [`verdict`] judges, and
//! [`report`] prints. Everything an image or its guest says is untrusted and bounded here.

pub mod case;
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

/// The payloads built into this program: name and image, in the order of the names.
pub const BUILTIN_PAYLOADS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/payloads.rs"));
