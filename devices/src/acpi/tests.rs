use super::*;

fn config(cpus: u32) -> AcpiConfig {
    AcpiConfig {
        apic_ids: (0..cpus).collect(),
        io_apic_id: 0,
        pci: PciTables::Absent,
        screen: false,
    }
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

fn le(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn table_at(tables: &AcpiTables, address: u64) -> &[u8] {
    let found = tables.tables.iter().find(|(base, _)| *base == address);
    &found.expect("a table at the address").1
}

/// The table of this signature, found from the RSDP by the XSDT.
fn find(tables: &AcpiTables, signature: [u8; 4]) -> &[u8] {
    let xsdt = table_at(tables, le(&table_at(tables, tables.rsdp)[24..32]));
    let entries = xsdt[36..]
        .chunks(8)
        .map(|entry| table_at(tables, le(entry)));
    entries
        .into_iter()
        .find(|table| table[..4] == signature)
        .expect("a table of the signature")
}

fn dsdt(tables: &AcpiTables) -> &[u8] {
    table_at(tables, le(&find(tables, *b"FACP")[140..148]))
}

/// Type and bytes of each entry of the MADT.
fn madt_entries(tables: &AcpiTables) -> Vec<(u8, &[u8])> {
    let mut rest = &find(tables, *b"APIC")[44..];
    let mut entries = Vec::new();
    while let [entry_type, len, ..] = *rest {
        let (entry, after) = rest.split_at(usize::from(len));
        entries.push((entry_type, entry));
        rest = after;
    }
    entries
}

#[test]
fn tables_are_in_the_bios_area_without_overlap() {
    let built = build(&config(64)).unwrap();
    let mut free = u64::from(ACPI_BASE);
    for (address, table) in &built.tables {
        assert!(*address >= free, "{address:#x}");
        assert_eq!(address % 16, 0, "{address:#x}");
        free = address + table.len() as u64;
    }
    assert!(free <= u64::from(ACPI_END));
    assert_eq!(built.rsdp, 0xe_0000);
}

#[test]
fn every_table_has_its_checksum_and_length() {
    let built = build(&config(300)).unwrap();
    let rsdp = table_at(&built, built.rsdp);
    assert_eq!((sum(&rsdp[..20]), sum(rsdp), rsdp.len()), (0, 0, 36));
    for (address, table) in &built.tables[1..] {
        assert_eq!(le(&table[4..8]), table.len() as u64, "{address:#x}");
        let summed = &table[..4] == b"FACS" || sum(table) == 0;
        assert!(summed, "{address:#x}");
    }
}

#[test]
fn rsdt_and_xsdt_list_the_same_tables() {
    let built = build(&config(1)).unwrap();
    let rsdp = table_at(&built, built.rsdp);
    assert_eq!(&rsdp[..8], b"RSD PTR ");
    let rsdt = table_at(&built, le(&rsdp[16..20]));
    let xsdt = table_at(&built, le(&rsdp[24..32]));
    let short: Vec<u64> = rsdt[36..].chunks(4).map(le).collect();
    let long: Vec<u64> = xsdt[36..].chunks(8).map(le).collect();
    assert_eq!((short.len(), &short), (2, &long));
}

#[test]
fn fadt_contains_the_ports_of_the_devices() {
    let built = build(&config(1)).unwrap();
    let fadt = find(&built, *b"FACP");
    assert_eq!((fadt.len(), fadt[8], fadt[131]), (276, 6, 3));
    assert_eq!(&table_at(&built, le(&fadt[36..40]))[..4], b"FACS");
    assert_eq!(&table_at(&built, le(&fadt[40..44]))[..4], b"DSDT");
    assert_eq!(le(&fadt[46..48]), 9);
    assert_eq!(
        le(&fadt[48..52]),
        0,
        "no SMI command port: always in ACPI mode"
    );
    assert_eq!((le(&fadt[56..60]), fadt[88]), (0x600, 4));
    assert_eq!((le(&fadt[64..68]), fadt[89]), (0x604, 2));
    assert_eq!((le(&fadt[76..80]), fadt[91]), (0x608, 4));
    assert_eq!(le(&fadt[109..111]), 0b101);
    assert_eq!(le(&fadt[112..116]), 0x1575);
    assert_eq!(
        fadt[116..129],
        [1, 8, 0, 1, 0xf9, 0x0c, 0, 0, 0, 0, 0, 0, 6]
    );
    assert_eq!(fadt[148..160], [1, 32, 0, 2, 0, 6, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn madt_lists_processors_io_apic_and_overrides() {
    let built = build(&AcpiConfig {
        apic_ids: vec![0, 2],
        io_apic_id: 3,
        pci: PciTables::Absent,
        screen: false,
    })
    .unwrap();
    let expected: [(u8, &[u8]); 6] = [
        (0, &[0, 8, 0, 0, 1, 0, 0, 0]),
        (0, &[0, 8, 1, 2, 1, 0, 0, 0]),
        (1, &[1, 12, 3, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0]),
        (2, &[2, 10, 0, 0, 2, 0, 0, 0, 0, 0]),
        (2, &[2, 10, 0, 9, 9, 0, 0, 0, 0x0d, 0]),
        (4, &[4, 6, 0xff, 0, 0, 1]),
    ];
    assert_eq!(madt_entries(&built), expected);
    let madt = find(&built, *b"APIC");
    assert_eq!((le(&madt[36..40]), le(&madt[40..44])), (0xfee0_0000, 1));
}

#[test]
fn madt_uses_x2apic_entries_from_id_255() {
    let built = build(&AcpiConfig {
        apic_ids: vec![0, 254, 255],
        io_apic_id: 0,
        pci: PciTables::Absent,
        screen: false,
    })
    .unwrap();
    let entries = madt_entries(&built);
    assert_eq!((entries[1].0, entries[1].1[3]), (0, 254));
    assert_eq!(
        entries[2].1,
        [9, 16, 0, 0, 255, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]
    );
    assert_eq!(entries.last().unwrap().0, 10);
}

#[test]
fn dsdt_has_soft_off_and_one_device_per_processor() {
    let built = build(&config(17)).unwrap();
    let aml = dsdt(&built);
    let has = |needle: &[u8]| aml.windows(needle.len()).any(|window| window == needle);
    assert!(has(b"\x08\\_S5_\x12\x08\x04\x0a\x05\x0a\x05\x00\x00"));
    assert!(has(b"C000\x08_HID\x0dACPI0007\0"));
    assert!(has(b"C010\x08_HID\x0dACPI0007\0\x08_UID\x0a\x10"));
    assert!(!has(b"C011"));
    assert!(has(b"COM1"));
    assert!(has(&[
        0x47, 1, 0xf8, 3, 0xf8, 3, 0, 8, 0x22, 0x10, 0, 0x79, 0
    ]));
    assert!(has(&[0x47, 1, 0x70, 0, 0x70, 0, 0, 2, 0x22, 0, 1, 0x79, 0]));
}

#[test]
fn screen_comes_with_a_keyboard() {
    let keyboard = [
        0x47, 1, 0x60, 0, 0x60, 0, 0, 1, 0x47, 1, 0x64, 0, 0x64, 0, 0, 1, 0x22, 2, 0,
    ];
    for (screen, flags) in [(false, 0b101), (true, 0b011)] {
        let config = AcpiConfig {
            screen,
            ..config(1)
        };
        let built = build(&config).unwrap();
        assert_eq!(le(&find(&built, *b"FACP")[109..111]), flags);
        let aml = dsdt(&built);
        let found = aml.windows(keyboard.len()).any(|part| part == keyboard);
        assert_eq!(found, screen);
    }
}

#[test]
fn pci_bus_has_a_window_routes_and_ecam() {
    let built = build(&AcpiConfig {
        pci: PciTables::Ecam,
        ..config(1)
    })
    .unwrap();
    let mcfg = find(&built, *b"MCFG");
    assert_eq!(le(&mcfg[44..52]), 0xe000_0000);
    assert_eq!(mcfg[52..56], [0, 0, 0, 0], "segment 0, bus 0");
    let aml = dsdt(&built);
    let has = |needle: &[u8]| aml.windows(needle.len()).any(|window| window == needle);
    assert!(has(b"PCI0"));
    // Slot 3: INTA# is GSI 19.
    assert!(has(&[0x0c, 0xff, 0xff, 3, 0, 0, 0, 0x0a, 19]));
    // The reserved configuration space.
    assert!(has(&[0x86, 9, 0, 1, 0, 0, 0, 0xe0, 0, 0, 0x10, 0]));
    assert!(
        !dsdt(&build(&config(1)).unwrap())
            .windows(4)
            .any(|w| w == b"PCI0")
    );
}

#[test]
fn equal_configurations_give_equal_bytes() {
    assert_eq!(build(&config(8)), build(&config(8)));
    assert_ne!(build(&config(8)), build(&config(9)));
}

#[test]
fn build_rejects_invalid_processor_counts() {
    assert_eq!(build(&config(0)), Err(AcpiError::NoCpus));
    assert!(build(&config(1024)).is_ok());
    assert_eq!(build(&config(4096)), Err(AcpiError::TooManyCpus(4096)));
    assert_eq!(build(&config(5000)), Err(AcpiError::TooManyCpus(5000)));
}

#[test]
#[ignore = "writes each table to a file of the folder ACPI_DUMP, for iasl -d: \
            ACPI_DUMP=DIR cargo test -p hindsight-devices dump -- --ignored"]
fn dump_writes_each_table_to_a_file() {
    let dir = std::path::PathBuf::from(std::env::var("ACPI_DUMP").expect("ACPI_DUMP is set"));
    let config = AcpiConfig {
        pci: PciTables::Ecam,
        ..config(2)
    };
    for (_, table) in &build(&config).unwrap().tables {
        let name = String::from_utf8_lossy(&table[..4]).into_owned();
        std::fs::write(dir.join(name + ".dat"), table).unwrap();
    }
}
