//! Guest memory by linear address.

use std::ops::Range;

use hindsight_cpu::page_walk;
use hindsight_cpu::state::CpuState;

use crate::target::PhysicalMemory;

/// The part of an access that is contiguous in guest-physical memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPiece {
    /// Guest-physical address.
    pub gpa: u64,
    /// Which bytes of the access.
    pub range: Range<usize>,
}

/// Guest memory as a vCPU in a given state addresses it.
#[derive(Clone, Copy)]
pub struct LinearMemory<'a> {
    /// The machine's RAM.
    pub memory: &'a dyn PhysicalMemory,
    /// The vCPU's state.
    pub state: &'a CpuState,
}

impl std::fmt::Debug for LinearMemory<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinearMemory").finish_non_exhaustive()
    }
}

/// Bytes from an address to the end of its page.
fn page_rest(at: u64) -> usize {
    usize::try_from(0x1000 - (at & 0xfff)).unwrap_or(1)
}

impl LinearMemory<'_> {
    /// The guest-physical address behind a linear one; `None` if it is not mapped.
    pub fn translate(&self, linear: u64) -> Option<u64> {
        let read = |gpa: u64, buffer: &mut [u8]| self.memory.read_exact(gpa, buffer);
        page_walk::linear_to_physical(read, self.state, linear)
    }

    /// Up to `len` bytes at `linear`; fewer where the rest is not mapped or not RAM.
    pub fn read(&self, linear: u64, len: usize) -> Vec<u8> {
        let read = |gpa: u64, buffer: &mut [u8]| self.memory.read_exact(gpa, buffer);
        page_walk::read_linear(read, self.state, linear, len)
    }

    /// The page-directory-pointer entries that MOV of `cr3` to CR3 loads, where the vCPU keeps them.
    ///
    /// # Errors
    ///
    /// When they are not in RAM.
    pub fn load_pdptrs(&self, cr3: u64) -> Result<Option<[u64; 4]>, u64> {
        if !page_walk::has_pdptrs(self.state) {
            return Ok(None);
        }
        let read = |gpa: u64, buffer: &mut [u8]| self.memory.read_exact(gpa, buffer);
        page_walk::pdptrs(read, cr3).map(Some).ok_or(cr3)
    }

    /// The pieces of RAM behind a range of linear addresses; `None` if any byte is not RAM.
    pub fn pieces(&self, linear: u64, len: usize) -> Option<Vec<MemoryPiece>> {
        split(self.memory, linear, len, |linear| self.translate(linear))
    }
}

impl dyn PhysicalMemory + '_ {
    /// The pieces of RAM in a guest-physical range; `None` if any byte is not RAM.
    pub fn pieces(&self, gpa: u64, len: usize) -> Option<Vec<MemoryPiece>> {
        split(self, gpa, len, Some)
    }
}

fn split(
    memory: &dyn PhysicalMemory,
    at: u64,
    len: usize,
    translate: impl Fn(u64) -> Option<u64>,
) -> Option<Vec<MemoryPiece>> {
    let mut pieces: Vec<MemoryPiece> = Vec::new();
    let mut done = 0;
    while done < len {
        let next = at.wrapping_add(done as u64);
        let end = len.min(done + page_rest(next));
        let gpa = translate(next)?;
        if !memory.is_ram(gpa, (end - done) as u64) {
            return None;
        }
        match pieces.last_mut() {
            Some(last) if last.gpa + last.range.len() as u64 == gpa => last.range.end = end,
            _ => pieces.push(MemoryPiece {
                gpa,
                range: done..end,
            }),
        }
        done = end;
    }
    Some(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_ram::FlatRam;

    fn ram() -> FlatRam {
        FlatRam::new(vec![0; 0x10_0000])
    }

    #[test]
    fn range_beyond_the_end_of_ram_has_no_pieces() {
        let ram = ram();
        let memory: &dyn PhysicalMemory = &ram;
        assert!(memory.pieces(0xf_fffc, 4).is_some());
        assert!(memory.pieces(0xf_fffc, 5).is_none());
        assert!(memory.pieces(u64::MAX, 1).is_none());
    }

    #[test]
    fn range_across_pages_is_split_where_memory_is_not_contiguous() {
        let mut ram = ram();
        // The page at 0x1000 of 32-bit code is RAM at 0x8000, those at 0x2000 and 0x3000 follow it.
        ram.write(0x4000, &0x5003_u32.to_le_bytes());
        for (index, page) in [(1, 0x6003_u32), (2, 0x8003), (3, 0x9003)] {
            ram.write(0x5000 + 4 * index, &page.to_le_bytes());
        }
        let mut state = CpuState::reset();
        (state.cr0, state.cr3) = (0x8000_0011, 0x4000);
        let linear = LinearMemory {
            memory: &ram,
            state: &state,
        };
        let piece = |gpa, range| MemoryPiece { gpa, range };
        assert_eq!(
            linear.pieces(0x1ffe, 0x1004).unwrap(),
            [piece(0x6ffe, 0..2), piece(0x8000, 2..0x1004)]
        );
        assert!(linear.pieces(0x3ffe, 4).is_none(), "not mapped");
    }

    #[test]
    fn range_into_the_hole_of_canonical_addresses_has_no_pieces() {
        let mut ram = ram();
        // The last page below the hole is the one at 0, by tables of which each is the next one.
        for (table, index) in [(0x1000, 255), (0x2000, 511), (0x3000, 511)] {
            let next: u64 = table as u64 + 0x1000;
            ram.write(table + 8 * index, &(next | 3).to_le_bytes());
        }
        ram.write(0x4000 + 8 * 511, &3_u64.to_le_bytes());
        let mut state = CpuState::reset();
        (state.cr0, state.cr3, state.cr4, state.efer) = (0x8000_0011, 0x1000, 0x20, 0x500);
        let linear = LinearMemory {
            memory: &ram,
            state: &state,
        };
        let last = 0x0000_7fff_ffff_fffc;
        assert!(linear.pieces(last, 4).is_some());
        assert!(linear.pieces(last, 5).is_none());
        assert!(linear.pieces(last | 1 << 63, 4).is_none());
        assert_eq!(linear.read(last, 8).len(), 4);
    }
}
