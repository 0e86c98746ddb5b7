//! Guest memory that resembles the symbol tables of a Linux kernel.

use std::ops::Range;

use hindsight_cpu::state::CpuState;
use hindsight_gdb::kernel::{find_symbols, symbols_to_elf};
use hindsight_gdb::memory::LinearMemory;
use hindsight_gdb::target::PhysicalMemory;

/// RAM at address 0.
pub(crate) struct Ram {
    bytes: Vec<u8>,
    ram: Range<u64>,
}

impl Ram {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        let ram = 0..bytes.len() as u64;
        Self { bytes, ram }
    }
}

impl PhysicalMemory for Ram {
    fn ram(&self) -> &[Range<u64>] {
        std::slice::from_ref(&self.ram)
    }

    fn read(&self, gpa: u64, buffer: &mut [u8]) -> usize {
        let from = usize::try_from(gpa).unwrap_or(usize::MAX);
        let rest = self.bytes.get(from..).unwrap_or(&[]);
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        len
    }
}

/// Searches `bytes` for tables, beside the digits of a token table, which every search begins with.
pub fn check(bytes: &[u8]) {
    let digits: Vec<u8> = (b'0'..=b'9').flat_map(|digit| [digit, 0]).collect();
    let half = (bytes.len() / 2) & !7;
    let mut memory = vec![0; 0x1000];
    memory.extend(&bytes[..half]);
    memory.extend(&digits);
    memory.extend(&bytes[half..]);
    memory.resize(memory.len().next_multiple_of(0x1000), 0);
    let memory = Ram::new(memory);
    let mut state = CpuState::reset();
    state.cr0 &= !(1 << 31);
    let linear = LinearMemory {
        memory: &memory,
        state: &state,
    };
    if let Some(symbols) = find_symbols(&linear, &|| false) {
        let _ = symbols_to_elf(&symbols);
    }
}
