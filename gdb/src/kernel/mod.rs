//! The symbols of the Linux kernel that runs in the guest, wherever it put itself: as an ELF file that
//! a client reads.

mod elf;
mod kallsyms;
mod search;
#[cfg(test)]
mod tests;

pub use elf::symbols_to_elf;
pub use kallsyms::{KallsymsTables, KernelSymbol, SearchBudget};
pub use search::{find_symbols, symbol_file};
