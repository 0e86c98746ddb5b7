//! Writes the ACPI tables to guest memory.

use hindsight_devices::acpi::{self, AcpiConfig, AcpiError, PciTables};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::memory::layout::{Layout, LayoutError};

/// Why the ACPI tables cannot be written.
#[derive(Debug, Error)]
pub enum AcpiTablesError {
    /// This machine cannot have ACPI tables.
    #[error(transparent)]
    Build(#[from] AcpiError),
    /// The tables are outside of the ACPI area.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// There is no guest memory at the tables' address.
    #[error("guest memory does not extend to the ACPI tables at {0:#x}")]
    NoMemory(u64),
}

/// Writes the tables of a machine with `cpus` vCPUs, and with PCI devices if `pci`, and with a screen if `screen`. Returns `layout` with the tables added.
///
/// # Errors
///
/// The tables do not fit.
pub fn write_tables(
    memory: &GuestMemoryMmap,
    layout: Layout,
    cpus: usize,
    pci: bool,
    screen: bool,
) -> Result<Layout, AcpiTablesError> {
    let apic_ids: Vec<u32> = (0..).take(cpus).collect();
    let io_apic_id = u8::try_from(cpus).unwrap_or(u8::MAX);
    let acpi = acpi::build(&AcpiConfig {
        apic_ids,
        io_apic_id,
        pci: if pci {
            PciTables::Ecam
        } else {
            PciTables::Absent
        },
        screen,
    })?;
    let mut end = acpi.rsdp;
    for (address, bytes) in &acpi.tables {
        memory
            .write_slice(bytes, GuestAddress(*address))
            .map_err(|_| AcpiTablesError::NoMemory(*address))?;
        end = end.max(address + bytes.len() as u64);
    }
    Ok(layout.with_acpi(acpi.rsdp..end, acpi.rsdp)?)
}
