//! The virtual machine monitor behind the `hindsight` command.

pub mod boot;
pub mod cli;
pub mod console;
pub mod debugger;
pub mod demo;
pub mod deterministic;
pub mod diff;
pub mod exactness;
pub mod harness;
pub mod host_clock;
pub mod kvm;
pub mod log_limit;
pub mod machine;
pub mod memory;
pub mod output;
pub mod platform;
pub mod probe;
pub mod sandbox;
pub mod screen;
pub mod state;
mod sync;
pub mod vcpu;
pub mod virtio;
