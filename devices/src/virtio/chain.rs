//! One request of a driver: the buffers of a descriptor chain.

use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use super::memory::DmaMemory;
use super::queues::QueueError;

/// Buffers of a chain, with an indirect table: four times as many as QEMU accepts.
pub(super) const BUFFERS_MAX: usize = 4096;

/// A part of a buffer in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BufferPart {
    address: u64,
    len: u32,
}

/// A descriptor chain whose buffers are all in guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    head: u16,
    readable: Vec<BufferPart>,
    writable: Vec<BufferPart>,
}

impl Chain {
    /// Collects the descriptors of a chain.
    ///
    /// # Errors
    /// The chain loops or is too long, a table or buffer is not in memory, or a device-readable buffer follows a
    /// device-writable one.
    pub(super) fn collect(
        descriptors: DescriptorChain<&DmaMemory>,
        memory: &DmaMemory,
    ) -> Result<Self, QueueError> {
        let mut chain = Self {
            head: descriptors.head_index(),
            readable: Vec::new(),
            writable: Vec::new(),
        };
        let mut complete = false;
        for descriptor in descriptors {
            // The iterator ends early, without an error, at anything that it cannot follow.
            complete = !descriptor.has_next();
            if chain.buffer_count() == BUFFERS_MAX {
                return Err(QueueError::Long(chain.head));
            }
            let part = BufferPart {
                address: descriptor.addr().0,
                len: descriptor.len(),
            };
            let access = if descriptor.is_write_only() {
                Permissions::Write
            } else {
                Permissions::Read
            };
            if !memory.check_range(descriptor.addr(), part.len as usize, access) {
                return Err(QueueError::NotMemory {
                    address: part.address,
                    len: part.len,
                });
            }
            if descriptor.is_write_only() {
                chain.writable.push(part);
            } else if chain.writable.is_empty() {
                chain.readable.push(part);
            } else {
                return Err(QueueError::Order(chain.head));
            }
        }
        if complete {
            Ok(chain)
        } else {
            Err(QueueError::Endless(chain.head))
        }
    }

    /// The index of the first descriptor, which the used ring names.
    pub(super) fn head(&self) -> u16 {
        self.head
    }

    /// Number of buffers.
    pub fn buffer_count(&self) -> usize {
        self.readable.len() + self.writable.len()
    }

    /// Bytes that the device may read.
    pub fn readable_len(&self) -> usize {
        self.readable.iter().map(|s| s.len as usize).sum()
    }

    /// Bytes that the device may write.
    pub fn writable_len(&self) -> usize {
        self.writable.iter().map(|s| s.len as usize).sum()
    }

    /// Copies bytes from `offset` in the readable buffers on. Returns how many there were.
    ///
    /// # Errors
    /// Guest memory cannot be read.
    pub fn read(
        &self,
        memory: &DmaMemory,
        offset: usize,
        data: &mut [u8],
    ) -> Result<usize, QueueError> {
        let mut done = 0;
        for (address, len) in parts(&self.readable, offset, data.len()) {
            let to = &mut data[done..done + len];
            let read = memory.read_slice(to, GuestAddress(address));
            read.map_err(|_| QueueError::not_memory(address, len))?;
            done += len;
        }
        Ok(done)
    }

    /// Copies bytes to the writable buffers, from `offset` on. Returns how many bytes fitted.
    ///
    /// # Errors
    /// Guest memory cannot be written.
    pub fn write(
        &self,
        memory: &DmaMemory,
        offset: usize,
        data: &[u8],
    ) -> Result<usize, QueueError> {
        let mut done = 0;
        for (address, len) in parts(&self.writable, offset, data.len()) {
            let written = memory.write_slice(&data[done..done + len], GuestAddress(address));
            written.map_err(|_| QueueError::not_memory(address, len))?;
            done += len;
        }
        Ok(done)
    }
}

/// Addresses and lengths of `len` bytes from `offset` on, as far as the buffers extend.
fn parts(
    buffers: &[BufferPart],
    offset: usize,
    len: usize,
) -> impl Iterator<Item = (u64, usize)> + '_ {
    let (mut skip, mut left) = (offset, len);
    buffers.iter().filter_map(move |part| {
        let size = part.len as usize;
        let begin = skip.min(size);
        skip -= begin;
        let count = (size - begin).min(left);
        left -= count;
        (count != 0).then_some((part.address + begin as u64, count))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_range_across_segments() {
        let part = |address, len| BufferPart { address, len };
        let buffers = [part(0x100, 4), part(0x200, 0), part(0x300, 8)];
        let cut = |offset, len| parts(&buffers, offset, len).collect::<Vec<_>>();
        assert_eq!(cut(0, 12), [(0x100, 4), (0x300, 8)]);
        assert_eq!(cut(2, 4), [(0x102, 2), (0x300, 2)]);
        assert_eq!(cut(5, 100), [(0x301, 7)]);
        assert_eq!(cut(12, 1), []);
    }
}
