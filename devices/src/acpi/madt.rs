//! The MADT: ACPI 6.3, "Multiple APIC Description Table (MADT)".

use hindsight_regs::apic::DEFAULT_BASE;

use super::{AcpiConfig, SCI_GSI, bytes, sdt};

const IO_APIC_ADDRESS: u32 = 0xfec0_0000;

const REVISION: u8 = 5;
/// Flag: the machine also has a pair of 8259A.
const PCAT_COMPAT: u32 = 1 << 0;

const LOCAL_APIC: u8 = 0;
const IO_APIC: u8 = 1;
const INTERRUPT_SOURCE_OVERRIDE: u8 = 2;
const LOCAL_APIC_NMI: u8 = 4;
const LOCAL_X2APIC: u8 = 9;
const LOCAL_X2APIC_NMI: u8 = 10;

const ENABLED: u32 = 1 << 0;
/// The largest APIC ID and processor UID of an 8-bit entry; 255 addresses all processors.
const XAPIC_ID_MAX: u32 = 254;
/// MPS INTI flags: active high, level-triggered.
const ACTIVE_HIGH_LEVEL: u16 = 0b1101;
/// MPS INTI flags: as the bus, which is active high and edge-triggered on ISA.
const CONFORMS_TO_BUS: u16 = 0;
const ISA_BUS: u8 = 0;
/// ISA interrupt of the timer.
const TIMER_IRQ: u8 = 0;
/// Input of the I/O APIC to which the timer is connected, as on every PC.
const TIMER_GSI: u8 = 2;
const NMI_LINT: u8 = 1;

pub fn build(config: &AcpiConfig) -> Vec<u8> {
    let mut table = sdt(*b"APIC", REVISION);
    table.append_slice(&DEFAULT_BASE.to_le_bytes()[..4]);
    table.append_slice(&PCAT_COMPAT.to_le_bytes());
    let mut has_x2apic_entry = false;
    for (uid, &id) in (0_u32..).zip(&config.apic_ids) {
        let entry = cpu(uid, id);
        has_x2apic_entry |= entry[0] == LOCAL_X2APIC;
        table.append_slice(&entry);
    }
    table.append_slice(&io_apic(config.io_apic_id));
    table.append_slice(&interrupt_override(TIMER_IRQ, TIMER_GSI, CONFORMS_TO_BUS));
    table.append_slice(&interrupt_override(SCI_GSI, SCI_GSI, ACTIVE_HIGH_LEVEL));
    table.append_slice(&[LOCAL_APIC_NMI, 6, 0xff, 0, 0, NMI_LINT]);
    if has_x2apic_entry {
        table.append_slice(&[
            LOCAL_X2APIC_NMI,
            12,
            0,
            0,
            0xff,
            0xff,
            0xff,
            0xff,
            NMI_LINT,
            0,
            0,
            0,
        ]);
    }
    bytes(&table)
}

/// The entry of a processor, with 8-bit numbers if both fit.
fn cpu(uid: u32, id: u32) -> Vec<u8> {
    if uid.max(id) <= XAPIC_ID_MAX {
        let mut entry = vec![LOCAL_APIC, 8, uid.to_le_bytes()[0], id.to_le_bytes()[0]];
        entry.extend(ENABLED.to_le_bytes());
        return entry;
    }
    let mut entry = vec![LOCAL_X2APIC, 16, 0, 0];
    entry.extend(id.to_le_bytes());
    entry.extend(ENABLED.to_le_bytes());
    entry.extend(uid.to_le_bytes());
    entry
}

fn io_apic(id: u8) -> Vec<u8> {
    let mut entry = vec![IO_APIC, 12, id, 0];
    entry.extend(IO_APIC_ADDRESS.to_le_bytes());
    entry.extend(0_u32.to_le_bytes());
    entry
}

fn interrupt_override(irq: u8, gsi: u8, flags: u16) -> Vec<u8> {
    let mut entry = vec![INTERRUPT_SOURCE_OVERRIDE, 10, ISA_BUS, irq];
    entry.extend(u32::from(gsi).to_le_bytes());
    entry.extend(flags.to_le_bytes());
    entry
}
