//! The ACPI tables that describe the machine: RSDP, RSDT, XSDT, FADT, FACS, MADT and DSDT.
//!
//! Follows ACPI 6.3, "ACPI Software Programming Model". The tables lie in the BIOS area, where
//! guests search for the RSDP; the same configuration always gives the same bytes.

mod dsdt;
mod madt;

use acpi_tables::Aml;
use acpi_tables::fadt::{FADT, FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::sdt::Sdt;
use thiserror::Error;

use crate::acpi_pm::{PM_CONTROL_PORT, PM_PORT, PM_TIMER_PORT};
use crate::pci::{RESET_PORT, RESET_VALUE};

/// Where the tables begin, with the RSDP.
pub const ACPI_BASE: u32 = 0xe_0000;
/// The first address after the area of the tables.
pub const ACPI_END: u32 = 0x10_0000;
/// The system control interrupt.
pub const SCI_GSI: u8 = 9;

const OEM_ID: [u8; 6] = *b"HDSGHT";
const OEM_TABLE_ID: [u8; 8] = *b"HINDSGHT";
const OEM_REVISION: u32 = 1;
/// Header of every table but RSDP and FACS.
const HEADER_LEN: u32 = 36;

/// What the tables depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcpiConfig {
    /// The local APIC id of each vCPU, the boot processor first.
    pub apic_ids: Vec<u32>,
    /// The id of the I/O APIC, whose inputs are GSI 0 to 23.
    pub io_apic_id: u8,
}

/// Tables to be placed in guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcpiTables {
    /// Guest-physical address of the RSDP.
    pub rsdp: u64,
    /// Guest-physical address and bytes of each table, in ascending order.
    pub tables: Vec<(u64, Vec<u8>)>,
}

/// Why there are no tables.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum AcpiError {
    /// A machine has at least one vCPU.
    #[error("ACPI tables need at least one vCPU")]
    NoCpus,
    /// More vCPUs than fit in the area from 0xe0000 to 0xfffff.
    #[error("the ACPI tables of {0} vCPUs do not fit below 1 MiB")]
    TooManyCpus(usize),
}

/// Builds the tables for `config`.
///
/// # Errors
/// No vCPU, or so many that the tables do not fit; 1024 do.
pub fn build(config: &AcpiConfig) -> Result<AcpiTables, AcpiError> {
    let cpus = config.apic_ids.len();
    if cpus == 0 {
        return Err(AcpiError::NoCpus);
    }
    if cpus > dsdt::CPUS_MAX {
        return Err(AcpiError::TooManyCpus(cpus));
    }
    let mut area = Area::default();
    // The RSDP points up, so its place is kept until the end.
    area.place(vec![0; 36])
        .ok_or(AcpiError::TooManyCpus(cpus))?;
    let root = place_tables(&mut area, config).ok_or(AcpiError::TooManyCpus(cpus))?;
    area.tables[0].1 = rsdp(root.rsdt, root.xsdt);
    Ok(AcpiTables {
        rsdp: ACPI_BASE.into(),
        tables: area.tables,
    })
}

/// Where the two lists of tables are.
struct Root {
    rsdt: u32,
    xsdt: u32,
}

fn place_tables(area: &mut Area, config: &AcpiConfig) -> Option<Root> {
    let facs = area.place(bytes(&acpi_tables::facs::FACS::new()))?;
    let dsdt = area.place(dsdt::build(config.apic_ids.len()))?;
    let fadt = area.place(bytes(&fadt(facs, dsdt)))?;
    let madt = area.place(madt::build(config))?;
    let mut rsdt = sdt(*b"RSDT", 1);
    rsdt.append_slice(&fadt.to_le_bytes());
    rsdt.append_slice(&madt.to_le_bytes());
    let mut xsdt = sdt(*b"XSDT", 1);
    xsdt.append_slice(&u64::from(fadt).to_le_bytes());
    xsdt.append_slice(&u64::from(madt).to_le_bytes());
    Some(Root {
        rsdt: area.place(bytes(&rsdt))?,
        xsdt: area.place(bytes(&xsdt))?,
    })
}

/// Tables placed one after the other.
#[derive(Default)]
struct Area {
    tables: Vec<(u64, Vec<u8>)>,
    used: u32,
}

impl Area {
    /// Places a table, and answers where if there was room. 64 is what the FACS must be aligned to.
    fn place(&mut self, table: Vec<u8>) -> Option<u32> {
        let address = ACPI_BASE.checked_add(self.used.next_multiple_of(64))?;
        let end = address.checked_add(u32::try_from(table.len()).ok()?)?;
        if end > ACPI_END {
            return None;
        }
        self.used = end - ACPI_BASE;
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

/// What, added to the sum of `bytes`, makes zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes
        .iter()
        .fold(0, |sum: u8, byte| sum.wrapping_sub(*byte))
}

fn rsdp(rsdt: u32, xsdt: u32) -> Vec<u8> {
    let mut rsdp = Vec::with_capacity(36);
    rsdp.extend(b"RSD PTR ");
    rsdp.push(0);
    rsdp.extend(OEM_ID);
    rsdp.push(2);
    rsdp.extend(rsdt.to_le_bytes());
    rsdp.extend(36_u32.to_le_bytes());
    rsdp.extend(u64::from(xsdt).to_le_bytes());
    rsdp.extend([0; 4]);
    // The first sum covers the structure of ACPI 1.0, the second all of it.
    rsdp[8] = checksum(&rsdp[..20]);
    rsdp[32] = checksum(&rsdp);
    rsdp
}

/// FADT, "IA-PC Boot Architecture Flags": user-visible devices on the ISA bus.
const LEGACY_DEVICES: u16 = 1 << 0;
/// There is no VGA to probe for. The flag for an 8042 stays clear, although the controller is
/// there for resets: with nothing plugged in, a guest saves the time of looking for devices.
const VGA_NOT_PRESENT: u16 = 1 << 2;

/// CMOS byte that holds the century.
const CENTURY_INDEX: u8 = 0x32;
/// Latencies above 100 and 1000 microseconds say that there is no C2 and no C3.
const NO_C_STATE: u16 = 0xffff;

fn fadt(facs: u32, dsdt: u32) -> FADT {
    let io = |bits, access, port: u16| {
        GAS::new(AddressSpace::SystemIo, bits, 0, access, u64::from(port))
    };
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        // Set means that the machine has no fixed button, and no RTC wake status.
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
    fadt.iapc_boot_arch = (LEGACY_DEVICES | VGA_NOT_PRESENT).into();
    fadt.reset_reg = io(8, AccessSize::ByteAccess, RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.finalize()
}

#[cfg(test)]
mod tests;
