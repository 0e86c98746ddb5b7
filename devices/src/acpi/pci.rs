//! PCI in the tables: MCFG and the bus in the DSDT. PCI Firmware Specification 3.3, "MCFG Table
//! Description"; ACPI 6.3, "_PRT (PCI Routing Table)".

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Memory32Fixed, Name, Package, Path,
    ResourceTemplate,
};
use acpi_tables::{Aml, AmlSink};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, PciTables, bytes};
use crate::pci::{
    DEVICES_MAX, ECAM_BASE, ECAM_LEN, FIRMWARE_WINDOW_END, PCI_PORT, WINDOW_BASE, WINDOW_LEN,
    intx_gsi,
};

/// The low half of an address in the hole below 4 GiB.
const fn low(address: u64) -> u32 {
    (address & 0xffff_ffff) as u32
}

pub fn mcfg() -> Vec<u8> {
    let mut table = acpi_tables::mcfg::MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.add_ecam(ECAM_BASE, 0, 0, 0);
    bytes(&table)
}

/// One row of the routing table: INTA# of a slot.
struct Route(u8);

impl Aml for Route {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let address = u32::from(self.0) << 16 | 0xffff;
        let gsi = intx_gsi(self.0);
        // No link device: the pin is connected to the I/O APIC.
        Package::new(vec![&address, &0_u8, &0_u8, &gsi]).to_aml_bytes(sink);
    }
}

/// First and last address in which BARs lie; `None` without a bus.
pub fn window(pci: PciTables) -> Option<(u32, u32)> {
    match pci {
        PciTables::Absent => None,
        PciTables::Ecam => Some((low(WINDOW_BASE), low(WINDOW_BASE + WINDOW_LEN - 1))),
        PciTables::Firmware { window } => Some((window, low(FIRMWARE_WINDOW_END - 1))),
    }
}

/// The bus, with its windows and the routes of INTx. BARs lie from `first` to `last`.
pub fn bus((first, last): (u32, u32)) -> Vec<u8> {
    // Conventional PCI: there are no PCI Express features for which a guest would ask firmware.
    let hid = Name::new(Path::new("_HID"), &EISAName::new("PNP0A03"));
    let segment = Name::new(Path::new("_SEG"), &0_u8);
    let base_bus = Name::new(Path::new("_BBN"), &0_u8);
    let uid = Name::new(Path::new("_UID"), &0_u8);
    // DMA is coherent with the caches.
    let coherent = Name::new(Path::new("_CCA"), &1_u8);
    let buses = AddressSpace::new_bus_number(0_u16, 0_u16);
    let ports = IO::new(PCI_PORT, PCI_PORT, 1, 8);
    let (ports_below, ports_above) = (
        AddressSpace::new_io(0_u16, PCI_PORT - 1, None),
        AddressSpace::new_io(PCI_PORT + 8, 0xffff_u16, None),
    );
    let window =
        AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, first, last, None);
    let parts: Vec<&dyn Aml> = vec![&buses, &ports, &ports_below, &ports_above, &window];
    let resources = Name::new(Path::new("_CRS"), &ResourceTemplate::new(parts));
    let numbers = 1..=u8::try_from(DEVICES_MAX).unwrap_or(31);
    let routes: Vec<Route> = numbers.map(Route).collect();
    let routes = Package::new(routes.iter().map(|route| route as &dyn Aml).collect());
    let routing = Name::new(Path::new("_PRT"), &routes);
    let children: Vec<&dyn Aml> = vec![
        &hid, &segment, &base_bus, &uid, &coherent, &resources, &routing,
    ];
    bytes(&Device::new(Path::new("PCI0"), children))
}

/// The device that reserves the enhanced configuration space.
pub fn reserved() -> Vec<u8> {
    let hid = Name::new(Path::new("_HID"), &EISAName::new("PNP0C02"));
    let memory = Memory32Fixed::new(true, low(ECAM_BASE), low(ECAM_LEN));
    let resources = Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&memory]));
    bytes(&Device::new(Path::new("MRES"), vec![&hid, &resources]))
}
