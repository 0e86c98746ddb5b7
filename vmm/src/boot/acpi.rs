//! Placing the ACPI tables in guest memory.

use hindsight_devices::acpi::{self, AcpiConfig, AcpiError};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::memory::layout::{Layout, LayoutError};

/// Why the tables could not be placed.
#[derive(Debug, Error)]
pub enum PlaceError {
    /// There are none for this machine.
    #[error(transparent)]
    Tables(#[from] AcpiError),
    /// They lie outside of their area.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// There is no memory where they belong.
    #[error("guest memory does not reach the ACPI tables at {0:#x}")]
    NoMemory(u64),
}

/// Writes the tables of a machine with `cpus` processors, and gives the layout that says where they
/// are.
///
/// # Errors
///
/// When the tables do not fit.
pub fn place(memory: &GuestMemoryMmap, layout: Layout, cpus: usize) -> Result<Layout, PlaceError> {
    let apic_ids: Vec<u32> = (0..).take(cpus).collect();
    let io_apic_id = u8::try_from(cpus).unwrap_or(u8::MAX);
    let acpi = acpi::build(&AcpiConfig {
        apic_ids,
        io_apic_id,
    })?;
    let mut end = acpi.rsdp;
    for (address, bytes) in &acpi.tables {
        memory
            .write_slice(bytes, GuestAddress(*address))
            .map_err(|_| PlaceError::NoMemory(*address))?;
        end = end.max(address + bytes.len() as u64);
    }
    Ok(layout.with_acpi(acpi.rsdp..end, acpi.rsdp)?)
}
