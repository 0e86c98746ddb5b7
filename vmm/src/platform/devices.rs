//! The devices of a machine, and their addresses.

use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use hindsight_devices::acpi_pm::{AcpiPm, PIIX4_PM_PORT, PM_PORT, PM_PORTS};
use hindsight_devices::debug_exit::{DEBUG_EXIT_PORT, DEBUG_EXIT_PORTS, DebugExit};
use hindsight_devices::debugcon::DebugCon;
use hindsight_devices::flash::{Flash, FlashError};
use hindsight_devices::fp_error::{FP_ERROR_LINE, FP_ERROR_PORT, FpError};
use hindsight_devices::fw_cfg::{
    FW_CFG_DMA_OFFSET, FW_CFG_DMA_PORT, FW_CFG_DMA_PORTS, FW_CFG_PORT, FW_CFG_PORTS, FwCfg,
};
use hindsight_devices::i8042::{I8042, I8042_COMMAND_OFFSET, I8042_COMMAND_PORT, I8042_DATA_PORT};
use hindsight_devices::irq::{Interrupts, PORTS};
use hindsight_devices::legacy::{CONTROL_A_PORT, ControlA, POST_CODE_PORT, PostCode};
use hindsight_devices::pci::{
    ECAM_BASE, ECAM_LEN, Ecam, FIRMWARE_WINDOW_BASE, FIRMWARE_WINDOW_END, PCI_PORT, PCI_PORTS,
    PciConfig, PciDisplay, PciWindow, SharedRoot, WINDOW_BASE, WINDOW_LEN,
};
use hindsight_devices::serial::Serial;
use hindsight_devices::test_device::{
    BYTE_LATCH_PORT, ByteLatches, LATCH_PORT, LATCH_PORTS, LINE_PORT, LINES, Latch, LinePorts,
    TEST_MEMORY_BASE, TEST_MEMORY_LEN, TestMemory,
};
use hindsight_devices::vga::{
    DISPI_OFFSET, DISPI_PORT, DISPI_PORTS, VGA_PORT, VGA_PORTS, Vga, VgaError, VideoMemory,
};
use hindsight_devices::virtio::VirtioStateError;
use hindsight_devices::{
    Backlog, BusError, Device, IrqLine, MmioBus, NanoClock, PortBus, Requests, SharedDevice,
};

use super::bios_calls::BiosCalls;
use super::firmware::{FIRMWARE_LOG_PORT, FirmwareLog, firmware_config};
use super::pci::PciDevices;
use crate::memory::layout::{BIOS_CALL_PORT, Layout};
use crate::state::{DevicesError, DevicesState};
use crate::sync::lock;

/// COM1: ports and ISA line.
const COM1_PORT: u16 = 0x3f8;
const COM1_LINE: u32 = 4;
/// The keyboard's ISA line.
const KEYBOARD_LINE: u32 = 1;
/// The I/O APIC's page.
pub(crate) const IOAPIC_BASE: u64 = 0xfec0_0000;

/// Receives the output of the guest's consoles.
pub struct Sinks {
    /// COM1.
    pub serial: Box<dyn Write + Send>,
    /// The debug console, port 0xe9.
    pub debugcon: Box<dyn Write + Send>,
    /// Receives branch trace messages, if `--btm` was given.
    pub btm: Option<Box<dyn Write + Send>>,
}

impl Sinks {
    /// The same sinks, silent while `mute` is set.
    pub(crate) fn muted(self, mute: &Mute) -> Self {
        let muted = |to| -> Box<dyn Write + Send> {
            Box::new(MutedSink {
                to,
                mute: mute.clone(),
            })
        };
        Self {
            serial: muted(self.serial),
            debugcon: muted(self.debugcon),
            btm: self.btm.map(muted),
        }
    }
}

/// Silences the consoles while a run that went back repeats output that was written before.
#[derive(Clone, Debug, Default)]
pub struct Mute(Arc<AtomicBool>);

impl Mute {
    /// Drops all output from now on, or none.
    pub fn set(&self, mute: bool) {
        self.0.store(mute, Ordering::Relaxed);
    }
}

/// A sink that can be silenced.
struct MutedSink {
    to: Box<dyn Write + Send>,
    mute: Mute,
}

impl Write for MutedSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.mute.0.load(Ordering::Relaxed) {
            return Ok(bytes.len());
        }
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

impl fmt::Debug for Sinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sinks")
    }
}

/// A screen.
#[derive(Clone, Debug, Default)]
pub struct ScreenConfig {
    /// Its option ROM, for firmware.
    pub vga_bios: Option<Vec<u8>>,
}

/// What the devices are connected to.
#[derive(Debug)]
pub struct Wiring<'a> {
    /// The interrupt controllers and timers.
    pub irq: Arc<Interrupts>,
    /// The machine's time in nanoseconds.
    pub nanos: NanoClock,
    /// Serves the requests of devices to the machine: exit, reset, power-off.
    pub requests: Requests,
    /// Receives reports of requests that PCI devices have left for later.
    pub backlog: Backlog,
    /// Where guest memory lies.
    pub layout: &'a Layout,
    /// Number of processors.
    pub cpus: u16,
    /// The devices on the PCI bus.
    pub pci: PciDevices,
    /// The screen, if there is one.
    pub screen: Option<ScreenConfig>,
    /// The chip with the firmware's variables, if there is one. It ends where the firmware starts.
    pub flash: Option<Flash>,
}

/// The ports of the interrupt controllers and timers.
struct IrqPorts(Arc<Interrupts>);

impl Device for IrqPorts {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        for (port, byte) in (offset..).zip(data) {
            let port = u16::try_from(port).ok();
            *byte = port.and_then(|port| self.0.port_read(port)).unwrap_or(0xff);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (port, &byte) in (offset..).zip(data) {
            if let Ok(port) = u16::try_from(port) {
                self.0.port_write(port, byte);
            }
        }
    }
}

/// The I/O APIC's page.
struct IoapicPage(Arc<Interrupts>);

impl Device for IoapicPage {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        self.0.ioapic_read(offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.0.ioapic_write(offset, data);
    }
}

fn shared(device: impl Device + 'static) -> SharedDevice {
    Arc::new(Mutex::new(device))
}

fn locked<T>(device: T) -> Arc<Mutex<T>> {
    Arc::new(Mutex::new(device))
}

/// The keyboard controller; a keyboard comes with a screen.
fn keyboard(wiring: &Wiring<'_>, irq: IrqLine) -> I8042 {
    let requests = wiring.requests.clone();
    match wiring.screen {
        Some(_) => I8042::with_keyboard(requests, irq, wiring.layout.firmware().is_some()),
        None => I8042::new(requests),
    }
}

/// The screen, with video memory if there is a PCI bus.
fn screen(wiring: &Wiring<'_>) -> Option<Arc<Mutex<Vga>>> {
    wiring.screen.as_ref()?;
    let memory = wiring.pci.memory().zip(wiring.layout.video());
    Some(locked(
        memory.map_or_else(Vga::default, |(memory, base)| {
            Vga::with_memory(VideoMemory::new(memory.clone(), base))
        }),
    ))
}

/// The devices with a state to save, besides the interrupt controllers and timers.
#[derive(Clone, Debug)]
pub struct Devices {
    pub(crate) serial: Arc<Mutex<Serial>>,
    post_code: Arc<Mutex<PostCode>>,
    control_a: Arc<Mutex<ControlA>>,
    pub(super) keyboard: Arc<Mutex<I8042>>,
    acpi_pm: Arc<Mutex<AcpiPm>>,
    pci: Arc<Mutex<PciConfig>>,
    /// The PCI bus; `None` if it is empty.
    pub(super) pci_root: Option<SharedRoot>,
    pub(super) fp_error: Arc<Mutex<FpError>>,
    latch: Arc<Mutex<Latch>>,
    byte_latches: Arc<Mutex<ByteLatches>>,
    fw_cfg: Arc<Mutex<FwCfg>>,
    test_memory: Arc<Mutex<TestMemory>>,
    /// The screen's registers, if there is a screen.
    pub(super) vga: Option<Arc<Mutex<Vga>>>,
    /// The chip with the firmware's variables, if there is one.
    flash: Option<Arc<Mutex<Flash>>>,
    /// The state after the machine was built.
    first: Arc<OnceLock<DevicesState>>,
}

impl Devices {
    /// The devices after reset.
    fn new(wiring: &mut Wiring<'_>, sinks: Sinks) -> Self {
        let vga = screen(wiring);
        let display = vga.as_ref().and_then(|vga| {
            Some(PciDisplay {
                vga: vga.clone(),
                memory: lock(vga).memory()?.clone(),
                assigned: !wiring.pci.has_firmware(),
            })
        });
        let backlog = wiring.backlog.clone();
        let pci_root = wiring.pci.take_root(display, &wiring.irq, backlog);
        let flash = wiring.flash.take();
        let wiring = &*wiring;
        let requests = || wiring.requests.clone();
        let line = |number| {
            let irq = wiring.irq.clone();
            IrqLine::new(move |level| irq.set_irq(number, level))
        };
        Self {
            serial: locked(Serial::new(line(COM1_LINE), sinks.serial)),
            post_code: locked(PostCode::default()),
            control_a: locked(ControlA::new(requests())),
            keyboard: locked(keyboard(wiring, line(KEYBOARD_LINE))),
            acpi_pm: locked(AcpiPm::new(wiring.nanos.clone(), requests())),
            pci: locked(match &pci_root {
                Some(root) => PciConfig::with_root(requests(), root.clone()),
                None => PciConfig::new(requests()),
            }),
            pci_root,
            fp_error: locked(FpError::new(line(FP_ERROR_LINE))),
            latch: locked(Latch::default()),
            byte_latches: locked(ByteLatches::new(DebugCon::new(sinks.debugcon))),
            fw_cfg: locked(firmware_config(wiring)),
            test_memory: locked(TestMemory::default()),
            vga,
            flash: flash.map(locked),
            first: Arc::default(),
        }
    }

    /// Makes the present state that of [`Devices::reset`].
    fn set_first(&self) {
        self.first.get_or_init(|| self.save());
    }

    /// Applies a reset of the machine. Disks keep what was written to them.
    ///
    /// Interrupt lines may move: the interrupt controllers are reset afterwards.
    pub(crate) fn reset(&self) -> Result<(), DevicesError> {
        if let Some(root) = &self.pci_root {
            lock(root).reset();
        }
        if let Some(flash) = &self.flash {
            lock(flash).reset();
        }
        self.first
            .get()
            .map_or(Ok(()), |first| self.restore_chips(first))
    }

    /// The state, to be saved.
    pub(crate) fn save(&self) -> DevicesState {
        DevicesState {
            serial: lock(&self.serial).save(),
            post_code: *lock(&self.post_code),
            control_a: lock(&self.control_a).save(),
            keyboard: lock(&self.keyboard).save(),
            acpi_pm: lock(&self.acpi_pm).save(),
            pci: lock(&self.pci).save(),
            pci_root: self.pci_root.as_ref().map(|root| lock(root).save()),
            fp_error: lock(&self.fp_error).save(),
            latch: *lock(&self.latch),
            byte_latches: lock(&self.byte_latches).save(),
            fw_cfg: lock(&self.fw_cfg).save(),
            test_memory: lock(&self.test_memory).save(),
            vga: self.vga.as_ref().map(|vga| lock(vga).save()),
            flash: self.flash.as_ref().map(|flash| lock(flash).save()),
        }
    }

    /// Restores a state. Interrupt lines may move: the interrupt controllers are restored afterwards.
    pub(crate) fn restore(&self, state: &DevicesState) -> Result<(), DevicesError> {
        // Those that may fail come first.
        match (&self.pci_root, &state.pci_root) {
            (Some(root), Some(state)) => lock(root).restore(state)?,
            (None, None) => {}
            _ => return Err(VirtioStateError::OtherDevices.into()),
        }
        match (&self.flash, &state.flash) {
            (Some(flash), Some(state)) => lock(flash).restore(state)?,
            (None, None) => {}
            _ => return Err(FlashError::State.into()),
        }
        self.restore_chips(state)
    }

    /// Restores the devices that are not on the PCI bus.
    fn restore_chips(&self, state: &DevicesState) -> Result<(), DevicesError> {
        match (&self.vga, &state.vga) {
            (Some(vga), Some(state)) => lock(vga).restore(state)?,
            (None, None) => {}
            _ => return Err(VgaError.into()),
        }
        lock(&self.keyboard).restore(&state.keyboard)?;
        lock(&self.test_memory).restore(&state.test_memory)?;
        lock(&self.serial).restore(&state.serial)?;
        *lock(&self.post_code) = state.post_code;
        lock(&self.control_a).restore(state.control_a);
        lock(&self.acpi_pm).restore(&state.acpi_pm);
        lock(&self.pci).restore(&state.pci);
        lock(&self.fp_error).restore(state.fp_error);
        *lock(&self.latch) = state.latch;
        lock(&self.byte_latches).restore(state.byte_latches);
        lock(&self.fw_cfg).restore(&state.fw_cfg);
        Ok(())
    }
}

/// Builds the buses, and the devices on them.
pub(super) fn build(
    wiring: &mut Wiring<'_>,
    sinks: Sinks,
) -> Result<(PortBus, MmioBus, Devices), BusError> {
    let devices = Devices::new(wiring, sinks);
    devices.set_first();
    let mut ports = PortBus::new();
    let irq_ports = shared(IrqPorts(wiring.irq.clone()));
    for port in PORTS {
        ports.map_at(port, 1, port, irq_ports.clone())?;
    }
    ports.map(COM1_PORT, 8, devices.serial.clone())?;
    let debug_exit = shared(DebugExit::new(wiring.requests.clone()));
    ports.map(DEBUG_EXIT_PORT, DEBUG_EXIT_PORTS, debug_exit)?;
    ports.map(POST_CODE_PORT, 1, devices.post_code.clone())?;
    ports.map(CONTROL_A_PORT, 1, devices.control_a.clone())?;
    let keyboard = devices.keyboard.clone();
    ports.map(I8042_DATA_PORT, 1, keyboard.clone())?;
    ports.map_at(I8042_COMMAND_PORT, 1, I8042_COMMAND_OFFSET, keyboard)?;
    ports.map(PM_PORT, PM_PORTS, devices.acpi_pm.clone())?;
    ports.map(PCI_PORT, PCI_PORTS, devices.pci.clone())?;
    ports.map(FP_ERROR_PORT, 1, devices.fp_error.clone())?;
    ports.map(LATCH_PORT, LATCH_PORTS, devices.latch.clone())?;
    ports.map(BYTE_LATCH_PORT, LATCH_PORTS, devices.byte_latches.clone())?;
    let irq = wiring.irq.clone();
    let lines = LinePorts::new(move |line, level| irq.set_irq(u32::from(line), level));
    ports.map(LINE_PORT, LINES, shared(lines))?;
    if let Some(vga) = &devices.vga {
        ports.map(VGA_PORT, VGA_PORTS, vga.clone())?;
        ports.map_at(DISPI_PORT, DISPI_PORTS, DISPI_OFFSET, vga.clone())?;
    }
    ports.map(FW_CFG_PORT, FW_CFG_PORTS, devices.fw_cfg.clone())?;
    ports.map(BIOS_CALL_PORT, 1, shared(BiosCalls::default()))?;
    let firmware = wiring.layout.firmware().is_some();
    if firmware {
        let fw_cfg = devices.fw_cfg.clone();
        ports.map_at(FW_CFG_DMA_PORT, FW_CFG_DMA_PORTS, FW_CFG_DMA_OFFSET, fw_cfg)?;
        ports.map(FIRMWARE_LOG_PORT, 1, shared(FirmwareLog::default()))?;
        ports.map(PIIX4_PM_PORT, PM_PORTS, devices.acpi_pm.clone())?;
    }

    let mut mmio = MmioBus::new();
    mmio.map(IOAPIC_BASE, 0x1000, shared(IoapicPage(wiring.irq.clone())))?;
    if let (Some(flash), Some(code)) = (&devices.flash, wiring.layout.firmware()) {
        let size = lock(flash).size();
        let base = code.start.saturating_sub(size);
        mmio.map(base, size, flash.clone())?;
    }
    let test_memory = devices.test_memory.clone();
    mmio.map(TEST_MEMORY_BASE, TEST_MEMORY_LEN, test_memory)?;
    if let Some(root) = &devices.pci_root {
        let window = |base| {
            let root = root.clone();
            shared(PciWindow { root, base })
        };
        if firmware {
            let (base, end) = (FIRMWARE_WINDOW_BASE, FIRMWARE_WINDOW_END);
            mmio.map(base, end - base, window(base))?;
        } else {
            mmio.map(ECAM_BASE, ECAM_LEN, shared(Ecam(root.clone())))?;
            mmio.map(WINDOW_BASE, WINDOW_LEN, window(WINDOW_BASE))?;
        }
    }
    Ok((ports, mmio, devices))
}
