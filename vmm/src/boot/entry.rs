//! The first vCPU's state at the entry to an image, and the tables that it needs in memory.
//!
//! SDM Vol. 3A, "Segment Descriptors", "64-Bit Mode Segment Descriptors", "Task-State Segment" and
//! "4-Level Paging". The selectors are those of the Linux 64-bit boot protocol: code 0x10, data
//! 0x18; the task state segment is 0x20.

use hindsight_cpu::state::{CpuState, DescriptorTable, Segment, gpr, seg};
use hindsight_regs::cr::{Cr0, Cr4, Efer};

use crate::boot::BootError;
use crate::boot::placement::{Fit, Placement};

const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TSS: u16 = 0x20;

/// Present, ring 0, 32-bit execute/read, accessed, limit in pages.
const ACCESS_CODE32: u16 = 0xc09b;
/// Present, ring 0, 64-bit execute/read, accessed, limit in pages.
const ACCESS_CODE64: u16 = 0xa09b;
/// Present, ring 0, 32-bit read/write, accessed, limit in pages.
const ACCESS_DATA: u16 = 0xc093;
/// Present, busy 32-bit or 64-bit task state segment.
const ACCESS_TSS: u16 = 0x8b;

/// Size of the task state segment in bytes, of the 64-bit and of the 32-bit one.
const TSS_SIZE: u32 = 0x68;
/// Size of the segment descriptors: six of eight bytes, the last two of which are the TSS's.
const GDT_SIZE: u16 = 0x30;

const CR0_PROTECTED: Cr0 = Cr0::PE.union(Cr0::ET);
const CR0_LONG: Cr0 = CR0_PROTECTED.union(Cr0::PG);
const EFER_LONG: Efer = Efer::LME.union(Efer::LMA);

/// Page-table entry: present, writable.
const PTE_TABLE: u64 = 0x3;
/// Page-directory entry of a 2 MiB page: present, writable, PS.
const PTE_LARGE: u64 = 0x83;
const PAGE: u64 = 0x1000;

/// Size of the stack in bytes.
const STACK_SIZE: u64 = 0x1000;

/// The interrupt table of real mode.
const REAL_IDTR: DescriptorTable = DescriptorTable {
    base: 0,
    limit: 0x3ff,
};

/// Operand width of the code at the entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CodeWidth {
    Bits32,
    Bits64,
}

/// Enters 32-bit protected mode with flat 4 GiB segments, without paging.
///
/// Places a descriptor table and a stack.
pub(super) fn protected(placement: &mut Placement<'_>, entry: u64) -> Result<CpuState, BootError> {
    let mut state = flat_segments(placement, CodeWidth::Bits32)?;
    state.rip = entry;
    state.cr0 = CR0_PROTECTED.bits();
    // As a BIOS leaves it, for images that switch to real mode. It is useless in protected mode.
    state.idtr = REAL_IDTR;
    Ok(state)
}

/// Enters 64-bit mode with the first 4 GiB mapped one to one by 2 MiB pages.
///
/// Places page tables, a descriptor table and a stack.
pub(super) fn long(placement: &mut Placement<'_>, entry: u64) -> Result<CpuState, BootError> {
    let mut state = flat_segments(placement, CodeWidth::Bits64)?;
    state.rip = entry;
    state.cr0 = CR0_LONG.bits();
    state.cr4 = Cr4::PAE.bits();
    state.efer = EFER_LONG.bits();
    let size = page_tables(0).len();
    let cr3 = placement.structure("page tables", vec![0; size], PAGE)?;
    placement.fill(cr3, page_tables(cr3));
    state.cr3 = cr3;
    Ok(state)
}

/// Enters real mode, with a stack below 64 KiB if one fits there.
///
/// An entry in the first 64 KiB has CS 0, as code with an origin expects. Above that, CS is the
/// segment that starts at most 15 bytes before the entry.
pub(super) fn real(placement: &mut Placement<'_>, entry: u64) -> Result<CpuState, BootError> {
    let mut state = CpuState::reset();
    let selector = if entry <= 0xffff { 0 } else { entry >> 4 };
    let Ok(selector) = u16::try_from(selector) else {
        return Err(BootError::EntryReal { entry });
    };
    let data = Segment {
        limit: 0xffff,
        access: 0x93,
        ..Segment::default()
    };
    state.seg = [data; 6];
    state.seg[seg::CS] = Segment {
        selector,
        base: u64::from(selector) << 4,
        access: 0x9b,
        ..data
    };
    state.rip = entry - (u64::from(selector) << 4);
    state.cr0 = Cr0::ET.bits();
    state.idtr = REAL_IDTR;
    // A BIOS leaves the stack below the boot sector. An image may also fill all 64 KiB; then SP
    // stays 0, the top of the segment.
    for top in [0x7c00, 0x1_0000] {
        let stack = zeros(STACK_SIZE);
        if let Ok(at) = placement.fit("stack", stack, 16, 0x500..top, Fit::Highest) {
            state.gpr[gpr::RSP] = (at + STACK_SIZE) & 0xffff;
            break;
        }
    }
    Ok(state)
}

fn flat_segments(placement: &mut Placement<'_>, width: CodeWidth) -> Result<CpuState, BootError> {
    let mut state = CpuState::reset();
    let size = descriptors(0, width).len();
    let gdt = placement.structure("descriptor table", vec![0; size], 16)?;
    placement.fill(gdt, descriptors(gdt, width));
    let stack = placement.structure("stack", zeros(STACK_SIZE), PAGE)?;
    state.gpr[gpr::RSP] = stack + STACK_SIZE;
    let data = Segment {
        selector: DATA,
        base: 0,
        limit: u32::MAX,
        access: ACCESS_DATA,
        unusable: false,
    };
    state.seg = [data; 6];
    state.seg[seg::CS] = Segment {
        selector: CODE,
        access: width.code_access(),
        ..data
    };
    state.tr = Segment {
        selector: TSS,
        base: width.tss(gdt),
        limit: TSS_SIZE - 1,
        access: ACCESS_TSS,
        unusable: false,
    };
    state.ldtr.unusable = true;
    state.gdtr = DescriptorTable {
        base: gdt,
        limit: GDT_SIZE - 1,
    };
    // No handlers: until the guest installs its own, an exception ends in a triple fault.
    state.idtr = DescriptorTable { base: 0, limit: 0 };
    Ok(state)
}

impl CodeWidth {
    const fn code_access(self) -> u16 {
        match self {
            Self::Bits32 => ACCESS_CODE32,
            Self::Bits64 => ACCESS_CODE64,
        }
    }

    /// Base of the task state segment. The PVH protocol requires 0 in 32-bit mode.
    fn tss(self, gdt: u64) -> u64 {
        match self {
            Self::Bits32 => 0,
            Self::Bits64 => gdt + u64::from(GDT_SIZE),
        }
    }
}

/// The descriptor table for address `gdt`, followed by the 64-bit task state segment.
fn descriptors(gdt: u64, width: CodeWidth) -> Vec<u8> {
    let tss = width.tss(gdt);
    let entries = [
        0,
        0,
        descriptor(0, 0xf_ffff, width.code_access()),
        descriptor(0, 0xf_ffff, ACCESS_DATA),
        descriptor(tss & 0xffff_ffff, TSS_SIZE - 1, ACCESS_TSS),
        tss >> 32,
    ];
    let mut bytes: Vec<u8> = entries
        .iter()
        .flat_map(|entry: &u64| entry.to_le_bytes())
        .collect();
    if width == CodeWidth::Bits64 {
        let mut tss = zeros(u64::from(TSS_SIZE));
        // An I/O map base at or beyond the segment's limit means that there is no map.
        tss[0x66] = 0x68;
        bytes.extend(tss);
    }
    bytes
}

/// A segment descriptor. The G bit of `access` (as in [`Segment::access`]) defines the unit of
/// `limit`.
const fn descriptor(base: u64, limit: u32, access: u16) -> u64 {
    let (limit, access) = (limit as u64, access as u64);
    (limit & 0xffff)
        | (base & 0xff_ffff) << 16
        | access << 40
        | (limit & 0xf_0000) << 32
        | (base & 0xff00_0000) << 32
}

/// Page tables for address `base` that map the first 4 GiB one to one: a PML4, a
/// page-directory-pointer table and four page directories.
fn page_tables(base: u64) -> Vec<u8> {
    let table = |first: u64, count: u64, step: u64| {
        (0..512).map(move |index| {
            if index < count {
                first + index * step
            } else {
                0
            }
        })
    };
    table((base + PAGE) | PTE_TABLE, 1, 0)
        .chain(table((base + 2 * PAGE) | PTE_TABLE, 4, PAGE))
        .chain((0..2048).map(|index: u64| index << 21 | PTE_LARGE))
        .flat_map(u64::to_le_bytes)
        .collect()
}

/// `size` zero bytes.
fn zeros(size: u64) -> Vec<u8> {
    vec![0; crate::memory::layout::to_usize(size)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segment_descriptors_match_the_manual() {
        assert_eq!(
            descriptor(0, 0xf_ffff, ACCESS_CODE64),
            0x00af_9b00_0000_ffff
        );
        assert_eq!(
            descriptor(0, 0xf_ffff, ACCESS_CODE32),
            0x00cf_9b00_0000_ffff
        );
        assert_eq!(descriptor(0, 0xf_ffff, ACCESS_DATA), 0x00cf_9300_0000_ffff);
        assert_eq!(
            descriptor(0x1234_5678, 0x67, ACCESS_TSS),
            0x1200_8b34_5678_0067
        );
    }

    #[test]
    fn page_tables_map_the_first_four_gib_one_to_one() {
        let bytes = page_tables(0x5000);
        let entry = |table: usize, index: usize| {
            let at = table * 0x1000 + index * 8;
            u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
        };
        assert_eq!(bytes.len(), 6 * 0x1000);
        assert_eq!((entry(0, 0), entry(0, 1)), (0x6003, 0));
        assert_eq!((entry(1, 0), entry(1, 3), entry(1, 4)), (0x7003, 0xa003, 0));
        assert_eq!((entry(2, 0), entry(2, 1)), (0x83, 0x20_0083));
        assert_eq!(entry(5, 511), 0xffe0_0083);
    }
}
