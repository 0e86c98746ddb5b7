//! The virtual machine monitor behind the `hindsight` command.

pub mod acpi;
pub mod boot;
pub mod cli;
pub mod console;
pub mod demo;
pub mod doctor;
pub mod gdb;
pub mod harness;
pub mod host_clock;
pub mod kvm;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod messages;
pub mod snapshot;
pub mod translate;
pub mod vcpu;
