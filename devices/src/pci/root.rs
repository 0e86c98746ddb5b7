//! Bus 0: a host bridge and virtio functions, found by configuration accesses and BARs.

use std::sync::{Arc, Mutex};

use super::intx::IntxLines;
use super::{ConfigSpace, DEVICES_MAX, ECAM_LEN, MsiSender, PciIdentity, WINDOW_BASE};
use crate::bus::{Device, lock};
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

/// The state of all functions of bus 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PciRootState {
    /// The configuration space of the host bridge.
    pub host_bridge: Vec<u8>,
    /// The functions by slot, from slot 1 on.
    pub functions: Vec<VirtioFunctionState>,
}

/// Bus 0.
#[derive(Debug)]
pub struct PciRoot {
    host_bridge: ConfigSpace,
    functions: Vec<VirtioFunction>,
    lines: IntxLines,
}

/// Bus 0, as the configuration ports, ECAM and the BARs' window share it.
pub type SharedRoot = Arc<Mutex<PciRoot>>;

impl PciRoot {
    /// A bus with `devices` in slots from 1 on; those beyond [`DEVICES_MAX`] are left out.
    pub fn new(
        devices: Vec<Box<dyn VirtioDevice>>,
        memory: &DmaMemory,
        sender: &MsiSender,
        lines: IntxLines,
    ) -> Self {
        debug_assert!(
            devices.len() <= DEVICES_MAX,
            "the caller checks the number of devices"
        );
        let numbers = 1_u8..;
        let functions = numbers
            .zip(devices)
            .take(DEVICES_MAX)
            .map(|(slot, device)| {
                let bars = (WINDOW_BASE & 0xffff_ffff) as u32 + u32::from(slot) * BAR_SPACE;
                VirtioFunction::new(slot, bars, device, memory.clone(), sender.clone())
            });
        Self {
            host_bridge: ConfigSpace::new(HOST_BRIDGE),
            functions: functions.collect(),
            lines,
        }
    }

    fn function(&mut self, slot: u8) -> Option<&mut VirtioFunction> {
        let index = usize::from(slot).checked_sub(1)?;
        self.functions.get_mut(index)
    }

    /// Reads `data.len()` bytes of the configuration space of function 0 of a slot.
    pub fn config_read(&mut self, slot: u8, offset: usize, data: &mut [u8]) {
        match self.function(slot) {
            Some(function) => function.config_read(offset, data),
            None if slot == 0 => self.host_bridge.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes to the configuration space of function 0 of a slot.
    pub fn config_write(&mut self, slot: u8, offset: usize, data: &[u8]) {
        match self.function(slot) {
            Some(function) => {
                function.config_write(offset, data);
                self.update_line(slot);
            }
            None if slot == 0 => self.host_bridge.write(offset, data),
            None => {}
        }
    }

    fn update_line(&mut self, slot: u8) {
        let level = self
            .function(slot)
            .is_some_and(|function| function.intx_level());
        self.lines.set(slot, level);
    }

    /// The slot of the function whose BAR decodes all of `len` bytes, the BAR, and the offset in it.
    fn decode(&self, address: u64, len: usize) -> Option<(u8, usize, u64)> {
        self.functions.iter().find_map(|function| {
            let (bar, offset) = function.decode(address, len)?;
            Some((function.slot(), bar, offset))
        })
    }

    /// Serves all queues of the function in a slot, whose host side has something new.
    pub fn serve(&mut self, slot: u8) {
        if let Some(function) = self.function(slot) {
            function.serve_all();
            self.update_line(slot);
        }
    }

    /// Reports to the driver of the function in a slot that its configuration has changed.
    pub fn config_changed(&mut self, slot: u8) {
        if let Some(function) = self.function(slot) {
            function.config_changed();
            self.update_line(slot);
        }
    }

    /// The state of all functions.
    pub fn save(&self) -> PciRootState {
        PciRootState {
            host_bridge: self.host_bridge.save(),
            functions: self.functions.iter().map(VirtioFunction::save).collect(),
        }
    }

    /// Restores the state of all functions, and drives their interrupt lines.
    ///
    /// # Errors
    /// The state is of a machine with other devices, or invalid. Functions before the one that is
    /// invalid have changed.
    pub fn restore(&mut self, state: &PciRootState) -> Result<(), VirtioStateError> {
        if state.functions.len() != self.functions.len() {
            return Err(VirtioStateError::OtherDevices);
        }
        for (own, saved) in self.functions.iter_mut().zip(&state.functions) {
            own.restore(saved)?;
        }
        self.host_bridge.restore(&state.host_bridge);
        for slot in (1..).take(self.functions.len()) {
            self.update_line(slot);
        }
        Ok(())
    }
}

/// The enhanced configuration space of bus 0 in memory.
#[derive(Clone, Debug)]
pub struct Ecam(pub SharedRoot);

/// The slot and register of an offset; `None` for functions that do not exist.
fn ecam_address(offset: u64) -> Option<(u8, usize)> {
    let [function, ..] = (offset >> 12 & 7).to_le_bytes();
    let [slot, ..] = (offset >> 15 & 0x1f).to_le_bytes();
    let register = usize::try_from(offset & 0xfff).ok()?;
    (offset < ECAM_LEN && function == 0).then_some((slot, register))
}

impl Device for Ecam {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match ecam_address(offset) {
            Some((slot, register)) if data.len() <= 4 => {
                lock(&self.0).config_read(slot, register, data);
            }
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some((slot, register)) = ecam_address(offset)
            && data.len() <= 4
        {
            lock(&self.0).config_write(slot, register, data);
        }
    }
}

/// The addresses in which BARs lie; offsets count from [`WINDOW_BASE`].
#[derive(Clone, Debug)]
pub struct PciWindow(pub SharedRoot);

impl Device for PciWindow {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let mut root = lock(&self.0);
        let address = WINDOW_BASE + offset;
        let Some((slot, bar, offset)) = root.decode(address, data.len()) else {
            data.fill(0xff);
            return;
        };
        if let Some(function) = root.function(slot) {
            function.bar_read(bar, offset, data);
        }
        // Reading the ISR status deasserts the line.
        root.update_line(slot);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut root = lock(&self.0);
        let address = WINDOW_BASE + offset;
        if let Some((slot, bar, offset)) = root.decode(address, data.len()) {
            if let Some(function) = root.function(slot) {
                function.bar_write(bar, offset, data);
            }
            root.update_line(slot);
        }
    }
}
