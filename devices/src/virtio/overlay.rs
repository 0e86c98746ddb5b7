//! A disk whose changes stay in memory: the image is only read.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::block::{BlockBackend, BlockState};
use super::device::VirtioStateError;

/// Bytes of a block, the unit in which changes are kept.
const BLOCK: u64 = 4096;
const BLOCK_LEN: usize = 4096;

/// A disk whose changes stay in memory.
pub struct Overlay {
    base: Box<dyn BlockBackend>,
    blocks: BTreeMap<u64, Arc<[u8]>>,
    /// Maximum number of blocks that may be changed.
    blocks_max: usize,
}

impl std::fmt::Debug for Overlay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Overlay")
            .field("blocks", &self.blocks.len())
            .finish_non_exhaustive()
    }
}

impl Overlay {
    /// A disk that begins as `base`.
    ///
    /// A write fails if the changes would take more than `limit` bytes.
    pub fn new(base: Box<dyn BlockBackend>, limit: u64) -> Self {
        Self {
            base,
            blocks: BTreeMap::new(),
            blocks_max: usize::try_from(limit / BLOCK).unwrap_or(usize::MAX),
        }
    }

    /// Reads a block of the base image. Bytes after the end of the image are zero.
    fn base_block(&mut self, number: u64) -> io::Result<Arc<[u8]>> {
        let mut data = vec![0; BLOCK_LEN];
        let left = self.base.len().saturating_sub(number * BLOCK);
        let left = usize::try_from(left).map_or(BLOCK_LEN, |left| left.min(BLOCK_LEN));
        self.base.read(number * BLOCK, &mut data[..left])?;
        Ok(data.into())
    }

    /// Fails if no further block may be changed.
    fn check_limit(&self) -> io::Result<()> {
        if self.blocks.len() < self.blocks_max {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::StorageFull,
            "the changes of a disk with `snapshot` have reached their limit",
        ))
    }

    /// Calls `change` for each block of a range.
    ///
    /// Its arguments are the block's bytes that lie in the range, and their offset in the range.
    fn change(
        &mut self,
        offset: u64,
        len: u64,
        mut change: impl FnMut(&mut [u8], usize),
    ) -> io::Result<()> {
        for (number, within, at, count) in pieces(offset, len) {
            if !self.blocks.contains_key(&number) {
                self.check_limit()?;
                let block = self.base_block(number)?;
                self.blocks.insert(number, block);
            }
            if let Some(block) = self.blocks.get_mut(&number) {
                change(&mut Arc::make_mut(block)[within..within + count], at);
            }
        }
        Ok(())
    }
}

/// The pieces of a range: block, offset in the block, offset in the range, and length.
fn pieces(offset: u64, len: u64) -> impl Iterator<Item = (u64, usize, usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let position = offset + done;
        let within = position % BLOCK;
        let count = (BLOCK - within).min(len - done);
        let at = usize::try_from(done).ok()?;
        done += count;
        let (within, count) = (usize::try_from(within).ok()?, usize::try_from(count).ok()?);
        (count != 0).then_some((position / BLOCK, within, at, count))
    })
}

impl BlockBackend for Overlay {
    fn len(&self) -> u64 {
        self.base.len()
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if self.blocks.is_empty() {
            return self.base.read(offset, data);
        }
        for (number, within, at, count) in pieces(offset, data.len() as u64) {
            let to = &mut data[at..at + count];
            match self.blocks.get(&number) {
                Some(block) => to.copy_from_slice(&block[within..within + count]),
                None => self.base.read(number * BLOCK + within as u64, to)?,
            }
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(offset, data.len() as u64, |part, at| {
            part.copy_from_slice(&data[at..at + part.len()]);
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&mut self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn write_zeroes(&mut self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        let zeroes: Arc<[u8]> = vec![0; BLOCK_LEN].into();
        for (number, _, at, count) in pieces(offset, len) {
            if count != BLOCK_LEN {
                self.change(offset + at as u64, count as u64, |part, _| part.fill(0))?;
                continue;
            }
            if !self.blocks.contains_key(&number) {
                self.check_limit()?;
            }
            self.blocks.insert(number, Arc::clone(&zeroes));
        }
        Ok(())
    }

    fn save(&self) -> BlockState {
        BlockState {
            blocks: self.blocks.clone(),
        }
    }

    fn restore(&mut self, state: &BlockState) -> Result<(), VirtioStateError> {
        let blocks = self.base.len().div_ceil(BLOCK);
        let fits =
            |(&number, data): (&u64, &Arc<[u8]>)| number < blocks && data.len() as u64 == BLOCK;
        if !state.blocks.iter().all(fits) || state.blocks.len() > self.blocks_max {
            return Err(VirtioStateError::Disk);
        }
        self.blocks.clone_from(&state.blocks);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::test_driver::MemoryDisk;

    fn overlay(limit: u64) -> Overlay {
        let base = MemoryDisk::new((0..10_240).map(|n: u32| n.to_le_bytes()[0]).collect());
        Overlay::new(Box::new(base), limit)
    }

    fn read(disk: &mut Overlay, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        disk.read(offset, &mut data).unwrap();
        data
    }

    #[test]
    fn changes_cover_the_base_across_blocks() {
        let mut disk = overlay(1 << 20);
        disk.write(4000, &[1; 200]).unwrap();
        assert_eq!(read(&mut disk, 3999, 2), [159, 1]);
        assert_eq!(read(&mut disk, 4199, 2), [1, 104]);
        assert_eq!(disk.save().blocks.len(), 2);
        disk.write_zeroes(10_238, 2, true).unwrap();
        assert_eq!(read(&mut disk, 10_236, 4), [252, 253, 0, 0]);
        disk.write_zeroes(100, 8100, false).unwrap();
        assert_eq!(read(&mut disk, 99, 8102)[..2], [99, 0]);
        assert!(read(&mut disk, 100, 8100).iter().all(|byte| *byte == 0));
        assert_eq!(read(&mut disk, 8200, 1), [8]);
        disk.write(5000, &[3]).unwrap();
        assert_eq!(read(&mut disk, 4999, 3), [0, 3, 0]);
    }

    #[test]
    fn changes_beyond_the_limit_fail() {
        let mut disk = overlay(4096);
        disk.write(0, &[1]).unwrap();
        let error = disk.write(4096, &[1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        disk.write(1, &[2]).unwrap();
        assert_eq!(read(&mut disk, 0, 3), [1, 2, 2]);
    }

    #[test]
    fn restored_disk_has_the_saved_contents() {
        let mut disk = overlay(1 << 20);
        disk.write(10, &[7]).unwrap();
        let saved = disk.save();
        disk.write(10, &[8]).unwrap();
        disk.restore(&saved).unwrap();
        assert_eq!(read(&mut disk, 10, 1), [7]);
        let bad = |number, len| BlockState {
            blocks: [(number, vec![0; len].into())].into(),
        };
        for state in [bad(3, 4096), bad(0, 512)] {
            assert_eq!(disk.restore(&state), Err(VirtioStateError::Disk));
        }
        assert_eq!(disk.save(), saved);
    }
}
