//! Commands that show page tables. SDM Vol. 3A, "Paging".

use std::fmt::Write as _;

use hindsight_cpu::state::canonical;

use super::arguments::{no_arguments, parse_number};
use super::command::{CommandReply, failed};
use crate::debugger::Debugger;
use crate::memory::page_tables::{
    LARGE, MappedRanges, PRESENT, PagingForm, SameRange, TABLE_ADDRESS, TABLES_MAX, TableLevel,
    USER, WRITABLE,
};
use crate::modes;
use crate::target::CommandError;

/// Maximum number of lines that a command prints.
const LINES_MAX: usize = 1000;
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
    let Some(form) = PagingForm::new(state) else {
        let physical = address & 0xffff_ffff;
        return Ok(format!("paging is off: {address:#x} is {physical:#x}"));
    };
    let long = modes::is_ia32e(state);
    if long && !canonical(address) {
        return Err(failed(format!(
            "{address:#x} is not canonical: an access raises #GP or #SS"
        )));
    }
    let address = if long { address } else { address & 0xffff_ffff };
    let mut text = format!("CR3 {:#x}\n", state.cr3);
    let mut table = form.root;
    for &TableLevel { name, shift } in form.levels {
        let index_mask = if form.entry_bytes == 8 { 0x1ff } else { 0x3ff };
        let at = form.entry_at(table, address >> shift & index_mask);
        let Some(entry) = form.read(linear.memory, at) else {
            let _ = writeln!(text, "{name} at {at:#x}: not RAM");
            return Ok(text);
        };
        let _ = writeln!(
            text,
            "{name} at {at:#x}: {entry:#x} {}",
            rights(entry, form.nx)
        );
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

pub(super) fn tlb(debugger: &mut Debugger, arguments: &[&str]) -> CommandReply {
    no_arguments(arguments)?;
    let cancel = debugger.cancel.clone();
    let linear = debugger.linear_memory(debugger.selected)?;
    let Some(form) = PagingForm::new(linear.state) else {
        return Ok("paging is off".to_owned());
    };
    let search = (SameRange::Rights(WRITABLE | USER), LINES_MAX);
    let ranges = MappedRanges::find(linear.memory, &form, search, &cancel);
    let mut text = String::new();
    for range in ranges.found.iter().take(LINES_MAX) {
        let end = range.start.wrapping_add(range.len);
        let write = if range.rights & WRITABLE != 0 {
            'W'
        } else {
            '-'
        };
        let user = if range.rights & USER != 0 { 'U' } else { '-' };
        let _ = writeln!(
            text,
            "{:016x}-{end:016x} {:#x} {write}{user}",
            range.start, range.len
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

    #[test]
    fn page_is_executable_unless_bit_63_counts_and_is_set() {
        assert_eq!(rights(0x8000_0000_0000_0063, true), "W-AD---");
        assert_eq!(rights(0x8000_0000_0000_0063, false), "W-AD--X");
        assert_eq!(rights(0x65, true), "-UAD--X");
    }
}
