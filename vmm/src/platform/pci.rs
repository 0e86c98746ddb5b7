//! The devices on the PCI bus of a machine.

use std::fmt;
use std::sync::{Arc, Mutex};

use hindsight_devices::Backlog;
use hindsight_devices::irq::Interrupts;
use hindsight_devices::pci::{Bridge, IntxLines, MsiSender, PciDisplay, PciRoot, SharedRoot};
use hindsight_devices::virtio::{DmaMemory, VirtioDevice};

/// Devices for the PCI bus, and the memory that they access. Without devices there is no bus.
#[derive(Default)]
pub struct PciDevices {
    bridge: Option<Bridge>,
    /// The devices, in the order of their slots.
    devices: Vec<Box<dyn VirtioDevice>>,
    /// Guest memory; present if there are devices.
    memory: Option<DmaMemory>,
}

impl fmt::Debug for PciDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = self.devices.iter().map(|device| device.kind());
        f.debug_list().entries(kinds).finish()
    }
}

impl PciDevices {
    /// Devices that access `memory`, behind a host bridge.
    pub fn new(bridge: Bridge, devices: Vec<Box<dyn VirtioDevice>>, memory: DmaMemory) -> Self {
        Self {
            bridge: Some(bridge),
            devices,
            memory: Some(memory),
        }
    }

    /// Guest memory for devices; `None` if there is no bus.
    pub(super) fn memory(&self) -> Option<&DmaMemory> {
        self.memory.as_ref()
    }

    /// Whether there is firmware, which assigns addresses.
    pub(super) fn has_firmware(&self) -> bool {
        self.bridge == Some(Bridge::Pc)
    }

    /// Builds the bus with the devices, which this no longer has then, and a display.
    pub(super) fn take_root(
        &mut self,
        display: Option<PciDisplay>,
        irq: &Arc<Interrupts>,
        backlog: Backlog,
    ) -> Option<SharedRoot> {
        let (bridge, memory) = (self.bridge?, self.memory.as_ref()?);
        let devices = std::mem::take(&mut self.devices);
        let (messages, lines) = (irq.clone(), irq.clone());
        let sender = MsiSender::new(move |address, data| messages.send_msi(address, data));
        let lines = IntxLines::new(move |gsi, level| lines.set_irq(gsi, level));
        let root = PciRoot::new(bridge, (devices, display), memory, &sender, lines, backlog);
        Some(Arc::new(Mutex::new(root)))
    }
}
