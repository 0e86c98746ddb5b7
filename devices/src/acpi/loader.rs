//! The tables as firmware loads them: files of fw_cfg, and a script of QEMU's table loader.
//!
//! Firmware allocates memory for two files, the RSDP and all other tables, and then executes the
//! script: it adds the files' addresses to pointers, which are offsets before, and sets checksums.

use super::{AcpiConfig, AcpiError, TableArea, add_tables, cpu_count, rsdp};

/// Name of the file with the RSDP.
pub const RSDP_FILE: &str = "etc/acpi/rsdp";
/// Name of the file with the other tables.
pub const TABLES_FILE: &str = "etc/acpi/tables";
/// Name of the script.
pub const LOADER_FILE: &str = "etc/table-loader";

/// Most bytes of tables, as if they were in the BIOS area.
const TABLES_MAX: u32 = 0x2_0000;
/// Bytes of a command of the script.
const COMMAND_LEN: usize = 128;
/// Bytes of a file's name in it, with the terminating zero.
const NAME_LEN: usize = 56;
const ALLOCATE: u32 = 1;
const ADD_POINTER: u32 = 2;
const ADD_CHECKSUM: u32 = 3;
/// Zones of memory for [`ALLOCATE`]: anywhere below 4 GiB, and the segment of a BIOS.
const ZONE_HIGH: u8 = 1;
const ZONE_FSEG: u8 = 2;
/// Alignment of the tables, as the FACS needs it.
const TABLES_ALIGN: u32 = 64;
const RSDP_ALIGN: u32 = 16;

/// Offset of the checksum in a table's header.
const CHECKSUM: usize = 9;
/// Offsets and sizes of the FADT's pointers: FIRMWARE_CTRL, DSDT, X_DSDT.
const FADT_POINTERS: [(usize, u8); 3] = [(36, 4), (40, 4), (140, 8)];
/// Offsets and sizes of the RSDP's pointers: RSDT, XSDT.
const RSDP_POINTERS: [(usize, u8); 2] = [(16, 4), (24, 8)];
/// Offsets of the RSDP's checksums, and how many bytes they cover.
const RSDP_CHECKSUMS: [(usize, usize); 2] = [(8, 20), (32, 36)];
/// Offset of the first pointer of RSDT and XSDT.
const FIRST_ENTRY: usize = 36;

/// The files by which firmware loads the tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoaderFiles {
    /// Name and contents of each file.
    pub files: [(&'static str, Vec<u8>); 3],
}

/// Builds the files for `config`.
///
/// # Errors
/// As [`super::build`].
pub fn loader_files(config: &AcpiConfig) -> Result<LoaderFiles, AcpiError> {
    let cpus = cpu_count(config)?;
    let mut area = TableArea::new(0, TABLES_MAX);
    let roots = add_tables(&mut area, config).ok_or(AcpiError::TooManyCpus(cpus))?;
    let mut rsdp = rsdp(roots.rsdt, roots.xsdt);
    let mut tables = Vec::new();
    let mut script = Script::default();
    script.allocate(TABLES_FILE, TABLES_ALIGN, ZONE_HIGH);
    script.allocate(RSDP_FILE, RSDP_ALIGN, ZONE_FSEG);
    for (offset, table) in &area.tables {
        tables.resize(usize::try_from(*offset).unwrap_or(tables.len()), 0);
        let start = tables.len();
        tables.extend(table);
        let pointers = pointers(table);
        if pointers.is_empty() {
            continue;
        }
        for (at, size) in pointers {
            script.add_pointer(TABLES_FILE, start + at, size);
        }
        tables[start + CHECKSUM] = 0;
        script.add_checksum(TABLES_FILE, start + CHECKSUM, (start, table.len()));
    }
    for (at, size) in RSDP_POINTERS {
        script.add_pointer(RSDP_FILE, at, size);
    }
    for (at, len) in RSDP_CHECKSUMS {
        rsdp[at] = 0;
        script.add_checksum(RSDP_FILE, at, (0, len));
    }
    Ok(LoaderFiles {
        files: [
            (RSDP_FILE, rsdp),
            (TABLES_FILE, tables),
            (LOADER_FILE, script.0),
        ],
    })
}

/// Offsets and sizes of the pointers to other tables in a table.
fn pointers(table: &[u8]) -> Vec<(usize, u8)> {
    let entries = |size: u8| {
        let offsets = (FIRST_ENTRY..table.len()).step_by(size.into());
        offsets.map(|at| (at, size)).collect()
    };
    match table.first_chunk() {
        Some(b"FACP") => FADT_POINTERS.to_vec(),
        Some(b"RSDT") => entries(4),
        Some(b"XSDT") => entries(8),
        _ => Vec::new(),
    }
}

/// The commands of the script, of [`COMMAND_LEN`] bytes each.
#[derive(Default)]
struct Script(Vec<u8>);

impl Script {
    fn command(&mut self, command: u32, parts: &[&[u8]]) {
        let end = self.0.len() + COMMAND_LEN;
        self.0.extend(command.to_le_bytes());
        for part in parts {
            self.0.extend(*part);
        }
        debug_assert!(self.0.len() <= end, "the parts of a command fit");
        self.0.resize(end, 0);
    }

    fn allocate(&mut self, file: &str, align: u32, zone: u8) {
        self.command(ALLOCATE, &[&name(file), &align.to_le_bytes(), &[zone]]);
    }

    /// Adds the address of the tables to the pointer of `size` bytes in `file`.
    fn add_pointer(&mut self, file: &str, at: usize, size: u8) {
        let parts: [&[u8]; 4] = [&name(file), &name(TABLES_FILE), &number(at), &[size]];
        self.command(ADD_POINTER, &parts);
    }

    /// Sets the byte at `at` so that `len` bytes from `start` on have the sum 0.
    fn add_checksum(&mut self, file: &str, at: usize, (start, len): (usize, usize)) {
        let parts: [&[u8]; 4] = [&name(file), &number(at), &number(start), &number(len)];
        self.command(ADD_CHECKSUM, &parts);
    }
}

fn name(file: &str) -> [u8; NAME_LEN] {
    let mut name = [0; NAME_LEN];
    name[..file.len()].copy_from_slice(file.as_bytes());
    name
}

/// An offset or length in the files, which are smaller than [`TABLES_MAX`].
fn number(value: usize) -> [u8; 4] {
    u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acpi::PciTables;
    use std::collections::BTreeMap;

    const TABLES_AT: u64 = 0x1234_5000;

    fn field(command: &[u8], at: usize) -> usize {
        let bytes = command[at..at + 4].try_into().unwrap();
        usize::try_from(u32::from_le_bytes(bytes)).unwrap()
    }

    fn file_name(bytes: &[u8]) -> String {
        let end = bytes.iter().position(|&byte| byte == 0).unwrap();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes
            .iter()
            .fold(0, |sum: u8, byte| sum.wrapping_add(*byte))
    }

    /// Executes the script as firmware does, with the tables at [`TABLES_AT`].
    fn execute(files: &LoaderFiles) -> BTreeMap<String, Vec<u8>> {
        let mut loaded = BTreeMap::new();
        let contents = |name: &str| {
            let found = files.files.iter().find(|file| file.0 == name);
            found.unwrap().1.clone()
        };
        for command in contents(LOADER_FILE).chunks(COMMAND_LEN) {
            let file = file_name(&command[4..60]);
            match field(command, 0) {
                1 => {
                    loaded.insert(file.clone(), contents(&file));
                }
                2 => {
                    let (at, size) = (field(command, 116), usize::from(command[120]));
                    assert_eq!(file_name(&command[60..116]), TABLES_FILE);
                    let pointer = &mut loaded.get_mut(&file).unwrap()[at..at + size];
                    let mut value = [0; 8];
                    value[..size].copy_from_slice(pointer);
                    let value = u64::from_le_bytes(value) + TABLES_AT;
                    pointer.copy_from_slice(&value.to_le_bytes()[..size]);
                }
                3 => {
                    let (at, start) = (field(command, 60), field(command, 64));
                    let bytes = loaded.get_mut(&file).unwrap();
                    let sum = sum(&bytes[start..start + field(command, 68)]);
                    assert_eq!(bytes[at], 0);
                    bytes[at] = sum.wrapping_neg();
                }
                other => panic!("command {other}"),
            }
        }
        loaded
    }

    #[test]
    fn script_builds_tables_with_addresses_and_checksums() {
        let config = AcpiConfig {
            apic_ids: vec![0, 1],
            io_apic_id: 2,
            pci: PciTables::Firmware {
                window: 0x8000_0000,
            },
            screen: false,
        };
        let loaded = execute(&loader_files(&config).unwrap());
        let (rsdp, tables) = (&loaded[RSDP_FILE], &loaded[TABLES_FILE]);
        assert_eq!((sum(&rsdp[..20]), sum(rsdp)), (0, 0));
        let table = |pointer: &[u8]| {
            let mut address = [0; 8];
            address[..pointer.len()].copy_from_slice(pointer);
            let at = usize::try_from(u64::from_le_bytes(address) - TABLES_AT).unwrap();
            let len = field(tables, at + 4);
            &tables[at..at + len]
        };
        let (rsdt, xsdt) = (table(&rsdp[16..20]), table(&rsdp[24..32]));
        assert_eq!((&rsdt[..4], sum(rsdt)), (&b"RSDT"[..], 0));
        assert_eq!((&xsdt[..4], sum(xsdt)), (&b"XSDT"[..], 0));
        let signatures = |pointers: &[u8], size| {
            let tables = pointers.chunks(size).map(table);
            tables.map(|table| table[..4].to_vec()).collect::<Vec<_>>()
        };
        assert_eq!(signatures(&rsdt[36..], 4), signatures(&xsdt[36..], 8));
        assert_eq!(signatures(&rsdt[36..], 4), [b"FACP", b"APIC"]);
        let fadt = table(&rsdt[36..40]);
        assert_eq!(sum(fadt), 0);
        assert_eq!(&table(&fadt[36..40])[..4], b"FACS");
        assert_eq!(table(&fadt[40..44]), table(&fadt[140..148]));
        assert_eq!(
            (&table(&fadt[40..44])[..4], sum(table(&fadt[40..44]))),
            (&b"DSDT"[..], 0)
        );
    }

    #[test]
    fn impossible_configurations_are_refused() {
        let config = AcpiConfig {
            apic_ids: vec![],
            io_apic_id: 0,
            pci: PciTables::Absent,
            screen: false,
        };
        assert_eq!(loader_files(&config), Err(AcpiError::NoCpus));
    }
}
