//! Guest-physical memory, as the machine offers it to the debugger.

use std::ops::Range;

/// How much [`PhysicalMemory::visit_data`] reads at a time by default, in bytes.
const VISIT_BYTES: usize = 1 << 20;

/// The RAM of a machine, by guest-physical address. Nothing in here may reach a device.
pub trait PhysicalMemory {
    /// The guest-physical ranges that are RAM: ascending, disjoint, and the same for the whole run.
    fn ram(&self) -> &[Range<u64>];

    /// Fills `buffer` from `gpa` on and returns how many bytes are RAM: fewer where RAM ends.
    fn read(&self, gpa: u64, buffer: &mut [u8]) -> usize;

    /// Calls `visit` with the address and the bytes of each piece of RAM that may hold data.
    ///
    /// Pieces ascend and start at multiples of 4 KiB. RAM that is left out is all zero. The default
    /// reads all RAM; a monitor that knows which pages its guest never touched should skip those, as
    /// reading them can allocate host memory.
    fn visit_data(&self, visit: &mut dyn FnMut(u64, &[u8])) {
        let mut buffer = vec![0; VISIT_BYTES];
        for range in self.ram() {
            let mut gpa = range.start;
            while gpa < range.end {
                let left = usize::try_from(range.end - gpa).unwrap_or(usize::MAX);
                let len = left.min(buffer.len());
                let count = self.read(gpa, &mut buffer[..len]);
                if count == 0 {
                    break;
                }
                visit(gpa, &buffer[..count]);
                gpa += count as u64;
            }
        }
    }
}

impl dyn PhysicalMemory + '_ {
    /// Fills `buffer` from `gpa` on; returns whether all of that is RAM.
    pub fn read_exact(&self, gpa: u64, buffer: &mut [u8]) -> bool {
        self.read(gpa, buffer) == buffer.len()
    }

    /// Whether `len` bytes at `gpa` are RAM.
    pub fn is_ram(&self, gpa: u64, len: u64) -> bool {
        let Some(end) = gpa.checked_add(len) else {
            return false;
        };
        let mut next = gpa;
        for range in self.ram() {
            if range.contains(&next) {
                next = range.end;
            }
        }
        next >= end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_ram::FlatRam;

    /// Two ranges that touch, and one apart from them.
    struct Ranges;

    impl PhysicalMemory for Ranges {
        fn ram(&self) -> &[Range<u64>] {
            const RAM: [Range<u64>; 3] = [0..0x1000, 0x1000..0x2000, 0x4000..0x5000];
            &RAM
        }

        fn read(&self, _: u64, buffer: &mut [u8]) -> usize {
            buffer.len()
        }
    }

    #[test]
    fn ranges_that_touch_are_one_piece_of_ram() {
        let memory: &dyn PhysicalMemory = &Ranges;
        assert!(memory.is_ram(0xfff, 0x1001));
        assert!(!memory.is_ram(0xfff, 0x1002));
        assert!(memory.is_ram(0x4fff, 1));
        assert!(!memory.is_ram(0x3000, 1));
        assert!(!memory.is_ram(u64::MAX, 1));
    }

    #[test]
    fn default_visit_reads_all_ram_once() {
        let memory = FlatRam::new((0..=255).cycle().take(VISIT_BYTES + 0x1000).collect());
        let mut bytes = Vec::new();
        memory.visit_data(&mut |gpa, part| {
            assert_eq!(gpa, bytes.len() as u64);
            bytes.extend_from_slice(part);
        });
        assert_eq!(bytes, memory.bytes);
    }
}
