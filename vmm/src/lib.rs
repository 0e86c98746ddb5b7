//! The virtual machine monitor behind the `hindsight` command.

pub mod boot;
pub mod doctor;
pub mod harness;
pub mod kvm;
pub mod layout;
