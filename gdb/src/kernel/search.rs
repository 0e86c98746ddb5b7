//! Finding the kernel's symbol tables in guest memory.

use super::elf::symbols_to_elf;
use super::kallsyms::{DIGIT_TOKENS, KallsymsTables, KernelSymbol, SearchBudget};
use crate::memory::LinearMemory;
use crate::target::PhysicalMemory;

/// How far the tables are from the beginning of the kernel at most, in bytes.
const KERNEL_BYTES_MAX: u64 = 128 << 20;

/// How many places with [`DIGIT_TOKENS`] are examined.
const CANDIDATES_MAX: usize = 1024;

/// The guest-physical addresses of [`DIGIT_TOKENS`], at most [`CANDIDATES_MAX`].
fn candidates(memory: &dyn PhysicalMemory, cancelled: &dyn Fn() -> bool) -> Vec<u64> {
    let mut found = Vec::new();
    // The end of the last piece, in which a match may begin.
    let (mut text, mut end) = (Vec::new(), 0);
    memory.visit_data(&mut |gpa, piece| {
        if found.len() >= CANDIDATES_MAX || cancelled() {
            return;
        }
        if gpa != end {
            text.clear();
        }
        let start = gpa - text.len() as u64;
        text.extend_from_slice(piece);
        let windows = text.windows(DIGIT_TOKENS.len()).enumerate();
        let matches = windows.filter(|(_, window)| *window == DIGIT_TOKENS);
        found.extend(matches.map(|(offset, _)| start + offset as u64));
        let keep = (DIGIT_TOKENS.len() - 1).min(text.len());
        text.drain(..text.len() - keep);
        end = gpa + piece.len() as u64;
    });
    found.truncate(CANDIDATES_MAX);
    found
}

/// The symbols of the kernel that is mapped, or else of the first one in memory: the code that
/// unpacks a kernel leaves copies behind. `None` if there is no kernel, or none with symbols.
///
/// The search ends early, without a result, when `cancelled` returns true.
pub fn find_symbols(
    linear: &LinearMemory<'_>,
    cancelled: &dyn Fn() -> bool,
) -> Option<Vec<KernelSymbol>> {
    let memory = linear.memory;
    let mut first = None;
    let mut budget = SearchBudget::default();
    for digits in candidates(memory, cancelled) {
        if cancelled() {
            return None;
        }
        let Some(tables) = KallsymsTables::find(memory, digits, &mut budget) else {
            continue;
        };
        let Some(base) = tables.base(memory) else {
            continue;
        };
        let mapped = linear.translate(base);
        if mapped.is_some_and(|at| at <= digits && digits - at < KERNEL_BYTES_MAX) {
            return tables.symbols(memory, &mut budget);
        }
        first = first.or_else(|| tables.symbols(memory, &mut budget));
    }
    first
}

/// An ELF file with the kernel's symbols as they are now.
///
/// As [`find_symbols`] otherwise.
pub fn symbol_file(linear: &LinearMemory<'_>, cancelled: &dyn Fn() -> bool) -> Option<Vec<u8>> {
    find_symbols(linear, cancelled).map(|symbols| symbols_to_elf(&symbols))
}
