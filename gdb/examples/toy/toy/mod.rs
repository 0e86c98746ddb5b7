//! A machine with one vCPU and 2 MiB of RAM, which executes the five instructions of its program.
//!
//! Read `target` first: it is what a monitor has to implement. `machine` is the thread that runs the
//! vCPU, `cpu` what an instruction does.

mod cpu;
mod machine;
mod target;

pub use machine::ToyMachine;
