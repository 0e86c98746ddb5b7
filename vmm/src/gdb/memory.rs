//! Guest memory and the MSRs that are part of a processor's state, for the debugger: nothing in
//! here reaches a device.

use std::ops::Range;

use hindsight_cpu::state::{CpuState, canonical};
use hindsight_regs::msr;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::memory::page_walk::linear_to_physical;

/// A part of an access that lies in one page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Guest-physical address.
    pub(super) at: u64,
    /// Which of the bytes.
    pub(super) range: Range<usize>,
}

/// Bytes left in the page of an address.
fn page_rest(at: u64) -> usize {
    usize::try_from(0x1000 - (at & 0xfff)).unwrap_or(1)
}

fn split(
    memory: &GuestMemoryMmap,
    at: u64,
    len: usize,
    translate: impl Fn(u64) -> Option<u64>,
) -> Option<Vec<Piece>> {
    let mut pieces = Vec::new();
    let mut done = 0;
    while done < len {
        let here = at.wrapping_add(done as u64);
        let end = len.min(done + page_rest(here));
        let physical = translate(here)?;
        if !memory.check_range(GuestAddress(physical), end - done) {
            return None;
        }
        pieces.push(Piece {
            at: physical,
            range: done..end,
        });
        done = end;
    }
    Some(pieces)
}

/// Where the bytes at a linear address are; `None` if any is not in memory.
pub(super) fn pieces(
    memory: &GuestMemoryMmap,
    state: &CpuState,
    at: u64,
    len: usize,
) -> Option<Vec<Piece>> {
    split(memory, at, len, |linear| {
        linear_to_physical(memory, state, linear)
    })
}

/// The same for a physical address.
pub(super) fn physical_pieces(memory: &GuestMemoryMmap, at: u64, len: usize) -> Option<Vec<Piece>> {
    split(memory, at, len, Some)
}

/// Writes to pieces that were checked.
pub(super) fn write(memory: &GuestMemoryMmap, pieces: &[Piece], bytes: &[u8]) -> Option<()> {
    for piece in pieces {
        let part = bytes.get(piece.range.clone())?;
        memory.write_slice(part, GuestAddress(piece.at)).ok()?;
    }
    Some(())
}

/// Up to `len` bytes at a physical address; fewer where memory ends.
pub(super) fn read_physical(memory: &GuestMemoryMmap, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let read = memory.read(&mut bytes, GuestAddress(at)).unwrap_or(0);
    bytes.truncate(read);
    bytes
}

/// An MSR that [`CpuState`] holds.
pub(super) fn msr_of_state(state: &CpuState, index: u32) -> Option<u64> {
    let msrs = &state.msrs;
    Some(match index {
        msr::IA32_EFER => state.efer,
        msr::IA32_STAR => msrs.star,
        msr::IA32_LSTAR => msrs.lstar,
        msr::IA32_CSTAR => msrs.cstar,
        msr::IA32_FS_BASE => state.seg[4].base,
        msr::IA32_GS_BASE => state.seg[5].base,
        msr::IA32_KERNEL_GS_BASE => msrs.kernel_gs_base,
        msr::IA32_SYSENTER_CS => msrs.sysenter_cs,
        msr::IA32_SYSENTER_ESP => msrs.sysenter_esp,
        msr::IA32_SYSENTER_EIP => msrs.sysenter_eip,
        msr::IA32_PAT => msrs.pat,
        _ => return None,
    })
}

/// Writes an MSR that [`CpuState`] holds; `None` if the processor refuses the value.
pub(super) fn set_msr_of_state(state: &mut CpuState, index: u32, value: u64) -> Option<()> {
    let msrs = &mut state.msrs;
    let (place, address) = match index {
        msr::IA32_STAR => (&mut msrs.star, false),
        msr::IA32_LSTAR => (&mut msrs.lstar, true),
        msr::IA32_CSTAR => (&mut msrs.cstar, true),
        msr::IA32_FS_BASE => (&mut state.seg[4].base, true),
        msr::IA32_GS_BASE => (&mut state.seg[5].base, true),
        msr::IA32_KERNEL_GS_BASE => (&mut msrs.kernel_gs_base, true),
        msr::IA32_SYSENTER_CS => (&mut msrs.sysenter_cs, false),
        msr::IA32_SYSENTER_ESP => (&mut msrs.sysenter_esp, true),
        msr::IA32_SYSENTER_EIP => (&mut msrs.sysenter_eip, true),
        msr::IA32_PAT => {
            // Types 2 and 3 and those above 7 are reserved.
            let bytes = value.to_le_bytes();
            let good = bytes.iter().all(|kind| matches!(kind, 0 | 1 | 4..=7));
            msrs.pat = good.then_some(value)?;
            return Some(());
        }
        // EFER is a register with rules of its own.
        _ => return None,
    };
    if address && !canonical(value) {
        return None;
    }
    *place = value;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> GuestMemoryMmap {
        crate::memory::allocate(&[(GuestAddress(0), 0x10_0000)], false).unwrap()
    }

    #[test]
    fn access_across_the_end_of_memory_has_no_pieces() {
        let memory = memory();
        assert!(physical_pieces(&memory, 0xf_fffc, 4).is_some());
        assert!(physical_pieces(&memory, 0xf_fffc, 5).is_none());
        assert!(physical_pieces(&memory, u64::MAX, 1).is_none());
    }

    #[test]
    fn write_across_pages_arrives_in_order() {
        let memory = memory();
        let state = CpuState::reset();
        let pieces = pieces(&memory, &state, 0x1ffe, 4).unwrap();
        assert_eq!(pieces.len(), 2);
        write(&memory, &pieces, &[1, 2, 3, 4]).unwrap();
        assert_eq!(read_physical(&memory, 0x1ffd, 6), [0, 1, 2, 3, 4, 0]);
    }

    #[test]
    fn ranges_into_the_hole_of_canonical_addresses_have_no_pieces() {
        let memory = memory();
        let mut state = CpuState::reset();
        // The last page below the hole is the one at 0, by tables of which each is the next one.
        for (table, index) in [(0x1000, 255), (0x2000, 511), (0x3000, 511)] {
            let next = table + 0x1000;
            let entry = GuestAddress(table + 8 * index);
            memory.write_obj(next | 3, entry).unwrap();
        }
        memory
            .write_obj(3_u64, GuestAddress(0x4000 + 8 * 511))
            .unwrap();
        (state.cr0, state.cr3, state.cr4, state.efer) = (0x8000_0011, 0x1000, 0x20, 0x500);
        let last = 0x0000_7fff_ffff_fffc;
        assert!(pieces(&memory, &state, last, 4).is_some());
        assert!(pieces(&memory, &state, last, 5).is_none());
        assert!(pieces(&memory, &state, last | 1 << 63, 4).is_none());
        let read = crate::memory::page_walk::read_linear(&memory, &state, last, 8);
        assert_eq!(read.len(), 4);
    }

    #[test]
    fn reading_ends_where_memory_does() {
        assert_eq!(read_physical(&memory(), 0xf_fff0, 0x100).len(), 0x10);
        assert!(read_physical(&memory(), 1 << 40, 0x100).is_empty());
    }
}
