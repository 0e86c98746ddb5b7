//! Models of the devices of a PC, without hypervisor, threads or host I/O.
//!
//! A device is plain state behind a [`bus::Device`]. What it requires of the machine (an interrupt
//! line, the time, a reset) is a closure that the VMM supplies when it builds the device, see
//! [`hooks`]. Every device can save its state as plain data and restore it, which the feature
//! `serde` serializes, and most can describe their registers to a person, see [`inspect`].
//!
//! | Module | Device |
//! | --- | --- |
//! | [`irq`] | local APICs (xAPIC and x2APIC), I/O APIC, a pair of 8259A |
//! | [`pit`], [`rtc`] | 8254 interval timer, MC146818 real-time clock |
//! | [`serial`], [`i8042`] | 16550A UART, PS/2 keyboard and its controller |
//! | [`acpi`], [`acpi_pm`] | ACPI tables, power management registers and timer |
//! | [`pci`], [`virtio`] | PCI bus and reset control, virtio devices on it |
//! | [`legacy`] | POST code and port 92H |
//! | [`fp_error`] | FERR#, IGNNE# and IRQ 13 |
//! | [`flash`] | NOR flash with the variables of firmware |
//! | [`fw_cfg`], [`debugcon`], [`debug_exit`] | QEMU's configuration, console and exit ports |
//! | [`smbios`] | SMBIOS tables, for firmware |
//! | [`vga`] | registers of a VGA and of the Bochs display adapter |
//! | [`test_device`] | latches, interrupt lines and memory for test payloads |
//!
//! # Locks
//!
//! A device is called with its own lock held. In a callback it may take the lock of the interrupt
//! controllers; a callback must never access the bus.
//!
//! # Example
//!
//! An interval timer that counts, and a UART on a port bus:
//!
//! ```
//! use std::sync::{Arc, Mutex};
//!
//! use hindsight_devices::clock::Clock;
//! use hindsight_devices::pit::{PIT_HZ, Pit};
//! use hindsight_devices::serial::{COM1_PORT, Serial, UART_PORTS};
//! use hindsight_devices::{IrqLine, PortBus};
//!
//! // Channel 0 in mode 2 with a period of 100 clocks, written low byte first.
//! let clock = Clock::new_virtual(PIT_HZ);
//! let mut pit = Pit::new(&clock);
//! for (port, value) in [(0x43, 0x34), (0x40, 100), (0x40, 0)] {
//!     pit.write(port, value);
//! }
//! clock.advance(41);
//! pit.advance(clock.now());
//! assert_eq!(pit.read(0x40), 60);
//! // OUT rises, which is IRQ 0, when the period ends.
//! assert_eq!(pit.due(), Some(101));
//! clock.advance(60);
//! assert!(pit.advance(clock.now()));
//!
//! // The guest reads a received byte from COM1.
//! let com1 = Arc::new(Mutex::new(Serial::new(IrqLine::unconnected(), std::io::sink())));
//! let mut ports = PortBus::new();
//! ports.map(COM1_PORT, UART_PORTS, com1.clone())?;
//! com1.lock().unwrap().input(b"x");
//! let mut byte = [0];
//! ports.read(COM1_PORT, &mut byte);
//! assert_eq!(&byte, b"x");
//! # Ok::<(), hindsight_devices::BusError>(())
//! ```

pub mod acpi;
pub mod acpi_pm;
pub mod bus;
pub mod clock;
pub mod debug_exit;
pub mod debugcon;
pub mod flash;
pub mod fp_error;
pub mod fw_cfg;
pub mod hooks;
pub mod i8042;
pub mod inspect;
pub mod irq;
pub mod legacy;
pub mod pci;
pub mod pit;
pub mod rtc;
pub mod serial;
pub mod smbios;
pub mod test_device;
pub mod vga;
pub mod virtio;

pub use bus::{BusError, Device, MmioBus, PortBus, SharedDevice};
pub use hooks::{Backlog, IrqLine, MachineRequest, NanoClock, Requests};
pub use inspect::{Inspect, InspectField};

#[cfg(test)]
mod bus_fuzz;
