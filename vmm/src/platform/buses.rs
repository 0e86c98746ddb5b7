//! The buses, the interrupt controllers, and the devices on them.

use std::fmt;
use std::sync::Arc;

use hindsight_devices::irq::{Interrupts, InterruptsState};
use hindsight_devices::vga::{ScreenMode, VideoMemory};
use hindsight_devices::{Backlog, BusError, MmioBus, PortBus};

use super::btm::BtmSink;
use super::devices::{self, Devices, Mute, Sinks, Wiring};
use crate::state::{DevicesState, RestoreError};
use crate::sync::lock;

/// Feeds bytes to a device, and returns how many it accepted.
pub type InputFeeder = Box<dyn Fn(&[u8]) -> usize + Send>;

/// The buses of a machine with everything that sits on them.
///
/// Lock order: a device on a bus, then the interrupt controllers, which lock themselves and call
/// nothing while locked.
pub struct Buses {
    /// The interrupt controllers and timers.
    pub irq: Arc<Interrupts>,
    /// The I/O ports.
    pub ports: PortBus,
    /// Devices in memory space.
    pub mmio: MmioBus,
    /// The devices on the buses, for saving and restoring their state.
    pub(super) devices: Devices,
    /// Silences the consoles.
    pub mute: Mute,
    /// Receives branch trace messages, if `--btm` was given.
    pub btm: Option<BtmSink>,
    /// Whether PCI devices have left requests for later.
    backlog: Backlog,
    /// Number of processors.
    cpus: usize,
}

impl fmt::Debug for Buses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buses").finish_non_exhaustive()
    }
}

impl Buses {
    /// The buses with all devices on them, whose consoles write to `sinks`.
    ///
    /// # Errors
    ///
    /// When two devices overlap: a bug of the monitor.
    pub fn new(mut wiring: Wiring<'_>, sinks: Sinks) -> Result<Self, BusError> {
        let mute = Mute::default();
        let mut sinks = sinks.muted(&mute);
        let btm = sinks.btm.take().map(BtmSink::new);
        let (ports, mmio, devices) = devices::build(&mut wiring, sinks)?;
        Ok(Self {
            irq: wiring.irq,
            ports,
            mmio,
            devices,
            mute,
            btm,
            backlog: wiring.backlog,
            cpus: wiring.cpus.into(),
        })
    }

    /// The state of the interrupt controllers, and of all other devices.
    pub fn save(&self) -> (InterruptsState, DevicesState) {
        (self.irq.save(), self.devices.save())
    }

    /// Restores saved states. The clock must already show the time of the save.
    ///
    /// # Errors
    ///
    /// When one of the states is impossible.
    pub fn restore(
        &self,
        interrupts: &InterruptsState,
        devices: &DevicesState,
    ) -> Result<(), RestoreError> {
        self.devices.restore(devices)?;
        // After the devices: restoring them moves interrupt lines, which this overwrites.
        self.irq.restore(interrupts)?;
        Ok(())
    }

    /// Applies a reset of the machine to all devices, and then to the interrupt controllers.
    ///
    /// The real-time clock keeps its time, and disks keep what was written to them.
    ///
    /// # Errors
    ///
    /// When a device refuses its own first state: a bug of the monitor.
    pub fn reset(&self) -> Result<(), RestoreError> {
        self.devices.reset().map_err(RestoreError::from)?;
        self.irq.reset();
        self.irq.set_virtual_wire();
        for id in 1..self.cpus {
            self.irq.set_wait_for_sipi(id, true);
        }
        Ok(())
    }

    /// What the screen shows, and the address of its video memory; `None` without a screen.
    pub fn screen_mode(&self) -> Option<(ScreenMode, u64)> {
        let vga = lock(self.devices.vga.as_ref()?);
        Some((vga.mode(), vga.memory().map_or(0, VideoMemory::base)))
    }

    /// Drives FERR# of vCPU `cpu`. Returns whether IGNNE# is asserted.
    pub fn set_ferr(&self, cpu: usize, asserted: bool) -> bool {
        lock(&self.devices.fp_error).set_ferr(cpu, asserted)
    }

    /// Feeds bytes to the guest's COM1. Returns how many the port accepted.
    pub fn serial_input(&self, bytes: &[u8]) -> usize {
        lock(&self.devices.serial).input(bytes)
    }

    /// A function that feeds bytes to the guest's COM1 and returns how many the port accepted: none
    /// while another thread uses the port.
    pub fn serial_feeder(&self) -> InputFeeder {
        let serial = self.devices.serial.clone();
        Box::new(move |bytes| {
            serial
                .try_lock()
                .map_or(0, |mut serial| serial.input(bytes))
        })
    }

    /// Presses and releases keys, given as codes of set 1. Returns how many bytes the keyboard took.
    pub fn key_input(&self, codes: &[u8]) -> usize {
        lock(&self.devices.keyboard).key_input(codes)
    }

    /// A function that presses and releases keys, given as codes of set 1, and returns how many bytes the
    /// keyboard took: none while another thread uses it.
    pub fn key_feeder(&self) -> InputFeeder {
        let keyboard = self.devices.keyboard.clone();
        Box::new(move |codes| {
            keyboard
                .try_lock()
                .map_or(0, |mut keyboard| keyboard.key_input(codes))
        })
    }

    /// Whether the keyboard takes at least one more key.
    pub fn keyboard_has_capacity(&self) -> bool {
        lock(&self.devices.keyboard).has_key_capacity()
    }

    /// Serves the queues of the PCI device with this index, whose host side has something new.
    pub fn serve_device(&self, index: usize) {
        if let Some(root) = &self.devices.pci_root {
            let mut root = lock(root);
            if let Some(slot) = root.slot_of(index) {
                root.serve(slot);
            }
        }
    }

    /// Serves some of the requests that PCI devices have left for later. Returns whether there were
    /// any.
    ///
    /// vCPU threads call this between checks for a stop or a pause: a guest whose processors, or
    /// whose buffers in its own rings, add requests without an end cannot keep them from it.
    pub fn serve_backlog(&self) -> bool {
        let waiting = self.backlog.take();
        if let (true, Some(root)) = (waiting, &self.devices.pci_root) {
            lock(root).serve_backlog();
        }
        waiting
    }

    /// Whether the guest's COM1 accepts at least one more byte.
    pub fn serial_has_capacity(&self) -> bool {
        lock(&self.devices.serial).input_capacity() != 0
    }
}
