//! Models of what sits on the buses of the virtual machine: no KVM, no threads, no host I/O.
//!
//! A device is plain state behind a [`bus::Device`]; what it wants from the machine (an interrupt
//! line, the time, a reset) comes in as a callback when it is built. Lock order: a device is called
//! with its own lock held, and may take the locks of the interrupt controllers inside a callback;
//! a callback must never access the bus.

pub mod acpi;
pub mod acpi_pm;
pub mod bus;
pub mod clock;
pub mod debug_exit;
pub mod debugcon;
pub mod fw_cfg;
pub mod hooks;
pub mod i8042;
pub mod irq;
pub mod legacy;
pub mod pci;
pub mod pit;
pub mod rtc;
pub mod serial;
pub mod test_device;

pub use bus::{BusError, Device, MmioBus, PortBus, SharedDevice};
pub use hooks::{IrqLine, MachineRequest, NanoClock, Requests};

#[cfg(test)]
mod bus_fuzz;
