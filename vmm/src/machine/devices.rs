//! The board's devices, and where they sit.

use std::fmt;
use std::io::Write;
use std::sync::{Arc, Mutex};

use hindsight_devices::acpi_pm::{AcpiPm, PM_PORT, PM_PORTS};
use hindsight_devices::debug_exit::{DEBUG_EXIT_PORT, DEBUG_EXIT_PORTS, DebugExit};
use hindsight_devices::debugcon::DebugCon;
use hindsight_devices::fw_cfg::{self, FW_CFG_PORT, FW_CFG_PORTS, FwCfg};
use hindsight_devices::i8042::{I8042, I8042_COMMAND_OFFSET, I8042_COMMAND_PORT, I8042_DATA_PORT};
use hindsight_devices::irq::{Interrupts, PORTS};
use hindsight_devices::legacy::{CONTROL_A_PORT, ControlA, POST_CODE_PORT, PostCode};
use hindsight_devices::pci::{PCI_PORT, PCI_PORTS, PciConfig};
use hindsight_devices::serial::Serial;
use hindsight_devices::test_device::{
    BYTE_LATCH_PORT, ByteLatches, LATCH_PORT, LATCH_PORTS, LINE_PORT, LINES, Latch, LinePorts,
    TEST_MEMORY_BASE, TEST_MEMORY_LEN, TestMemory,
};
use hindsight_devices::{
    BusError, Device, IrqLine, MmioBus, NanoClock, PortBus, Requests, SharedDevice,
};

use crate::layout::Layout;

/// COM1: ports and ISA line.
const COM1_PORT: u16 = 0x3f8;
const COM1_LINE: u32 = 4;
/// The I/O APIC's page.
pub(super) const IOAPIC_BASE: u64 = 0xfec0_0000;

/// Where the guest's consoles write to.
pub struct Sinks {
    /// COM1.
    pub serial: Box<dyn Write + Send>,
    /// The debug console, port 0xe9.
    pub debugcon: Box<dyn Write + Send>,
    /// The bus that branch trace messages are sent to, if anybody listens.
    pub messages: Option<Box<dyn Write + Send>>,
}

impl fmt::Debug for Sinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sinks")
    }
}

/// What the devices are connected to.
pub(super) struct Wiring<'a> {
    pub(super) irq: &'a Arc<Interrupts>,
    pub(super) nanos: NanoClock,
    pub(super) requests: Requests,
    pub(super) layout: &'a Layout,
    pub(super) cpus: u16,
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

/// Builds the buses. The serial port is given back for its input.
pub(super) fn build(
    wiring: &Wiring<'_>,
    sinks: Sinks,
) -> Result<(PortBus, MmioBus, Arc<Mutex<Serial>>), BusError> {
    let mut ports = PortBus::new();
    let irq_ports = shared(IrqPorts(wiring.irq.clone()));
    for port in PORTS {
        ports.map_at(port, 1, port, irq_ports.clone())?;
    }
    let line = |line: u32| {
        let irq = wiring.irq.clone();
        IrqLine::new(move |level| irq.set_irq(line, level))
    };
    let serial = Arc::new(Mutex::new(Serial::new(line(COM1_LINE), sinks.serial)));
    ports.map(COM1_PORT, 8, serial.clone())?;
    let requests = || wiring.requests.clone();
    ports.map(
        DEBUG_EXIT_PORT,
        DEBUG_EXIT_PORTS,
        shared(DebugExit::new(requests())),
    )?;
    ports.map(POST_CODE_PORT, 1, shared(PostCode::default()))?;
    ports.map(CONTROL_A_PORT, 1, shared(ControlA::new(requests())))?;
    let keyboard = shared(I8042::new(requests()));
    ports.map(I8042_DATA_PORT, 1, keyboard.clone())?;
    ports.map_at(I8042_COMMAND_PORT, 1, I8042_COMMAND_OFFSET, keyboard)?;
    ports.map(
        PM_PORT,
        PM_PORTS,
        shared(AcpiPm::new(wiring.nanos.clone(), requests())),
    )?;
    ports.map(PCI_PORT, PCI_PORTS, shared(PciConfig::new(requests())))?;
    ports.map(LATCH_PORT, LATCH_PORTS, shared(Latch::default()))?;
    let byte_latches = ByteLatches::new(DebugCon::new(sinks.debugcon));
    ports.map(BYTE_LATCH_PORT, LATCH_PORTS, shared(byte_latches))?;
    let irq = wiring.irq.clone();
    let lines = LinePorts::new(move |line, level| irq.set_irq(u32::from(line), level));
    ports.map(LINE_PORT, LINES, shared(lines))?;
    ports.map(FW_CFG_PORT, FW_CFG_PORTS, shared(firmware_config(wiring)))?;

    let mut mmio = MmioBus::new();
    mmio.map(IOAPIC_BASE, 0x1000, shared(IoapicPage(wiring.irq.clone())))?;
    mmio.map(
        TEST_MEMORY_BASE,
        TEST_MEMORY_LEN,
        shared(TestMemory::default()),
    )?;
    Ok((ports, mmio, serial))
}

fn firmware_config(wiring: &Wiring<'_>) -> FwCfg {
    let mut fw_cfg = FwCfg::new(wiring.cpus, wiring.layout.memory());
    let map = wiring.layout.memory_map();
    let e820 = fw_cfg::e820_file(map.iter().map(|e| (e.base, e.size, e.kind as u32)));
    fw_cfg
        .add_file("etc/e820", e820)
        .expect("a good name, once, of a few hundred bytes");
    fw_cfg
}
