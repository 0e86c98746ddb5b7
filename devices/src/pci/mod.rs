//! PCI: configuration mechanism #1 and ECAM, the functions of bus 0, MSI-X and INTx.
//!
//! Follows the PCI Local Bus Specification 3.0 and, for ECAM, the PCI Express Base Specification,
//! "PCI Express Enhanced Configuration Access Mechanism". There is one segment with one bus, whose
//! functions are a host bridge at 00.0 and the machine's devices from 01.0 on. Buses other than 0 and
//! functions other than 0 are absent. A machine without devices has no host bridge either: every
//! configuration read answers all ones. A machine that starts in firmware has a PC's [`Bridge`], with
//! more functions in slot 1, and its devices from 02.0 on. A display adapter is at 1f.0.

mod chipset;
mod config;
mod display;
mod intx;
mod msix;
mod ports;
mod root;

pub use config::{BarLayout, ConfigSpace, PciIdentity};
pub use display::{DISPLAY_SLOT, PciDisplay};
pub use intx::IntxLines;
pub use msix::{MsiSender, Msix, MsixState};
pub use ports::{PCI_PORT, PCI_PORTS, PciConfig, PciState, RESET_PORT, RESET_VALUE};
pub use root::{Bridge, Ecam, PciRoot, PciRootState, PciWindow, SharedRoot};

/// Base of the enhanced configuration space of bus 0.
pub const ECAM_BASE: u64 = 0xe000_0000;
/// Bytes of the enhanced configuration space of one bus.
pub const ECAM_LEN: u64 = 1 << 20;
/// Base of the addresses that memory BARs use.
pub const WINDOW_BASE: u64 = 0xc000_0000;
/// Bytes of the addresses that memory BARs use: up to ECAM.
pub const WINDOW_LEN: u64 = ECAM_BASE - WINDOW_BASE;
/// Base of the addresses that memory BARs use where firmware assigns them and there is no RAM.
pub const FIRMWARE_WINDOW_BASE: u64 = 0x8000_0000;
/// End of these addresses: the I/O APIC.
pub const FIRMWARE_WINDOW_END: u64 = 0xfec0_0000;
/// Devices on bus 0 besides the host bridge.
pub const DEVICES_MAX: usize = 31;

/// The global system interrupt of pin INTA# of the device in a slot. Eight lines are shared.
pub const fn intx_gsi(slot: u8) -> u32 {
    16 + (slot % 8) as u32
}
