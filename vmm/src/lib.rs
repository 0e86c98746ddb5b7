//! The virtual machine monitor as a library.

pub mod harness;
