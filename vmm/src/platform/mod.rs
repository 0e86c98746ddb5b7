//! What surrounds the virtual processors: devices and the buses they sit on, time, and the
//! receiver of branch trace messages.

mod bios_calls;
pub mod btm;
mod buses;
mod devices;
mod firmware;
mod pci;
mod timekeeping;

pub use buses::Buses;
pub use devices::{Mute, ScreenConfig, Sinks, Wiring};
pub use pci::PciDevices;
pub use timekeeping::{Timekeeping, TimerBell, WINDOW_POLL};
