//! Translates linear addresses by the guest's page tables, without any effect on the guest.
//!
//! The walk follows the page tables as the processor does, but sets no accessed or dirty bits and
//! checks no rights: it is for debuggers and reports. SDM Vol. 3A, "Paging".
//!
//! Every function takes `read`, which fills its buffer from a guest-physical address and returns
//! whether all of that is RAM.

use hindsight_regs::cr::{Cr0, Cr4, Efer};

use crate::state::{CpuState, canonical};

const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The physical address behind `linear`; `None` if it is not mapped.
pub fn linear_to_physical(
    read: impl Fn(u64, &mut [u8]) -> bool,
    state: &CpuState,
    linear: u64,
) -> Option<u64> {
    if state.cr0 & Cr0::PG.bits() == 0 {
        return Some(linear & 0xffff_ffff);
    }
    let long = state.efer & Efer::LMA.bits() != 0;
    match (long, state.cr4 & Cr4::PAE.bits() != 0) {
        // The processor raises #GP or #SS.
        (true, _) if !canonical(linear) => None,
        (true, _) => walk(&read, state.cr3 & ADDRESS, linear, 4),
        (false, true) => {
            let table = state.cr3 & 0xffff_ffe0;
            let pdpte = read_entry(&read, table + 8 * (linear >> 30 & 3), 8)?;
            if pdpte & PRESENT == 0 {
                return None;
            }
            walk(&read, pdpte & ADDRESS, linear & 0xffff_ffff, 2)
        }
        (false, false) => walk_32(&read, state, linear & 0xffff_ffff),
    }
}

/// Whether the processor keeps page-directory-pointer entries: 32-bit code with PAE paging.
pub const fn has_pdptrs(state: &CpuState) -> bool {
    state.cr0 & Cr0::PG.bits() != 0
        && state.cr4 & Cr4::PAE.bits() != 0
        && state.efer & Efer::LMA.bits() == 0
}

/// The page-directory-pointer entries that MOV to CR3 loads with PAE paging.
///
/// `None` if they are not in RAM.
pub fn pdptrs(read: impl Fn(u64, &mut [u8]) -> bool, cr3: u64) -> Option<[u64; 4]> {
    let mut entries = [0; 4];
    for (address, entry) in (cr3 & 0xffff_ffe0..).step_by(8).zip(&mut entries) {
        *entry = read_entry(&read, address, 8)?;
    }
    Some(entries)
}

/// Up to `len` bytes at `linear`; fewer where the rest is not mapped or not RAM.
pub fn read_linear(
    read: impl Fn(u64, &mut [u8]) -> bool,
    state: &CpuState,
    linear: u64,
    len: usize,
) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let at = linear.wrapping_add(bytes.len() as u64);
        let Some(physical) = linear_to_physical(&read, state, at) else {
            break;
        };
        let in_page = usize::try_from(0x1000 - (at & 0xfff)).unwrap_or(1);
        let mut part = vec![0; in_page.min(len - bytes.len())];
        if !read(physical, &mut part) {
            break;
        }
        bytes.append(&mut part);
    }
    bytes
}

fn read_entry(read: &impl Fn(u64, &mut [u8]) -> bool, address: u64, len: usize) -> Option<u64> {
    let mut bytes = [0; 8];
    read(address, &mut bytes[..len]).then(|| u64::from_le_bytes(bytes))
}

/// Walks tables of 512 entries, from `level` down to 1.
fn walk(
    read: &impl Fn(u64, &mut [u8]) -> bool,
    mut table: u64,
    linear: u64,
    level: u32,
) -> Option<u64> {
    for level in (1..=level).rev() {
        let shift = 12 + 9 * (level - 1);
        let entry = read_entry(read, table + 8 * (linear >> shift & 0x1ff), 8)?;
        if entry & PRESENT == 0 {
            return None;
        }
        if level == 1 || (level < 4 && entry & LARGE != 0) {
            let offset = (1 << shift) - 1;
            return Some((entry & ADDRESS & !offset) | (linear & offset));
        }
        table = entry & ADDRESS;
    }
    None
}

/// Walks the two levels of 32-bit paging.
fn walk_32(read: &impl Fn(u64, &mut [u8]) -> bool, state: &CpuState, linear: u64) -> Option<u64> {
    let pde = read_entry(read, (state.cr3 & 0xffff_f000) + 4 * (linear >> 22), 4)?;
    if pde & PRESENT == 0 {
        return None;
    }
    if pde & LARGE != 0 && state.cr4 & Cr4::PSE.bits() != 0 {
        let high = (pde >> 13 & 0xff) << 32;
        return Some(high | (pde & 0xffc0_0000) | (linear & 0x3f_ffff));
    }
    let pte = read_entry(read, (pde & 0xffff_f000) + 4 * (linear >> 12 & 0x3ff), 4)?;
    (pte & PRESENT != 0).then_some((pte & 0xffff_f000) | (linear & 0xfff))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RAM from address 0.
    struct Ram(Vec<u8>);

    impl Ram {
        fn new() -> Self {
            Self(vec![0; 0x10_0000])
        }

        fn put(&mut self, at: usize, value: u64) {
            self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }

        fn read(&self, at: u64, buffer: &mut [u8]) -> bool {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            let bytes = self.0.get(at..at.saturating_add(buffer.len()));
            if let Some(bytes) = bytes {
                buffer.copy_from_slice(bytes);
            }
            bytes.is_some()
        }
    }

    #[test]
    fn four_level_walk_ends_at_a_large_page() {
        let mut ram = Ram::new();
        ram.put(0x1000, 0x2003);
        ram.put(0x2000, 0x3003);
        ram.put(0x3000 + 8, 0x40_0083);
        let mut state = CpuState::reset();
        (state.cr0, state.cr3, state.cr4, state.efer) = (0x8000_0011, 0x1000, 0x20, 0x500);
        let physical = |linear| linear_to_physical(|at, b| ram.read(at, b), &state, linear);
        assert_eq!(physical(0x20_1234), Some(0x40_1234));
        assert_eq!(physical(0x40_0000), None);
        for not_canonical in [1_u64 << 47, 1 << 63, 0xffff << 48] {
            assert_eq!(physical(0x20_1234 | not_canonical), None);
        }
    }

    #[test]
    fn pdptrs_are_those_that_a_load_of_cr3_reads() {
        let mut ram = Ram::new();
        ram.put(0x1018, 0x3001);
        ram.put(0x1020, 0x2001);
        let load = |cr3| pdptrs(|at, b| ram.read(at, b), cr3);
        assert_eq!(load(0x1018), Some([0, 0, 0, 0x3001]));
        assert_eq!(load(0x1020), Some([0x2001, 0, 0, 0]));
        assert_eq!(load(0xfff_ffe0), None);
    }

    #[test]
    fn two_level_walk_translates_32_bit_addresses() {
        let mut ram = Ram::new();
        ram.put(0x1004, 0x2003);
        ram.put(0x2008, 0x5003);
        let mut state = CpuState::reset();
        (state.cr0, state.cr3) = (0x8000_0011, 0x1000);
        let physical = linear_to_physical(|at, b| ram.read(at, b), &state, 0x40_2abc);
        assert_eq!(physical, Some(0x5abc));
    }

    #[test]
    fn linear_read_ends_where_ram_ends() {
        let ram = Ram::new();
        let read = |at: u64, buffer: &mut [u8]| ram.read(at, buffer);
        // The page is RAM, and the next one is not.
        assert_eq!(read_linear(read, &CpuState::reset(), 0xf_fffc, 15).len(), 4);
    }
}
