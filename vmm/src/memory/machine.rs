//! A machine's RAM, as the debugger and the reader of Linux's structures access it.

use std::fmt;
use std::ops::Range;

use hindsight_gdb::target::PhysicalMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::{nonzero_pages, offset_to_address};

/// The RAM of a machine.
pub struct MachineMemory {
    /// The regions.
    pub map: GuestMemoryMmap,
    ram: Vec<Range<u64>>,
}

impl fmt::Debug for MachineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MachineMemory")
            .field("ram", &self.ram)
            .finish_non_exhaustive()
    }
}

impl MachineMemory {
    /// The RAM in these regions.
    pub fn new(map: GuestMemoryMmap) -> Self {
        let range = |start: u64, len: u64| start..start + len;
        let ram = map.iter().map(|r| range(r.start_addr().0, r.len()));
        Self {
            ram: ram.collect(),
            map,
        }
    }
}

impl PhysicalMemory for MachineMemory {
    fn ram(&self) -> &[Range<u64>] {
        &self.ram
    }

    fn read(&self, gpa: u64, buffer: &mut [u8]) -> usize {
        self.map.read(buffer, GuestAddress(gpa)).unwrap_or(0)
    }

    fn visit_data(&self, visit: &mut dyn FnMut(u64, &[u8])) {
        let visited = nonzero_pages(&self.map, |offset, page| {
            if let Some(gpa) = offset_to_address(&self.map, offset) {
                visit(gpa, page);
            }
        });
        if let Err(error) = visited {
            tracing::warn!(target: "gdb", "guest memory cannot be searched: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory;

    #[test]
    fn visit_gives_guest_physical_addresses_of_touched_pages() {
        let ranges = [
            (GuestAddress(0), 0x10_0000),
            (GuestAddress(1 << 32), 0x2000),
        ];
        let memory = MachineMemory::new(memory::allocate(&ranges, false).unwrap());
        assert_eq!(memory.ram(), [0..0x10_0000, 1 << 32..(1 << 32) + 0x2000]);
        for at in [0x5008, (1 << 32) + 0x1000] {
            memory.map.write_obj(7_u8, GuestAddress(at)).unwrap();
        }
        let mut pages = Vec::new();
        memory.visit_data(&mut |gpa, _| pages.push(gpa));
        assert_eq!(pages, [0x5000, (1 << 32) + 0x1000]);
    }

    #[test]
    fn read_ends_where_ram_ends() {
        let map = memory::allocate(&[(GuestAddress(0), 0x10_0000)], false).unwrap();
        let memory = MachineMemory::new(map);
        assert_eq!(memory.read(0xf_fff0, &mut [0; 0x100]), 0x10);
        assert_eq!(memory.read(1 << 40, &mut [0; 0x100]), 0);
    }
}
