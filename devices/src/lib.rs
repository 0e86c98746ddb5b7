//! Models of what sits on a machine's buses, as pure state machines: no KVM, no I/O, no threads.

pub mod clock;
pub mod irq;
pub mod pit;
pub mod rtc;
