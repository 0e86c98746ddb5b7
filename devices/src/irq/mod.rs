//! Interrupt controllers: a local APIC for each virtual processor, an I/O APIC and a pair of 8259A,
//! joined by [`Interrupts`] with the timers that drive them.

mod fabric;
pub mod ioapic;
pub mod lapic;
pub mod message;
pub mod pic;
#[cfg(test)]
mod tests;

use hindsight_regs::vector::GpFault;

pub use fabric::{Config, Interrupts, InterruptsError, InterruptsState, PORTS, Pending, Wake};
