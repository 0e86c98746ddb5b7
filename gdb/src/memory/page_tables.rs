//! Which linear addresses a vCPU's page tables map. SDM Vol. 3A, "Paging".

use std::ops::Range;

use hindsight_cpu::state::CpuState;
use hindsight_regs::cr::{Cr0, Cr4, Efer};

use crate::cancel::CancelFlag;
use crate::modes;
use crate::target::PhysicalMemory;

/// Maximum number of tables that are read. Page tables that refer to each other describe millions.
pub(crate) const TABLES_MAX: usize = 1 << 14;
/// The length of the longest table in bytes.
const TABLE_BYTES: usize = 4096;

pub(crate) const PRESENT: u64 = 1;
pub(crate) const WRITABLE: u64 = 1 << 1;
pub(crate) const USER: u64 = 1 << 2;
pub(crate) const LARGE: u64 = 1 << 7;
pub(crate) const NO_EXECUTE: u64 = 1 << 63;
pub(crate) const TABLE_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// One level of page tables.
#[derive(Clone, Copy)]
pub(crate) struct TableLevel {
    /// The name of its entries.
    pub(crate) name: &'static str,
    /// The lowest bit of a linear address that selects an entry.
    pub(crate) shift: u32,
}

const fn level(name: &'static str, shift: u32) -> TableLevel {
    TableLevel { name, shift }
}

const LEVELS_64: &[TableLevel] = &[
    level("PML4E", 39),
    level("PDPTE", 30),
    level("PDE", 21),
    level("PTE", 12),
];
const LEVELS_PAE: &[TableLevel] = &[level("PDPTE", 30), level("PDE", 21), level("PTE", 12)];
const LEVELS_32: &[TableLevel] = &[level("PDE", 22), level("PTE", 12)];

/// The form of a vCPU's page tables.
pub(crate) struct PagingForm {
    pub(crate) levels: &'static [TableLevel],
    /// The length of an entry in bytes.
    pub(crate) entry_bytes: usize,
    /// The guest-physical address of the first table.
    pub(crate) root: u64,
    /// Bit 63 of an entry forbids execution.
    pub(crate) nx: bool,
}

impl PagingForm {
    /// The form that CR3, CR4 and EFER select; `None` if paging is off.
    pub(crate) fn new(state: &CpuState) -> Option<Self> {
        if state.cr0 & Cr0::PG.bits() == 0 {
            return None;
        }
        let pae = state.cr4 & Cr4::PAE.bits() != 0;
        let (levels, entry_bytes, root) = match (modes::is_ia32e(state), pae) {
            (true, _) => (LEVELS_64, 8, state.cr3 & TABLE_ADDRESS),
            (false, true) => (LEVELS_PAE, 8, state.cr3 & 0xffff_ffe0),
            (false, false) => (LEVELS_32, 4, state.cr3 & 0xffff_f000),
        };
        Some(Self {
            levels,
            entry_bytes,
            root,
            nx: entry_bytes == 8 && state.efer & Efer::NXE.bits() != 0,
        })
    }

    /// The number of entries of a table.
    fn entries(&self, level: TableLevel) -> u64 {
        match (self.entry_bytes, level.shift) {
            (4, _) => 1024,
            (_, 30) if self.levels.len() == LEVELS_PAE.len() => 4,
            _ => 512,
        }
    }

    /// The address of the entry with this index.
    pub(crate) fn entry_at(&self, table: u64, index: u64) -> u64 {
        table + index * self.entry_bytes as u64
    }

    /// The entries of a table, up to the first one that is not RAM.
    fn read_table(&self, memory: &dyn PhysicalMemory, table: u64, level: TableLevel) -> Vec<u64> {
        let mut raw = [0; TABLE_BYTES];
        let len = usize::try_from(self.entries(level)).unwrap_or(0) * self.entry_bytes;
        let len = memory.read(table, &mut raw[..len]).min(len);
        let entries = raw[..len].chunks_exact(self.entry_bytes).map(|entry| {
            let mut wide = [0; 8];
            wide[..entry.len()].copy_from_slice(entry);
            u64::from_le_bytes(wide)
        });
        entries.collect()
    }

    /// The entry at an address; `None` if that is not RAM.
    pub(crate) fn read(&self, memory: &dyn PhysicalMemory, at: u64) -> Option<u64> {
        let mut raw = [0; 8];
        let read = memory.read_exact(at, &mut raw[..self.entry_bytes]);
        read.then(|| u64::from_le_bytes(raw))
    }

    /// A linear address in canonical form.
    fn canonical(&self, linear: u64) -> u64 {
        if self.levels.len() < LEVELS_64.len() {
            return linear;
        }
        // Bit 47 in all bits above it.
        (linear << 16)
            .cast_signed()
            .wrapping_shr(16)
            .cast_unsigned()
    }
}

/// Linear addresses that are mapped without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LinearRange {
    /// The first address, in canonical form.
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// The guest-physical address of the first byte.
    pub(crate) physical: u64,
    /// [`WRITABLE`], [`USER`] and [`NO_EXECUTE`] of the last level's entries.
    pub(crate) rights: u64,
}

impl LinearRange {
    /// The parts of this range that are RAM, if its guest-physical addresses are consecutive.
    pub(crate) fn in_ram<'a>(
        &self,
        ram: &'a [Range<u64>],
    ) -> impl Iterator<Item = LinearRange> + use<'a> {
        let range = *self;
        let end = range.physical.saturating_add(range.len);
        ram.iter().filter_map(move |ram| {
            let from = ram.start.max(range.physical);
            let to = ram.end.min(end);
            (from < to).then(|| LinearRange {
                start: range.start.wrapping_add(from - range.physical),
                len: to - from,
                physical: from,
                rights: range.rights,
            })
        })
    }
}

/// What the pages of one range have in common, besides consecutive linear addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SameRange {
    /// The pages have these rights in common.
    Rights(u64),
    /// Consecutive guest-physical addresses.
    Physical,
}

/// The ranges that a vCPU's page tables map.
pub(crate) struct MappedRanges {
    /// Ascending; the limit and one table's entries more at most.
    pub(crate) found: Vec<LinearRange>,
    /// There are more tables than [`TABLES_MAX`], or the search was cancelled.
    pub(crate) incomplete: bool,
}

impl MappedRanges {
    /// Searches the page tables until more than `limit` ranges are found.
    pub(crate) fn find(
        memory: &dyn PhysicalMemory,
        form: &PagingForm,
        (same, limit): (SameRange, usize),
        cancel: &CancelFlag,
    ) -> Self {
        let mut found: Vec<LinearRange> = Vec::new();
        let mut stack = vec![(form.root, 0_usize, 0_u64)];
        let (mut tables, mut incomplete) = (0, false);
        while let Some((table, depth, base)) = stack.pop() {
            let Some(&level) = form.levels.get(depth) else {
                continue;
            };
            tables += 1;
            if tables > TABLES_MAX || cancel.is_set() {
                incomplete = true;
                break;
            }
            let mut below = Vec::new();
            for (index, entry) in (0..).zip(form.read_table(memory, table, level)) {
                if entry & PRESENT == 0 {
                    continue;
                }
                let start = base | index << level.shift;
                let last = depth + 1 == form.levels.len();
                let large = !last && entry & LARGE != 0 && level.shift < 39;
                if last || large {
                    let len = 1 << level.shift;
                    let range = LinearRange {
                        start: form.canonical(start),
                        len,
                        physical: entry & TABLE_ADDRESS & !(len - 1),
                        rights: entry & (WRITABLE | USER | if form.nx { NO_EXECUTE } else { 0 }),
                    };
                    push_range(&mut found, range, same);
                } else {
                    below.push((entry & TABLE_ADDRESS, depth + 1, start));
                }
            }
            stack.extend(below.into_iter().rev());
            if found.len() > limit {
                break;
            }
        }
        found.sort_unstable();
        Self { found, incomplete }
    }
}

/// Appends a range, to the last one if it continues that.
fn push_range(found: &mut Vec<LinearRange>, range: LinearRange, same: SameRange) {
    if let Some(last) = found.last_mut()
        && last.start.wrapping_add(last.len) == range.start
        && match same {
            SameRange::Rights(mask) => (last.rights ^ range.rights) & mask == 0,
            SameRange::Physical => last.physical.wrapping_add(last.len) == range.physical,
        }
    {
        last.len = last.len.saturating_add(range.len);
        return;
    }
    found.push(range);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_ram::FlatRam;

    const LIMIT: usize = 1000;

    fn state() -> CpuState {
        let mut state = CpuState::reset();
        (state.cr0, state.cr3, state.cr4, state.efer) = (0x8000_0011, 0x1000, 0x20, 0x500);
        state
    }

    fn mapped(ram: &FlatRam, same: SameRange, cancel: &CancelFlag) -> MappedRanges {
        let form = PagingForm::new(&state()).unwrap();
        MappedRanges::find(ram, &form, (same, LIMIT), cancel)
    }

    /// Two pages and a large page at the end of the second 2 MiB below -512 GiB.
    fn two_pages_and_a_large_one() -> FlatRam {
        let mut ram = FlatRam::new(vec![0; 0x6000]);
        for (at, entry) in [
            (0x1000 + 8 * 511, 0x2003_u64),
            (0x2000, 0x3003),
            (0x3000, 0x4003),
            (0x3008, 0x87),
            (0x4000 + 8 * 510, 0x9003),
            (0x4000 + 8 * 511, 0xb003),
        ] {
            ram.write(at, &entry.to_le_bytes());
        }
        ram
    }

    #[test]
    fn adjacent_pages_with_equal_rights_are_one_range() {
        let ram = two_pages_and_a_large_one();
        let same = SameRange::Rights(WRITABLE | USER);
        let ranges = mapped(&ram, same, &CancelFlag::default());
        assert!(!ranges.incomplete);
        let found: Vec<_> = ranges.found.iter().map(|r| (r.start, r.len)).collect();
        assert_eq!(
            found,
            [
                (0xffff_ff80_001f_e000, 0x2000),
                (0xffff_ff80_0020_0000, 0x20_0000)
            ]
        );
        assert_eq!(ranges.found[1].rights, WRITABLE | USER);
    }

    #[test]
    fn ranges_by_physical_address_end_where_that_jumps() {
        let ram = two_pages_and_a_large_one();
        let ranges = mapped(&ram, SameRange::Physical, &CancelFlag::default());
        let found: Vec<_> = ranges.found.iter().map(|r| (r.physical, r.len)).collect();
        assert_eq!(found, [(0x9000, 0x1000), (0xb000, 0x1000), (0, 0x20_0000)]);
    }

    #[test]
    fn paging_that_is_off_has_no_form() {
        assert!(PagingForm::new(&CpuState::reset()).is_none());
    }

    #[test]
    fn tables_that_refer_to_themselves_are_read_a_limited_number_of_times() {
        let mut ram = FlatRam::new(vec![0; 0x6000]);
        // All entries of the upper levels lead to the next table, and the last table is empty.
        for table in [0x1000_u16, 0x2000, 0x3000] {
            for index in 0..512 {
                let entry = u64::from(table) + 0x1003;
                ram.write(usize::from(table) + 8 * index, &entry.to_le_bytes());
            }
        }
        let ranges = mapped(&ram, SameRange::Physical, &CancelFlag::default());
        assert!(ranges.incomplete && ranges.found.is_empty());
        let cancelled = CancelFlag::default();
        cancelled.set();
        assert!(mapped(&ram, SameRange::Physical, &cancelled).incomplete);
    }
}
