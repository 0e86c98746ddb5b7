//! The state of the devices on the buses.

use hindsight_devices::acpi_pm::AcpiPmState;
use hindsight_devices::flash::{FlashError, FlashState};
use hindsight_devices::fp_error::FpErrorState;
use hindsight_devices::fw_cfg::FwCfgState;
use hindsight_devices::i8042::{I8042Error, I8042State};
use hindsight_devices::legacy::PostCode;
use hindsight_devices::pci::{PciRootState, PciState};
use hindsight_devices::serial::{SerialError, SerialState};
use hindsight_devices::test_device::{Latch, TestMemoryError};
use hindsight_devices::vga::{VgaError, VgaState};
use hindsight_devices::virtio::VirtioStateError;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The state of all devices except the interrupt controllers and timers.
///
/// The debug exit port and the ports that drive interrupt lines have no state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicesState {
    /// COM1.
    pub serial: SerialState,
    /// The POST code latch.
    pub post_code: PostCode,
    /// System control port A.
    pub control_a: u8,
    /// The keyboard controller.
    pub keyboard: I8042State,
    /// The ACPI registers.
    pub acpi_pm: AcpiPmState,
    /// The PCI configuration ports.
    pub pci: PciState,
    /// The functions on the PCI bus; `None` if there is none.
    pub pci_root: Option<PciRootState>,
    /// FERR#, IGNNE# and IRQ 13.
    pub fp_error: FpErrorState,
    /// The 32-bit test latch.
    pub latch: Latch,
    /// The byte latches, and the value that port 0xe9 returns.
    pub byte_latches: Latch,
    /// The firmware configuration device.
    pub fw_cfg: FwCfgState,
    /// The test memory.
    pub test_memory: Vec<u8>,
    /// The screen's registers; `None` without a screen.
    #[serde(default)]
    pub vga: Option<VgaState>,
    /// The flash chip with the firmware's variables; `None` if there is none.
    #[serde(default)]
    pub flash: Option<FlashState>,
}

/// Why a device's state cannot be restored.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum DevicesError {
    /// The serial port's state is invalid.
    #[error(transparent)]
    Serial(#[from] SerialError),
    /// The test memory's state is invalid.
    #[error(transparent)]
    TestMemory(#[from] TestMemoryError),
    /// The keyboard controller's state is invalid, or the machine has no keyboard.
    #[error(transparent)]
    Keyboard(#[from] I8042Error),
    /// The screen's registers are invalid, or the machine has no screen.
    #[error(transparent)]
    Vga(#[from] VgaError),
    /// The flash chip's state is invalid, or the machine has none.
    #[error(transparent)]
    Flash(#[from] FlashError),
    /// The state of a PCI device is invalid, or the machine has others.
    #[error(transparent)]
    Virtio(#[from] VirtioStateError),
}
