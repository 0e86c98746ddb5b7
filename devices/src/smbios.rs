//! SMBIOS tables for firmware: the structures, and the entry point that describes them.
//!
//! DSP0134, "System Management BIOS Reference Specification" 2.8. Firmware loads both from files of
//! fw_cfg, sets the address of the structures, and adds its own BIOS information (type 0).

/// Name of the file with the entry point.
pub const ANCHOR_FILE: &str = "etc/smbios/smbios-anchor";
/// Name of the file with the structures.
pub const TABLES_FILE: &str = "etc/smbios/smbios-tables";

const SYSTEM: u8 = 1;
const CHASSIS: u8 = 3;
const PROCESSOR: u8 = 4;
const MEMORY_ARRAY: u8 = 16;
const MEMORY_DEVICE: u8 = 17;
const MEMORY_MAPPED: u8 = 19;
const BOOT_INFORMATION: u8 = 32;
const END: u8 = 127;

/// Bytes of the entry point.
const ANCHOR_LEN: u8 = 31;
/// A handle that refers to nothing.
const NO_HANDLE: u16 = 0xfffe;
/// Chassis and memory states: safe.
const SAFE: u8 = 3;
/// Values that are not known.
const UNKNOWN: u8 = 2;
/// Capacity of the memory array, in KiB, from which on the extended field has it, in bytes.
const EXTENDED_CAPACITY: u32 = 0x8000_0000;
/// Handle of the memory array; the others are the structures' types as high bytes.
const ARRAY_HANDLE: u16 = 0x1000;

/// What the tables describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmbiosConfig {
    /// Number of processors.
    pub cpus: u16,
    /// The ranges of RAM: first address, and bytes, not 0.
    pub memory: Vec<(u64, u64)>,
}

/// Returns the entry point and the structures.
pub fn build(config: &SmbiosConfig) -> (Vec<u8>, Vec<u8>) {
    let mut tables = Structures::default();
    tables.add(
        SYSTEM,
        0,
        &system(),
        &["Hindsight", "Virtual machine", env!("CARGO_PKG_VERSION")],
    );
    tables.add(CHASSIS, 0, &chassis(), &["Hindsight"]);
    for cpu in 0..config.cpus {
        tables.add(PROCESSOR, cpu, &processor(), &["CPU", "Hindsight"]);
    }
    let bytes = config.memory.iter().map(|&(_, len)| len).sum::<u64>();
    let kib = bytes >> 10;
    tables.add(MEMORY_ARRAY, 0, &memory_array(kib), &[]);
    tables.add(MEMORY_DEVICE, 0, &memory_device(kib), &["DIMM 0"]);
    for (index, &(base, len)) in (0..).zip(&config.memory) {
        tables.add(MEMORY_MAPPED, index, &memory_mapped(base, len), &[]);
    }
    tables.add(BOOT_INFORMATION, 0, &[0; 7], &[]);
    tables.add(END, 0, &[], &[]);
    (anchor(&tables), tables.bytes)
}

/// The structures, one after the other.
#[derive(Default)]
struct Structures {
    bytes: Vec<u8>,
    count: u16,
    longest: u16,
}

impl Structures {
    /// Adds a structure: its formatted area after the header, and its strings.
    fn add(&mut self, kind: u8, index: u16, body: &[u8], strings: &[&str]) {
        let start = self.bytes.len();
        let len = u8::try_from(body.len() + 4).unwrap_or(u8::MAX);
        self.bytes.extend([kind, len]);
        let handle = u16::from(kind) << 8 | index;
        self.bytes.extend(handle.to_le_bytes());
        self.bytes.extend(body);
        for text in strings {
            self.bytes.extend(text.as_bytes());
            self.bytes.push(0);
        }
        // An empty list of strings ends with two zeros.
        self.bytes.extend(if strings.is_empty() {
            &[0, 0][..]
        } else {
            &[0]
        });
        let len = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        self.longest = self.longest.max(len);
        self.count = self.count.saturating_add(1);
    }
}

fn system() -> Vec<u8> {
    // Manufacturer, product, version, no serial number, no UUID, woken by the power switch.
    let mut body = vec![1, 2, 3, 0];
    body.extend([0; 16]);
    body.extend([6, 0, 0]);
    body
}

fn chassis() -> Vec<u8> {
    // Kind "other", and no details: OEM word, height, cords, contained elements, SKU.
    let mut body = vec![1, 1, 0, 0, 0, SAFE, SAFE, SAFE, UNKNOWN];
    body.extend([0; 9]);
    body
}

fn processor() -> Vec<u8> {
    // Socket, central processor, other family, manufacturer; CPUID stays 0.
    let mut body = vec![1, 3, 1, 2];
    body.extend([0; 8]);
    // Version, voltage, three clocks; enabled and populated; upgrade "other".
    body.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x41, 1]);
    // No cache handles.
    body.extend([0xff; 6]);
    // Serial, asset and part numbers; one core, enabled, one thread; characteristics, family.
    body.extend([0, 0, 0, 1, 1, 1, 0, 0, 1, 0]);
    body
}

fn memory_array(kib: u64) -> Vec<u8> {
    // Location "other", system memory, multi-bit ECC.
    let mut body = vec![1, 3, 6];
    let (capacity, extended) = match u32::try_from(kib) {
        Ok(kib) if kib < EXTENDED_CAPACITY => (kib, 0),
        _ => (EXTENDED_CAPACITY, kib << 10),
    };
    body.extend(capacity.to_le_bytes());
    body.extend(NO_HANDLE.to_le_bytes());
    body.extend(1_u16.to_le_bytes());
    body.extend(extended.to_le_bytes());
    body
}

fn memory_device(kib: u64) -> Vec<u8> {
    let mib = kib >> 10;
    let (size, extended) = match u16::try_from(mib) {
        Ok(size) if size < 0x7fff => (size, 0),
        _ => (0x7fff, u32::try_from(mib).unwrap_or(u32::MAX)),
    };
    let mut body = ARRAY_HANDLE.to_le_bytes().to_vec();
    body.extend(NO_HANDLE.to_le_bytes());
    // Unknown widths.
    body.extend([0xff; 4]);
    body.extend(size.to_le_bytes());
    // A DIMM, no set, its name, no bank, memory of kind RAM.
    body.extend([9, 0, 1, 0, 7]);
    // Detail "unknown"; no speed, strings and rank.
    body.extend((1_u16 << 2).to_le_bytes());
    body.extend([0; 7]);
    body.extend(extended.to_le_bytes());
    body.extend([0; 8]);
    body
}

fn memory_mapped(base: u64, len: u64) -> Vec<u8> {
    let mut body = vec![0xff; 8];
    body.extend(ARRAY_HANDLE.to_le_bytes());
    body.push(1);
    body.extend(base.to_le_bytes());
    body.extend(base.saturating_add(len.saturating_sub(1)).to_le_bytes());
    body
}

/// The byte that makes the sum of `bytes` zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes
        .iter()
        .fold(0, |sum: u8, byte| sum.wrapping_sub(*byte))
}

fn anchor(tables: &Structures) -> Vec<u8> {
    let mut anchor = b"_SM_\0".to_vec();
    anchor.extend([ANCHOR_LEN, 2, 8]);
    anchor.extend(tables.longest.to_le_bytes());
    anchor.extend([0; 6]);
    anchor.extend(b"_DMI_\0");
    let len = u16::try_from(tables.bytes.len()).unwrap_or(u16::MAX);
    anchor.extend(len.to_le_bytes());
    anchor.extend([0; 4]);
    anchor.extend(tables.count.to_le_bytes());
    anchor.push(0x28);
    anchor[21] = checksum(&anchor[16..]);
    anchor[4] = checksum(&anchor);
    anchor
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build_for(memory: u64) -> (Vec<u8>, Vec<u8>) {
        build(&SmbiosConfig {
            cpus: 2,
            memory: vec![(0, memory)],
        })
    }

    /// Type and formatted area of each structure.
    fn structures(tables: &[u8]) -> Vec<(u8, &[u8])> {
        let mut rest = tables;
        let mut found = Vec::new();
        while let [kind, len, ..] = *rest {
            let (body, strings) = rest.split_at(len.into());
            found.push((kind, body));
            let end = strings.windows(2).position(|pair| pair == [0, 0]);
            rest = &strings[end.expect("the strings end") + 2..];
        }
        found
    }

    #[test]
    fn anchor_describes_the_structures() {
        let (anchor, tables) = build_for(1 << 30);
        let sum = |bytes: &[u8]| bytes.iter().fold(0, |sum: u8, b| sum.wrapping_add(*b));
        assert_eq!((anchor.len(), sum(&anchor), sum(&anchor[16..])), (31, 0, 0));
        let len = u16::from_le_bytes([anchor[22], anchor[23]]);
        assert_eq!(usize::from(len), tables.len());
        let count = u16::from_le_bytes([anchor[28], anchor[29]]);
        assert_eq!(usize::from(count), structures(&tables).len());
    }

    #[test]
    fn structures_have_the_lengths_of_version_2_8() {
        let (_, tables) = build_for(1 << 30);
        let lengths: Vec<_> = structures(&tables)
            .iter()
            .map(|(kind, body)| (*kind, body.len()))
            .collect();
        let expected = [
            (1, 0x1b),
            (3, 0x16),
            (4, 0x2a),
            (4, 0x2a),
            (16, 0x17),
            (17, 0x28),
            (19, 0x1f),
            (32, 0x0b),
            (127, 4),
        ];
        assert_eq!(lengths, expected);
    }

    #[test]
    fn memory_of_a_tebibyte_uses_the_extended_fields() {
        for (memory, size, extended) in [(1 << 30, 1024, 0), (1 << 40, 0x7fff, 1 << 20)] {
            let (_, tables) = build_for(memory);
            let all = structures(&tables);
            let (_, device) = all.iter().find(|(kind, _)| *kind == 17).unwrap();
            let found = u16::from_le_bytes([device[12], device[13]]);
            assert_eq!(found, size);
            let found = u32::from_le_bytes(device[28..32].try_into().unwrap());
            assert_eq!(found, extended);
        }
    }

    #[test]
    fn memory_array_of_two_tebibytes_uses_the_extended_field() {
        const TIB: u64 = 1 << 40;
        let rows = [
            (2 * TIB - 0x1000, 0x7fff_fffc, 0),
            (2 * TIB, 0x8000_0000, 2 * TIB),
            (5 * TIB, 0x8000_0000, 5 * TIB),
        ];
        for (memory, capacity, extended) in rows {
            let (_, tables) = build_for(memory);
            let all = structures(&tables);
            let (_, array) = all.iter().find(|(kind, _)| *kind == 16).unwrap();
            let found = u32::from_le_bytes(array[7..11].try_into().unwrap());
            assert_eq!(found, capacity, "{memory:#x}");
            let found = u64::from_le_bytes(array[15..23].try_into().unwrap());
            assert_eq!(found, extended, "{memory:#x}");
        }
    }

    #[test]
    fn each_range_of_memory_has_a_mapping() {
        const GIB: u64 = 1 << 30;
        let (_, tables) = build(&SmbiosConfig {
            cpus: 1,
            memory: vec![(0, 3 * GIB), (4 * GIB, GIB)],
        });
        let mappings: Vec<_> = structures(&tables)
            .into_iter()
            .filter(|(kind, _)| *kind == 19)
            .map(|(_, body)| {
                let word = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().unwrap());
                (body[2], word(15), word(23))
            })
            .collect();
        let expected = [(0, 0, 3 * GIB - 1), (1, 4 * GIB, 5 * GIB - 1)];
        assert_eq!(mappings, expected);
    }
}
