//! Bus 0: a host bridge and virtio functions, found by configuration accesses and BARs.

use std::sync::{Arc, Mutex};

use super::chipset::{self, Chipset, FIRST_DEVICE_SLOT};
use super::display::{DISPLAY_SLOT, DisplayFunction, PciDisplay};
use super::intx::IntxLines;
use super::{ConfigSpace, DEVICES_MAX, ECAM_LEN, MsiSender, PciIdentity, WINDOW_BASE};
use crate::bus::{Device, lock};
use crate::hooks::Backlog;
use crate::virtio::function::BAR_SPACE;
use crate::virtio::{
    DmaMemory, VirtioDevice, VirtioFunction, VirtioFunctionState, VirtioStateError,
};

/// The generic host bridge of QEMU's machines, for which guests have no quirks.
const HOST_BRIDGE: PciIdentity = PciIdentity {
    vendor: 0x1b36,
    device: 0x0008,
    class: 0x06_0000,
    revision: 0,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
};

/// The host bridge, and what comes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bridge {
    /// A generic bridge, for kernels that a loader enters.
    Generic,
    /// A PC's chipset, which firmware knows.
    Pc,
}

impl Bridge {
    /// The slot of the first device.
    pub const fn first_slot(self) -> u8 {
        match self {
            Self::Generic => 1,
            Self::Pc => FIRST_DEVICE_SLOT,
        }
    }

    /// The number of devices that the bus takes, besides a display.
    pub const fn devices_max(self, display: bool) -> usize {
        DEVICES_MAX + 1 - self.first_slot() as usize - display as usize
    }
}

/// The state of all functions of bus 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PciRootState {
    /// The configuration space of the host bridge.
    pub host_bridge: Vec<u8>,
    /// The configuration spaces of a PC's chipset; empty without one.
    #[cfg_attr(feature = "serde", serde(default))]
    pub chipset: Vec<Vec<u8>>,
    /// The functions of devices by slot, from the first device's slot on.
    pub functions: Vec<VirtioFunctionState>,
    /// The configuration space of the display; empty without one.
    #[cfg_attr(feature = "serde", serde(default))]
    pub display: Vec<u8>,
}

/// Bus 0.
#[derive(Debug)]
pub struct PciRoot {
    host_bridge: ConfigSpace,
    /// The functions of slot 1 that come with a PC's host bridge.
    chipset: Option<Chipset>,
    first_slot: u8,
    functions: Vec<VirtioFunction>,
    display: Option<DisplayFunction>,
    lines: IntxLines,
    backlog: Backlog,
    /// The state after the bus was built.
    first: PciRootState,
}

/// Bus 0, as the configuration ports, ECAM and the BARs' window share it.
pub type SharedRoot = Arc<Mutex<PciRoot>>;

impl PciRoot {
    /// A bus with `devices` in the slots after the bridge's; those beyond [`Bridge::devices_max`] are
    /// left out. A `display` is in the last slot. What they do not serve at once is reported to `backlog`, for
    /// [`PciRoot::serve_backlog`].
    pub fn new(
        bridge: Bridge,
        (devices, display): (Vec<Box<dyn VirtioDevice>>, Option<PciDisplay>),
        memory: &DmaMemory,
        sender: &MsiSender,
        lines: IntxLines,
        backlog: Backlog,
    ) -> Self {
        let devices_max = bridge.devices_max(display.is_some());
        debug_assert!(
            devices.len() <= devices_max,
            "the caller checks the number of devices"
        );
        let numbers = bridge.first_slot()..;
        let bars = |slot| (WINDOW_BASE & 0xffff_ffff) as u32 + u32::from(slot) * BAR_SPACE;
        let functions = numbers
            .zip(devices)
            .take(devices_max)
            .map(|(slot, device)| {
                let (memory, sender) = (memory.clone(), sender.clone());
                VirtioFunction::new(slot, bars(slot), device, memory, sender)
            });
        let (host_bridge, chipset) = match bridge {
            Bridge::Generic => (ConfigSpace::new(HOST_BRIDGE), None),
            Bridge::Pc => (chipset::host_bridge(), Some(Chipset::new())),
        };
        let mut root = Self {
            host_bridge,
            chipset,
            first_slot: bridge.first_slot(),
            functions: functions.collect(),
            display: display.map(|display| DisplayFunction::new(display, bars(DISPLAY_SLOT))),
            lines,
            backlog,
            first: PciRootState::default(),
        };
        root.first = root.save();
        root
    }

    /// Applies a reset of the machine: registers as firmware finds them, devices without a driver.
    ///
    /// Disks keep what was written to them.
    pub fn reset(&mut self) {
        self.host_bridge.restore(&self.first.host_bridge);
        if let Some(chipset) = &mut self.chipset {
            chipset.restore(&self.first.chipset);
        }
        if let Some(display) = &mut self.display {
            display.space.restore(&self.first.display);
        }
        for (function, first) in self.functions.iter_mut().zip(&self.first.functions) {
            function.bus_reset(first);
        }
        for slot in (self.first_slot..).take(self.functions.len()) {
            self.settle(slot);
        }
    }

    fn function(&mut self, slot: u8) -> Option<&mut VirtioFunction> {
        let index = slot.checked_sub(self.first_slot)?;
        self.functions.get_mut(usize::from(index))
    }

    /// The slot of the device with this index.
    pub fn slot_of(&self, device: usize) -> Option<u8> {
        self.functions.get(device).map(VirtioFunction::slot)
    }

    /// The configuration space of the host bridge, of a function of the chipset, or of the display.
    fn plain_function(&mut self, slot: u8, function: u8) -> Option<&mut ConfigSpace> {
        match (slot, function) {
            (0, 0) => Some(&mut self.host_bridge),
            (1, _) if self.chipset.is_some() => self.chipset.as_mut()?.function(function),
            (DISPLAY_SLOT, 0) => Some(&mut self.display.as_mut()?.space),
            _ => None,
        }
    }

    /// Reads `data.len()` bytes of the configuration space of a function.
    ///
    /// `device_function` has the slot in its bits 7:3 and the function in its bits 2:0.
    pub fn config_read(&mut self, device_function: u8, offset: usize, data: &mut [u8]) {
        let (slot, number) = (device_function >> 3, device_function & 7);
        if let Some(space) = self.plain_function(slot, number) {
            space.read(offset, data);
            return;
        }
        match self.function(slot) {
            Some(function) if number == 0 => function.config_read(offset, data),
            _ => data.fill(0xff),
        }
    }

    /// Writes to the configuration space of a function, as [`PciRoot::config_read`] names it.
    pub fn config_write(&mut self, device_function: u8, offset: usize, data: &[u8]) {
        let (slot, number) = (device_function >> 3, device_function & 7);
        if let Some(space) = self.plain_function(slot, number) {
            space.write(offset, data);
            return;
        }
        if let Some(function) = self.function(slot)
            && number == 0
        {
            function.config_write(offset, data);
            self.settle(slot);
        }
    }

    /// Drives the line of a function that has changed, and reports requests that it has left.
    fn settle(&mut self, slot: u8) {
        let Some(function) = self.function(slot) else {
            return self.lines.set(slot, false);
        };
        let (level, left) = (function.intx_level(), function.has_backlog());
        self.lines.set(slot, level);
        if left {
            self.backlog.report();
        }
    }

    /// The slot of the function whose BAR decodes all of `len` bytes, the BAR, and the offset in it.
    fn decode(&self, address: u64, len: usize) -> Option<(u8, usize, u64)> {
        self.functions.iter().find_map(|function| {
            let (bar, offset) = function.decode(address, len)?;
            Some((function.slot(), bar, offset))
        })
    }

    /// The display, if its BAR decodes all of `len` bytes, the BAR, and the offset in it.
    fn decode_display(&self, address: u64, len: usize) -> Option<(&DisplayFunction, usize, u64)> {
        let display = self.display.as_ref()?;
        let (bar, offset) = display.space.decode(address, len)?;
        Some((display, bar, offset))
    }

    /// Serves all queues of the function in a slot, whose host side has something new.
    pub fn serve(&mut self, slot: u8) {
        if let Some(function) = self.function(slot) {
            function.serve_all();
            self.settle(slot);
        }
    }

    /// Serves one queue of each function that has left requests. Reports if any are left then.
    pub fn serve_backlog(&mut self) {
        for slot in (self.first_slot..).take(self.functions.len()) {
            if let Some(function) = self.function(slot)
                && function.has_backlog()
            {
                function.serve_backlog();
                self.settle(slot);
            }
        }
    }

    /// Reports to the driver of the function in a slot that its configuration has changed.
    pub fn config_changed(&mut self, slot: u8) {
        if let Some(function) = self.function(slot) {
            function.config_changed();
            self.settle(slot);
        }
    }

    /// The state of all functions.
    pub fn save(&self) -> PciRootState {
        PciRootState {
            host_bridge: self.host_bridge.save(),
            chipset: self.chipset.as_ref().map_or_else(Vec::new, Chipset::save),
            functions: self.functions.iter().map(VirtioFunction::save).collect(),
            display: match &self.display {
                Some(display) => display.space.save(),
                None => Vec::new(),
            },
        }
    }

    /// Restores the state of all functions, and drives their interrupt lines.
    ///
    /// # Errors
    /// The state is of a machine with other devices, or invalid. Functions before the one that is
    /// invalid have changed.
    pub fn restore(&mut self, state: &PciRootState) -> Result<(), VirtioStateError> {
        let chipset_saved = !state.chipset.is_empty();
        if state.functions.len() != self.functions.len()
            || chipset_saved != self.chipset.is_some()
            || state.display.is_empty() == self.display.is_some()
        {
            return Err(VirtioStateError::OtherDevices);
        }
        for (own, saved) in self.functions.iter_mut().zip(&state.functions) {
            own.restore(saved)?;
        }
        self.host_bridge.restore(&state.host_bridge);
        if let Some(chipset) = &mut self.chipset {
            chipset.restore(&state.chipset);
        }
        if let Some(display) = &mut self.display {
            display.space.restore(&state.display);
        }
        for slot in (self.first_slot..).take(self.functions.len()) {
            self.settle(slot);
        }
        Ok(())
    }
}

/// The enhanced configuration space of bus 0 in memory.
#[derive(Clone, Debug)]
pub struct Ecam(pub SharedRoot);

/// The device and function, and the register, of an offset; `None` outside of the space.
fn ecam_address(offset: u64) -> Option<(u8, usize)> {
    let [device_function, ..] = (offset >> 12).to_le_bytes();
    let register = usize::try_from(offset & 0xfff).ok()?;
    (offset < ECAM_LEN).then_some((device_function, register))
}

impl Device for Ecam {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match ecam_address(offset) {
            Some((function, register)) if data.len() <= 4 => {
                lock(&self.0).config_read(function, register, data);
            }
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some((function, register)) = ecam_address(offset)
            && data.len() <= 4
        {
            lock(&self.0).config_write(function, register, data);
        }
    }
}

/// Addresses in which BARs lie.
#[derive(Clone, Debug)]
pub struct PciWindow {
    /// The bus.
    pub root: SharedRoot,
    /// The guest-physical address from which offsets count.
    pub base: u64,
}

impl Device for PciWindow {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let mut root = lock(&self.root);
        let address = self.base + offset;
        if let Some((display, bar, offset)) = root.decode_display(address, data.len()) {
            return display.bar_read(bar, offset, data);
        }
        let Some((slot, bar, offset)) = root.decode(address, data.len()) else {
            data.fill(0xff);
            return;
        };
        if let Some(function) = root.function(slot) {
            function.bar_read(bar, offset, data);
        }
        // Reading the ISR status deasserts the line.
        root.settle(slot);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut root = lock(&self.root);
        let address = self.base + offset;
        if let Some((display, bar, offset)) = root.decode_display(address, data.len()) {
            return display.bar_write(bar, offset, data);
        }
        if let Some((slot, bar, offset)) = root.decode(address, data.len()) {
            if let Some(function) = root.function(slot) {
                function.bar_write(bar, offset, data);
            }
            root.settle(slot);
        }
    }
}
