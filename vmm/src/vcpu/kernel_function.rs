//! Finds a function of a Linux guest's kernel by name, for `--record branches,stop=FUNCTION`.
//!
//! A kernel without symbols in its image, such as a bzImage, has them in memory (kallsyms). They are
//! searched for after a vCPU has set its entry of system calls, early in the boot. The guest's
//! memory is untrusted: searches are bounded in number and size.

use std::sync::Mutex;

use hindsight_cpu::state::CpuState;
use hindsight_gdb::kernel::{KernelSymbol, find_symbols};
use hindsight_gdb::memory::LinearMemory;
use vm_memory::GuestMemoryMmap;

use super::kernel_search::{KERNEL_HALF, SEARCHES_MAX, SearchedMemory};
use crate::memory::MachineMemory;
use crate::sync::lock;

/// How far the search is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FunctionSearch {
    /// No vCPU runs a kernel with symbols yet.
    Pending,
    /// The function's linear address.
    Found(u64),
    /// There is no such function, or no kernel.
    Failed,
}

#[derive(Debug)]
struct SearchState {
    search: FunctionSearch,
    count: u32,
    /// The entry of system calls of the last search.
    entry: u64,
}

/// A function of the kernel; shared by the vCPUs of a machine.
#[derive(Debug)]
pub struct KernelFunction {
    name: String,
    memory: MachineMemory,
    state: Mutex<SearchState>,
}

impl KernelFunction {
    /// The function `name` of the kernel that will run in this memory.
    pub fn new(name: String, map: &GuestMemoryMmap) -> Self {
        let state = SearchState {
            search: FunctionSearch::Pending,
            count: 0,
            entry: 0,
        };
        Self {
            name,
            memory: MachineMemory::new(map.clone()),
            state: Mutex::new(state),
        }
    }

    /// Searches for the function, if this vCPU has set another entry of system calls since the last
    /// search.
    pub(crate) fn search(&self, cpu: &CpuState) -> FunctionSearch {
        let entry = cpu.msrs.lstar;
        let mut state = lock(&self.state);
        let is_new = entry >= KERNEL_HALF && entry != state.entry;
        if state.search != FunctionSearch::Pending || !is_new {
            return state.search;
        }
        let Some(searched) = SearchedMemory::near_entry(&self.memory, cpu, entry) else {
            return state.search;
        };
        state.entry = entry;
        state.count += 1;
        let linear = LinearMemory {
            memory: &searched,
            state: cpu,
        };
        state.search = match find_symbols(&linear, &|| false) {
            Some(symbols) => self.find(&symbols),
            None if state.count < SEARCHES_MAX => FunctionSearch::Pending,
            None => {
                tracing::warn!(
                    "no Linux kernel with symbols: stop={} has no effect",
                    self.name
                );
                FunctionSearch::Failed
            }
        };
        state.search
    }

    fn find(&self, symbols: &[KernelSymbol]) -> FunctionSearch {
        let is_function = |symbol: &&KernelSymbol| {
            matches!(symbol.kind, b't' | b'T' | b'w' | b'W') && symbol.name == self.name.as_bytes()
        };
        match symbols.iter().find(is_function) {
            Some(symbol) => FunctionSearch::Found(symbol.address),
            None => {
                tracing::warn!("the kernel has no function {}: --record goes on", self.name);
                FunctionSearch::Failed
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestAddress;

    fn function(name: &str) -> KernelFunction {
        let map = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        KernelFunction::new(name.to_owned(), &map)
    }

    #[test]
    fn function_is_found_among_symbols_of_other_kinds() {
        let symbol = |address, kind, name: &str| KernelSymbol {
            address,
            kind,
            name: name.into(),
        };
        let symbols = [symbol(1, b'd', "panic"), symbol(2, b'T', "panic")];
        assert_eq!(function("panic").find(&symbols), FunctionSearch::Found(2));
        assert_eq!(function("none").find(&symbols), FunctionSearch::Failed);
    }

    #[test]
    fn search_begins_with_an_entry_in_the_kernels_half_and_is_bounded() {
        let function = function("panic");
        let mut cpu = CpuState::reset();
        assert_eq!(function.search(&cpu), FunctionSearch::Pending);
        assert_eq!(lock(&function.state).count, 0);
        // Without paging, a linear address is a physical one of 32 bits.
        for n in 1..SEARCHES_MAX {
            cpu.msrs.lstar = KERNEL_HALF | u64::from(n);
            assert_eq!(function.search(&cpu), FunctionSearch::Pending);
            assert_eq!(function.search(&cpu), FunctionSearch::Pending, "the same");
        }
        cpu.msrs.lstar = KERNEL_HALF | 0x100;
        assert_eq!(function.search(&cpu), FunctionSearch::Failed);
    }
}
