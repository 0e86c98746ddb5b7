//! Interrupt controllers: local APICs, an I/O APIC and a pair of 8259A.
//!
//! [`Interrupts`] connects them with each other and with the timers that drive them. The
//! controllers can also be used alone: each is a plain struct without locks.

mod interrupts;
pub mod ioapic;
pub mod lapic;
pub mod message;
pub mod pic;

pub use interrupts::{
    InterruptDevice, Interrupts, InterruptsConfig, InterruptsError, InterruptsState, PORTS,
    PendingInterrupts, Wake,
};
