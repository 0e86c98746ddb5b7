//! Interrupt controllers: a local APIC for each virtual processor, an I/O APIC and a pair of 8259A,
//! joined by [`Interrupts`] with the timers that drive them.

mod fabric;
pub mod ioapic;
pub mod lapic;
pub mod message;
pub mod pic;
#[cfg(test)]
mod tests;

pub use fabric::{Config, Interrupts, InterruptsError, InterruptsState, PORTS, Pending, Wake};

/// A register access that raises #GP(0) in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gp;
