//! Reading guest memory by linear address, without any effect on the guest.
//!
//! Walks the page tables as the processor would but sets no accessed or dirty bits and checks no
//! rights. SDM Vol. 3A, "Paging".

use hindsight_cpu::state::{CpuState, canonical};
use hindsight_regs::cr::Cr4;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The physical address behind `linear`, if it is mapped.
pub fn linear_to_physical(memory: &GuestMemoryMmap, state: &CpuState, linear: u64) -> Option<u64> {
    if !state.has_paging() {
        return Some(linear & 0xffff_ffff);
    }
    let long = state.is_long_mode();
    match (long, state.cr4 & Cr4::PAE.bits() != 0) {
        // The processor raises #GP or #SS.
        (true, _) if !canonical(linear) => None,
        (true, _) => walk(memory, state.cr3 & ADDRESS, linear, 4),
        (false, true) => {
            let entry = state.cr3 & 0xffff_ffe0;
            let pdpte = read(memory, entry + 8 * (linear >> 30 & 3), 8)?;
            let present = pdpte & PRESENT != 0;
            if present {
                walk(memory, pdpte & ADDRESS, linear & 0xffff_ffff, 2)
            } else {
                None
            }
        }
        (false, false) => walk_32(memory, state, linear & 0xffff_ffff),
    }
}

/// Whether the processor keeps page-directory-pointer entries: 32-bit code with PAE paging.
pub const fn has_pdptrs(state: &CpuState) -> bool {
    state.has_pae_paging()
}

/// The page-directory-pointer entries that MOV to CR3 loads with PAE paging; `None` if they are not in memory.
pub fn pdptrs(memory: &GuestMemoryMmap, cr3: u64) -> Option<[u64; 4]> {
    let mut entries = [0; 4];
    for (address, entry) in (cr3 & 0xffff_ffe0..).step_by(8).zip(&mut entries) {
        *entry = read(memory, address, 8)?;
    }
    Some(entries)
}

fn read(memory: &GuestMemoryMmap, address: u64, len: usize) -> Option<u64> {
    let mut bytes = [0; 8];
    memory
        .read_slice(&mut bytes[..len], GuestAddress(address))
        .ok()?;
    Some(u64::from_le_bytes(bytes))
}

/// Tables of 512 entries, from `level` down to 1.
fn walk(memory: &GuestMemoryMmap, table: u64, linear: u64, level: u32) -> Option<u64> {
    let mut table = table;
    for level in (1..=level).rev() {
        let shift = 12 + 9 * (level - 1);
        let entry = read(memory, table + 8 * (linear >> shift & 0x1ff), 8)?;
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

fn walk_32(memory: &GuestMemoryMmap, state: &CpuState, linear: u64) -> Option<u64> {
    let pde = read(memory, (state.cr3 & 0xffff_f000) + 4 * (linear >> 22), 4)?;
    if pde & PRESENT == 0 {
        return None;
    }
    if pde & LARGE != 0 && state.cr4 & 1 << 4 != 0 {
        let high = (pde >> 13 & 0xff) << 32;
        return Some(high | (pde & 0xffc0_0000) | (linear & 0x3f_ffff));
    }
    let pte = read(memory, (pde & 0xffff_f000) + 4 * (linear >> 12 & 0x3ff), 4)?;
    (pte & PRESENT != 0).then_some((pte & 0xffff_f000) | (linear & 0xfff))
}

/// Up to `len` bytes at `linear`; fewer where the rest is not mapped or not memory.
pub fn read_linear(memory: &GuestMemoryMmap, state: &CpuState, linear: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let at = linear.wrapping_add(bytes.len() as u64);
        let Some(physical) = linear_to_physical(memory, state, at) else {
            break;
        };
        let in_page = usize::try_from(0x1000 - (at & 0xfff)).unwrap_or(1);
        let mut part = vec![0; in_page.min(len - bytes.len())];
        if memory
            .read_slice(&mut part, GuestAddress(physical))
            .is_err()
        {
            break;
        }
        bytes.append(&mut part);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> GuestMemoryMmap {
        crate::memory::allocate(&[(vm_memory::GuestAddress(0), 0x10_0000)], false).unwrap()
    }

    fn put(memory: &GuestMemoryMmap, address: u64, value: u64) {
        memory.write_obj(value, GuestAddress(address)).unwrap();
    }

    #[test]
    fn four_levels_with_a_large_page() {
        let memory = memory();
        put(&memory, 0x1000, 0x2003);
        put(&memory, 0x2000, 0x3003);
        put(&memory, 0x3000 + 8, 0x40_0083);
        let mut state = CpuState::reset();
        (state.cr0, state.cr3, state.cr4, state.efer) = (0x8000_0011, 0x1000, 0x20, 0x500);
        assert_eq!(
            linear_to_physical(&memory, &state, 0x20_1234),
            Some(0x40_1234)
        );
        assert_eq!(linear_to_physical(&memory, &state, 0x40_0000), None);
        for not_canonical in [1_u64 << 47, 1 << 63, 0xffff << 48] {
            let linear = 0x20_1234 | not_canonical;
            assert_eq!(linear_to_physical(&memory, &state, linear), None);
        }
    }

    #[test]
    fn entries_that_a_load_of_cr3_takes() {
        let memory = memory();
        put(&memory, 0x1018, 0x3001);
        put(&memory, 0x1020, 0x2001);
        assert_eq!(pdptrs(&memory, 0x1018), Some([0, 0, 0, 0x3001]));
        assert_eq!(pdptrs(&memory, 0x1020), Some([0x2001, 0, 0, 0]));
        assert_eq!(pdptrs(&memory, 0xfff_ffe0), None);
    }

    #[test]
    fn two_levels_of_32_bit_paging() {
        let memory = memory();
        memory.write_obj(0x2003_u32, GuestAddress(0x1004)).unwrap();
        memory.write_obj(0x5003_u32, GuestAddress(0x2008)).unwrap();
        let mut state = CpuState::reset();
        (state.cr0, state.cr3) = (0x8000_0011, 0x1000);
        assert_eq!(linear_to_physical(&memory, &state, 0x40_2abc), Some(0x5abc));
    }

    #[test]
    fn read_stops_at_the_end_of_memory() {
        let memory = memory();
        let state = CpuState::reset();
        assert_eq!(read_linear(&memory, &state, 0xf_fffc, 15).len(), 4);
    }
}
