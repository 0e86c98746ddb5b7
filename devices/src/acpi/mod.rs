//! The ACPI tables that describe the machine: RSDP, RSDT, XSDT, FADT, FACS, MADT, DSDT and, with PCI
//! devices, MCFG.
//!
//! Follows ACPI 6.3, "ACPI Software Programming Model". The tables are in the BIOS area, where
//! guests search for the RSDP; equal configurations give equal bytes.

mod dsdt;
mod loader;
mod madt;
mod pci;

use acpi_tables::Aml;
use acpi_tables::fadt::{FADT, FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::sdt::Sdt;
use thiserror::Error;

use crate::acpi_pm::{PM_CONTROL_PORT, PM_PORT, PM_TIMER_PORT};
use crate::pci::{RESET_PORT, RESET_VALUE};

pub use loader::{LoaderFiles, loader_files};

/// Guest-physical address of the first table, the RSDP.
pub const ACPI_BASE: u32 = 0xe_0000;
/// The first guest-physical address after the area of the tables.
pub const ACPI_END: u32 = 0x10_0000;
/// Global system interrupt of the system control interrupt (SCI).
pub const SCI_GSI: u8 = 9;

const OEM_ID: [u8; 6] = *b"HDSGHT";
const OEM_TABLE_ID: [u8; 8] = *b"HINDSGHT";
const OEM_REVISION: u32 = 1;
/// Bytes of the header of every table but RSDP and FACS.
const HEADER_LEN: u32 = 36;
/// Bytes of the RSDP.
const RSDP_LEN: u32 = 36;

/// The configuration that the tables describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcpiConfig {
    /// The local APIC ID of each vCPU, the bootstrap processor first.
    pub apic_ids: Vec<u32>,
    /// The ID of the I/O APIC, whose inputs are GSI 0 to 23.
    pub io_apic_id: u8,
    /// There is a PCI bus with devices.
    pub pci: PciTables,
    /// There are a VGA and a keyboard.
    pub screen: bool,
}

/// How the tables describe the PCI bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PciTables {
    /// There is no bus.
    Absent,
    /// There is one, with ECAM and the window of the monitor's BARs.
    Ecam,
    /// There is one without ECAM, whose BARs firmware assigns from this address on.
    Firmware {
        /// First address of the window, which ends at the I/O APIC.
        window: u32,
    },
}

/// Tables that the VMM copies to guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcpiTables {
    /// Guest-physical address of the RSDP.
    pub rsdp: u64,
    /// Guest-physical address and bytes of each table, in ascending order.
    pub tables: Vec<(u64, Vec<u8>)>,
}

/// A configuration without valid tables.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcpiError {
    /// The machine has no vCPU.
    #[error("ACPI tables need at least one vCPU")]
    NoCpus,
    /// The tables do not fit into the area from 0xe0000 to 0xfffff.
    #[error("the ACPI tables of {0} vCPUs do not fit below 1 MiB")]
    TooManyCpus(usize),
}

/// Builds the tables for `config`.
///
/// # Errors
/// There is no vCPU, or the tables do not fit; those of 1024 vCPUs fit.
pub fn build(config: &AcpiConfig) -> Result<AcpiTables, AcpiError> {
    let cpus = cpu_count(config)?;
    let mut area = TableArea::new(ACPI_BASE, ACPI_END);
    // The RSDP is first but needs the addresses of the others, so its bytes are reserved.
    area.add(vec![0; RSDP_LEN as usize])
        .ok_or(AcpiError::TooManyCpus(cpus))?;
    let root = add_tables(&mut area, config).ok_or(AcpiError::TooManyCpus(cpus))?;
    area.tables[0].1 = rsdp(root.rsdt, root.xsdt);
    Ok(AcpiTables {
        rsdp: ACPI_BASE.into(),
        tables: area.tables,
    })
}

/// The number of processors, which must be possible.
fn cpu_count(config: &AcpiConfig) -> Result<usize, AcpiError> {
    match config.apic_ids.len() {
        0 => Err(AcpiError::NoCpus),
        cpus if cpus > dsdt::CPUS_MAX => Err(AcpiError::TooManyCpus(cpus)),
        cpus => Ok(cpus),
    }
}

/// The addresses of the two lists of tables.
struct RootTables {
    rsdt: u32,
    xsdt: u32,
}

fn add_tables(area: &mut TableArea, config: &AcpiConfig) -> Option<RootTables> {
    let facs = area.add(bytes(&acpi_tables::facs::FACS::new()))?;
    let dsdt = area.add(dsdt::build(config))?;
    let fadt = area.add(bytes(&fadt(facs, dsdt, config.screen)))?;
    let madt = area.add(madt::build(config))?;
    let mut tables = vec![fadt, madt];
    if config.pci == PciTables::Ecam {
        tables.push(area.add(pci::mcfg())?);
    }
    let mut rsdt = sdt(*b"RSDT", 1);
    let mut xsdt = sdt(*b"XSDT", 1);
    for table in tables {
        rsdt.append_slice(&table.to_le_bytes());
        xsdt.append_slice(&u64::from(table).to_le_bytes());
    }
    Some(RootTables {
        rsdt: area.add(bytes(&rsdt))?,
        xsdt: area.add(bytes(&xsdt))?,
    })
}

/// Tables in ascending order of addresses.
struct TableArea {
    tables: Vec<(u64, Vec<u8>)>,
    /// First free address.
    free: u32,
    end: u32,
}

impl TableArea {
    /// An empty area.
    fn new(base: u32, end: u32) -> Self {
        Self {
            tables: Vec::new(),
            free: base,
            end,
        }
    }

    /// Adds a table, and returns its address if it fits.
    ///
    /// Every table is aligned to 64 bytes, as the FACS must be.
    fn add(&mut self, table: Vec<u8>) -> Option<u32> {
        let address = self.free.checked_next_multiple_of(64)?;
        let end = address.checked_add(u32::try_from(table.len()).ok()?)?;
        if end > self.end {
            return None;
        }
        self.free = end;
        self.tables.push((address.into(), table));
        Some(address)
    }
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn sdt(signature: [u8; 4], revision: u8) -> Sdt {
    Sdt::new(
        signature,
        HEADER_LEN,
        revision,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    )
}

/// The byte that makes the sum of `bytes` zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes
        .iter()
        .fold(0, |sum: u8, byte| sum.wrapping_sub(*byte))
}

fn rsdp(rsdt: u32, xsdt: u32) -> Vec<u8> {
    let mut rsdp = Vec::with_capacity(RSDP_LEN as usize);
    rsdp.extend(b"RSD PTR ");
    rsdp.push(0);
    rsdp.extend(OEM_ID);
    rsdp.push(2);
    rsdp.extend(rsdt.to_le_bytes());
    rsdp.extend(RSDP_LEN.to_le_bytes());
    rsdp.extend(u64::from(xsdt).to_le_bytes());
    rsdp.extend([0; 4]);
    // The first sum covers the structure of ACPI 1.0, the second all of it.
    rsdp[8] = checksum(&rsdp[..20]);
    rsdp[32] = checksum(&rsdp);
    rsdp
}

/// FADT, "IA-PC Boot Architecture Flags": user-visible devices on the ISA bus.
const LEGACY_DEVICES: u16 = 1 << 0;
/// There is a keyboard controller. Without a keyboard the flag is clear, although the controller exists for
/// resets: a guest saves the time of probing for devices.
const HAS_8042: u16 = 1 << 1;
/// There is no VGA to probe for.
const VGA_NOT_PRESENT: u16 = 1 << 2;

/// Index of the CMOS byte with the century.
const CENTURY_INDEX: u8 = 0x32;
/// Latencies above 100 and 1000 microseconds: C2 and C3 do not exist.
const NO_C_STATE: u16 = 0xffff;

fn fadt(facs: u32, dsdt: u32, screen: bool) -> FADT {
    let io = |bits, access, port: u16| {
        GAS::new(AddressSpace::SystemIo, bits, 0, access, u64::from(port))
    };
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        // A set flag means that the fixed button or the RTC wake status does not exist.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::TmrValExt)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless);
    fadt.fadt_minor_version = 3;
    fadt.firmware_ctrl = facs.into();
    fadt.dsdt = dsdt.into();
    fadt.x_dsdt = u64::from(dsdt).into();
    fadt.sci_int = u16::from(SCI_GSI).into();
    fadt.pm1a_evt_blk = u32::from(PM_PORT).into();
    fadt.pm1a_cnt_blk = u32::from(PM_CONTROL_PORT).into();
    fadt.pm_tmr_blk = u32::from(PM_TIMER_PORT).into();
    fadt.pm1_evt_len = 4;
    fadt.pm1_cnt_len = 2;
    fadt.pm_tmr_len = 4;
    fadt.x_pm1a_evt_blk = io(32, AccessSize::WordAccess, PM_PORT);
    fadt.x_pm1a_cnt_blk = io(16, AccessSize::WordAccess, PM_CONTROL_PORT);
    fadt.x_pm_tmr_blk = io(32, AccessSize::DwordAccess, PM_TIMER_PORT);
    fadt.p_lvl2_lat = NO_C_STATE.into();
    fadt.p_lvl3_lat = NO_C_STATE.into();
    fadt.century = CENTURY_INDEX;
    let devices = if screen { HAS_8042 } else { VGA_NOT_PRESENT };
    fadt.iapc_boot_arch = (LEGACY_DEVICES | devices).into();
    fadt.reset_reg = io(8, AccessSize::ByteAccess, RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.finalize()
}

#[cfg(test)]
mod tests;
