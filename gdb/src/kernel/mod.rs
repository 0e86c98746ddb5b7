//! The symbols of the Linux kernel that runs in the guest, wherever it put itself: as an ELF file that
//! a client reads.

mod btf;
mod elf;
mod kallsyms;
mod layout;
mod modules;
#[cfg(test)]
mod process_tests;
mod processes;
mod search;
#[cfg(test)]
mod tests;

pub use btf::BtfTypes;
pub use elf::symbols_to_elf;
pub use kallsyms::{KallsymsTables, KernelSymbol, SearchBudget};
pub use modules::{LoadedModule, ModuleFunction};
pub use processes::{KernelTask, LinuxKernel, MappedCode};
pub use search::{find_symbols, symbol_file};
