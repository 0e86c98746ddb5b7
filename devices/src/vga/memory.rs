//! The memory of a display adapter.

use vm_memory::{Bytes, GuestAddress};

use crate::virtio::DmaMemory;

/// The video memory in units of 64 KiB.
pub(super) const VIDEO_MEMORY_BLOCKS: u16 = 256;
/// Bytes of the video memory: 16 MiB.
pub const VIDEO_MEMORY_LEN: usize = (VIDEO_MEMORY_BLOCKS as usize) << 16;

/// Bytes that are cleared at a time.
const CHUNK: usize = 0x1_0000;

/// The memory of a display adapter: a range of guest memory of [`VIDEO_MEMORY_LEN`] bytes.
///
/// Guests access it there without the device. The device accesses it for them where they move its BAR.
#[derive(Clone, Debug)]
pub struct VideoMemory {
    memory: DmaMemory,
    base: u64,
}

impl VideoMemory {
    /// The video memory at `base` in `memory`.
    pub fn new(memory: DmaMemory, base: u64) -> Self {
        Self { memory, base }
    }

    /// The guest-physical address of its first byte.
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// Where the `len` bytes at `offset` are, if they are inside.
    fn address(&self, offset: u64, len: usize) -> Option<GuestAddress> {
        let end = offset.checked_add(len as u64)?;
        (end <= VIDEO_MEMORY_LEN as u64).then_some(GuestAddress(self.base + offset))
    }

    /// Reads at `offset`: ones outside.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let address = self.address(offset, data.len());
        if address.is_none_or(|at| self.memory.read_slice(data, at).is_err()) {
            data.fill(0xff);
        }
    }

    /// Writes at `offset`, unless that is outside.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) {
        if let Some(address) = self.address(offset, data.len()) {
            let written = self.memory.write_slice(data, address);
            debug_assert!(written.is_ok(), "guest memory has the video memory");
        }
    }

    /// Clears the first `len` bytes.
    pub(super) fn clear(&self, len: usize) {
        let zeros = [0; CHUNK];
        for offset in (0..len).step_by(CHUNK) {
            let count = CHUNK.min(len - offset);
            self.write(offset as u64, zeros.get(..count).unwrap_or_default());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::virtio::WriteReporter;
    use vm_memory::mmap::MmapRegionBuilder;
    use vm_memory::{GuestMemoryMmap, GuestRegionMmap};

    pub(crate) const BASE: u64 = 0xd000_0000;

    /// Video memory at [`BASE`] in a memory of its own.
    pub(crate) fn video_memory() -> VideoMemory {
        let reporter = WriteReporter::new(BASE, Arc::new(|_, _| {}));
        let mapping = MmapRegionBuilder::new_with_bitmap(VIDEO_MEMORY_LEN, reporter)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
            .build()
            .unwrap();
        let region = GuestRegionMmap::new(mapping, GuestAddress(BASE)).unwrap();
        VideoMemory::new(GuestMemoryMmap::from_regions(vec![region]).unwrap(), BASE)
    }

    #[test]
    fn accesses_outside_of_the_memory_read_ones_and_change_nothing() {
        let memory = video_memory();
        let end = VIDEO_MEMORY_LEN as u64;
        memory.write(end - 4, &[1, 2, 3, 4]);
        memory.write(end - 2, &[9; 4]);
        memory.write(u64::MAX, &[9]);
        let mut data = [0; 4];
        memory.read(end - 4, &mut data);
        assert_eq!(data, [1, 2, 3, 4]);
        memory.read(end - 3, &mut data);
        assert_eq!(data, [0xff; 4]);
    }

    #[test]
    fn clearing_ends_at_the_last_byte() {
        let memory = video_memory();
        let len = CHUNK + 5;
        memory.write(len as u64 - 1, &[7, 8]);
        memory.clear(len);
        let mut data = [9; 2];
        memory.read(len as u64 - 1, &mut data);
        assert_eq!(data, [0, 8]);
        memory.clear(VIDEO_MEMORY_LEN);
    }
}
