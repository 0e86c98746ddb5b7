//! Where the tables of a Linux guest's kernel are searched for: near its entry of system calls.

use std::ops::Range;

use hindsight_cpu::state::CpuState;
use hindsight_gdb::memory::LinearMemory;
use hindsight_gdb::target::PhysicalMemory;

use crate::memory::MachineMemory;

/// How often a kernel is searched for. A guest may set the entry of system calls at any time.
pub(super) const SEARCHES_MAX: u32 = 8;
/// Where the kernel's tables are, relative to the entry of system calls, in bytes.
const BEFORE_ENTRY: u64 = 32 << 20;
const AFTER_ENTRY: u64 = 96 << 20;
/// The lowest address of the kernel's half.
pub(super) const KERNEL_HALF: u64 = 1 << 63;

/// RAM, of which only a part is searched.
pub(super) struct SearchedMemory<'a> {
    memory: &'a MachineMemory,
    searched: Range<u64>,
}

impl<'a> SearchedMemory<'a> {
    /// The RAM in which the tables of the kernel are that has the entry of system calls at `entry`.
    /// `None` if that is not mapped.
    pub(super) fn near_entry(
        memory: &'a MachineMemory,
        state: &CpuState,
        entry: u64,
    ) -> Option<Self> {
        let at = LinearMemory { memory, state }.translate(entry)?;
        let start = at.saturating_sub(BEFORE_ENTRY) & !0xfff;
        Some(Self {
            memory,
            searched: start..at.saturating_add(AFTER_ENTRY),
        })
    }
}

impl PhysicalMemory for SearchedMemory<'_> {
    fn ram(&self) -> &[Range<u64>] {
        self.memory.ram()
    }

    fn read(&self, gpa: u64, buffer: &mut [u8]) -> usize {
        self.memory.read(gpa, buffer)
    }

    fn visit_data(&self, visit: &mut dyn FnMut(u64, &[u8])) {
        let mut buffer = vec![0; 1 << 16];
        for gpa in self.searched.clone().step_by(buffer.len()) {
            let count = self.memory.read(gpa, &mut buffer);
            if count != 0 {
                visit(gpa, &buffer[..count]);
            }
        }
    }
}
