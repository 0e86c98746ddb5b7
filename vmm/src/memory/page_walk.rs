//! Reading a machine's memory by linear address: [`hindsight_cpu::page_walk`] over its RAM.

use hindsight_cpu::page_walk;
use hindsight_cpu::state::CpuState;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Reads RAM for a page walk.
fn reader(memory: &GuestMemoryMmap) -> impl Fn(u64, &mut [u8]) -> bool {
    |at, buffer| memory.read_slice(buffer, GuestAddress(at)).is_ok()
}

/// Up to `len` bytes at `linear`; fewer where the rest is not mapped or not memory.
pub fn read_linear(memory: &GuestMemoryMmap, state: &CpuState, linear: u64, len: usize) -> Vec<u8> {
    page_walk::read_linear(reader(memory), state, linear, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_stops_at_the_end_of_memory() {
        let memory = crate::memory::allocate(&[(GuestAddress(0), 0x10_0000)], false).unwrap();
        let state = CpuState::reset();
        assert_eq!(read_linear(&memory, &state, 0xf_fffc, 15).len(), 4);
    }
}
