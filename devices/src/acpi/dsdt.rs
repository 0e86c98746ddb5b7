//! The DSDT: ACPI 6.3, "Differentiated System Description Table (DSDT)".

use acpi_tables::aml::{Device, EISAName, IO, Name, Package, Path, ResourceTemplate, Scope};
use acpi_tables::{Aml, AmlSink};

use super::{AcpiConfig, PciTables, bytes, pci, sdt};
use crate::acpi_pm::SLEEP_TYPE_S5;
use crate::i8042::{I8042_COMMAND_PORT, I8042_DATA_PORT};
use crate::serial::{COM1_IRQ, COM1_PORT};

/// The largest number of processors: their names have three hexadecimal digits.
pub const CPUS_MAX: usize = 0x1000;

/// Table revision: integers have 64 bits.
const REVISION: u8 = 2;
const RTC_PORT: u16 = 0x70;
const RTC_IRQ: u8 = 8;
const KEYBOARD_IRQ: u8 = 1;

pub fn build(config: &AcpiConfig) -> Vec<u8> {
    let com1 = isa_device("COM1", "PNP0501", &[[COM1_PORT, 8]], COM1_IRQ);
    let rtc = isa_device("RTC0", "PNP0B00", &[[RTC_PORT, 2]], RTC_IRQ);
    let ports = [[I8042_DATA_PORT, 1], [I8042_COMMAND_PORT, 1]];
    let keyboard = isa_device("KBD0", "PNP0303", &ports, KEYBOARD_IRQ);
    let cpus: Vec<Encoded> = (0..config.apic_ids.len()).map(processor).collect();
    let mut devices: Vec<&dyn Aml> = cpus.iter().map(|cpu| cpu as &dyn Aml).collect();
    devices.extend([&com1 as &dyn Aml, &rtc]);
    if config.screen {
        devices.push(&keyboard);
    }
    let bus = pci::window(config.pci).map(|window| Encoded(pci::bus(window)));
    devices.extend(bus.iter().map(|bus| bus as &dyn Aml));
    let resources = Encoded(pci::reserved());
    if config.pci == PciTables::Ecam {
        devices.push(&resources);
    }
    let sleep_type = SLEEP_TYPE_S5;
    let s5 = Package::new(vec![&sleep_type, &sleep_type, &0_u8, &0_u8]);
    let mut table = sdt(*b"DSDT", REVISION);
    table.append_slice(&bytes(&Name::new(Path::new("\\_S5_"), &s5)));
    table.append_slice(&bytes(&Scope::new(Path::new("\\_SB_"), devices)));
    bytes(&table)
}

/// An object in its encoded form.
struct Encoded(Vec<u8>);

impl Aml for Encoded {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}

/// An interrupt that is edge-triggered, active high and not shared.
///
/// Encoded as the short IRQ descriptor without flags, which every guest understands.
struct IsaIrq(u8);

impl Aml for IsaIrq {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.byte(0x22);
        sink.word(1 << self.0);
    }
}

fn processor(number: usize) -> Encoded {
    let uid = Name::new(Path::new("_UID"), &number);
    let hid = Name::new(Path::new("_HID"), &"ACPI0007");
    let path = Path::new(&format!("C{number:03X}"));
    Encoded(bytes(&Device::new(path, vec![&hid, &uid])))
}

/// A device with ranges of ports (`[first, count]`) and one interrupt.
fn isa_device(name: &str, id: &str, ports: &[[u16; 2]], irq: u8) -> Encoded {
    let hid = Name::new(Path::new("_HID"), &EISAName::new(id));
    let uid = Name::new(Path::new("_UID"), &0_u8);
    let range = |[first, count]: &[u16; 2]| IO::new(*first, *first, 0, count.to_le_bytes()[0]);
    let ranges: Vec<IO> = ports.iter().map(range).collect();
    let irq = IsaIrq(irq);
    let mut parts: Vec<&dyn Aml> = ranges.iter().map(|range| range as &dyn Aml).collect();
    parts.push(&irq);
    let resources = Name::new(Path::new("_CRS"), &ResourceTemplate::new(parts));
    Encoded(bytes(&Device::new(
        Path::new(name),
        vec![&hid, &uid, &resources],
    )))
}
