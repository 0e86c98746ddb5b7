//! Commands that show page tables. SDM Vol. 3A, "Paging".

use std::fmt::Write as _;

use hindsight_cpu::state::{CpuState, canonical};
use hindsight_regs::cr::{Cr0, Cr4, Efer};

use super::arguments::{no_arguments, parse_number};
use super::command::{CommandReply, failed};
use crate::cancel::CancelFlag;
use crate::debugger::Debugger;
use crate::modes;
use crate::target::{CommandError, PhysicalMemory};

/// The most lines that a command prints.
const LINES_MAX: usize = 1000;
/// The most tables that a command reads. Page tables that refer to each other describe millions.
const TABLES_MAX: usize = 1 << 14;
/// The length of the longest table in bytes.
const TABLE_BYTES: usize = 4096;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const TABLE_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// One level of page tables.
#[derive(Clone, Copy)]
struct TableLevel {
    /// The name of its entries.
    name: &'static str,
    /// The lowest bit of a linear address that selects an entry.
    shift: u32,
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
struct PagingForm {
    levels: &'static [TableLevel],
    /// The length of an entry in bytes.
    entry_bytes: usize,
    /// The guest-physical address of the first table.
    root: u64,
}

impl PagingForm {
    fn new(state: &CpuState) -> Self {
        let pae = state.cr4 & Cr4::PAE.bits() != 0;
        let (levels, entry_bytes, root) = match (modes::is_ia32e(state), pae) {
            (true, _) => (LEVELS_64, 8, state.cr3 & TABLE_ADDRESS),
            (false, true) => (LEVELS_PAE, 8, state.cr3 & 0xffff_ffe0),
            (false, false) => (LEVELS_32, 4, state.cr3 & 0xffff_f000),
        };
        Self {
            levels,
            entry_bytes,
            root,
        }
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
    fn entry_at(&self, table: u64, index: u64) -> u64 {
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
    fn read(&self, memory: &dyn PhysicalMemory, at: u64) -> Option<u64> {
        let mut raw = [0; 8];
        let read = memory.read_exact(at, &mut raw[..self.entry_bytes]);
        read.then(|| u64::from_le_bytes(raw))
    }
}

/// The rights in an entry, a letter each; `nx`: bit 63 forbids execution.
fn rights(entry: u64, nx: bool) -> String {
    let execute = !nx || entry >> 63 == 0;
    let letters = [(1, 'W'), (2, 'U'), (5, 'A'), (6, 'D'), (7, 'S'), (8, 'G')];
    let letter = |on: bool, letter| if on { letter } else { '-' };
    let letters = letters.map(|(bit, name)| letter(entry >> bit & 1 != 0, name));
    letters.into_iter().chain([letter(execute, 'X')]).collect()
}

pub(super) fn pt(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    let [address] = arguments else {
        return Err(CommandError::Usage);
    };
    let address = parse_number(address)?;
    let linear = debugger.linear_memory(debugger.selected)?;
    let state = linear.state;
    if state.cr0 & Cr0::PG.bits() == 0 {
        let physical = address & 0xffff_ffff;
        return Ok(format!("paging is off: {address:#x} is {physical:#x}"));
    }
    let long = modes::is_ia32e(state);
    if long && !canonical(address) {
        return Err(failed(format!(
            "{address:#x} is not canonical: an access raises #GP or #SS"
        )));
    }
    let address = if long { address } else { address & 0xffff_ffff };
    let form = PagingForm::new(state);
    let nx = form.entry_bytes == 8 && state.efer & Efer::NXE.bits() != 0;
    let mut text = format!("CR3 {:#x}\n", state.cr3);
    let mut table = form.root;
    for &TableLevel { name, shift } in form.levels {
        let index_mask = if form.entry_bytes == 8 { 0x1ff } else { 0x3ff };
        let at = form.entry_at(table, address >> shift & index_mask);
        let Some(entry) = form.read(linear.memory, at) else {
            let _ = writeln!(text, "{name} at {at:#x}: not RAM");
            return Ok(text);
        };
        let _ = writeln!(text, "{name} at {at:#x}: {entry:#x} {}", rights(entry, nx));
        if entry & PRESENT == 0 {
            text.push_str("not present\n");
            return Ok(text);
        }
        if shift == 12 || (shift < 39 && entry & LARGE != 0) {
            break;
        }
        table = entry & TABLE_ADDRESS;
    }
    match linear.translate(address) {
        Some(physical) => {
            let _ = writeln!(text, "{address:#x} is {physical:#x}");
        }
        None => text.push_str("not mapped\n"),
    }
    Ok(text)
}

/// Linear addresses that are mapped without a gap, with the same rights.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct LinearRange {
    start: u64,
    len: u64,
    /// [`WRITABLE`] and [`USER`].
    rights: u64,
}

/// The ranges that a vCPU's page tables map.
struct MappedRanges {
    /// A little more than [`LINES_MAX`] at most.
    found: Vec<LinearRange>,
    /// There are more tables than [`TABLES_MAX`], or the search was cancelled.
    incomplete: bool,
}

fn mapped_ranges(
    memory: &dyn PhysicalMemory,
    form: &PagingForm,
    cancel: &CancelFlag,
) -> MappedRanges {
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
                let range = LinearRange {
                    start,
                    len: 1 << level.shift,
                    rights: entry & (WRITABLE | USER),
                };
                push_range(&mut found, range);
            } else {
                below.push((entry & TABLE_ADDRESS, depth + 1, start));
            }
        }
        stack.extend(below.into_iter().rev());
        if found.len() > LINES_MAX {
            break;
        }
    }
    found.sort_unstable();
    MappedRanges { found, incomplete }
}

/// Appends a range, to the last one if it continues that.
fn push_range(found: &mut Vec<LinearRange>, range: LinearRange) {
    if let Some(last) = found.last_mut()
        && last.start.wrapping_add(last.len) == range.start
        && last.rights == range.rights
    {
        last.len = last.len.saturating_add(range.len);
        return;
    }
    found.push(range);
}

/// Bit 47 in all bits above it.
fn sign_extend(linear: u64) -> u64 {
    (linear << 16)
        .cast_signed()
        .wrapping_shr(16)
        .cast_unsigned()
}

pub(super) fn tlb(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    let cancel = debugger.cancel.clone();
    let linear = debugger.linear_memory(debugger.selected)?;
    let state = linear.state;
    if state.cr0 & Cr0::PG.bits() == 0 {
        return Ok("paging is off".to_owned());
    }
    let ranges = mapped_ranges(linear.memory, &PagingForm::new(state), &cancel);
    let mut text = String::new();
    for range in ranges.found.iter().take(LINES_MAX) {
        let start = match modes::is_ia32e(state) {
            true => sign_extend(range.start),
            false => range.start,
        };
        let end = start.wrapping_add(range.len);
        let write = if range.rights & WRITABLE != 0 {
            'W'
        } else {
            '-'
        };
        let user = if range.rights & USER != 0 { 'U' } else { '-' };
        let _ = writeln!(
            text,
            "{start:016x}-{end:016x} {:#x} {write}{user}",
            range.len
        );
    }
    if ranges.found.len() > LINES_MAX {
        text.push_str("and more\n");
    } else if ranges.incomplete {
        let _ = writeln!(text, "and more: only {TABLES_MAX} tables are read");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_ram::FlatRam;

    #[test]
    fn page_is_executable_unless_bit_63_counts_and_is_set() {
        assert_eq!(rights(0x8000_0000_0000_0063, true), "W-AD---");
        assert_eq!(rights(0x8000_0000_0000_0063, false), "W-AD--X");
        assert_eq!(rights(0x65, true), "-UAD--X");
    }

    #[test]
    fn adjacent_pages_with_equal_rights_are_one_range() {
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
        let mut state = CpuState::reset();
        (state.cr0, state.cr3, state.cr4, state.efer) = (0x8000_0011, 0x1000, 0x20, 0x500);
        let form = PagingForm::new(&state);
        let ranges = mapped_ranges(&ram, &form, &CancelFlag::default());
        assert!(!ranges.incomplete);
        let ranges = ranges.found;
        let found: Vec<_> = ranges
            .iter()
            .map(|r| (sign_extend(r.start), r.len))
            .collect();
        assert_eq!(
            found,
            [
                (0xffff_ff80_001f_e000, 0x2000),
                (0xffff_ff80_0020_0000, 0x20_0000)
            ]
        );
        assert_eq!(ranges[1].rights, WRITABLE | USER);
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
        let mut state = CpuState::reset();
        (state.cr0, state.cr3, state.cr4, state.efer) = (0x8000_0011, 0x1000, 0x20, 0x500);
        let form = PagingForm::new(&state);
        let ranges = mapped_ranges(&ram, &form, &CancelFlag::default());
        assert!(ranges.incomplete && ranges.found.is_empty());
        let cancelled = CancelFlag::default();
        cancelled.set();
        assert!(mapped_ranges(&ram, &form, &cancelled).incomplete);
    }
}
