//! A NOR flash chip, as firmware keeps its variables in: Intel's command set, 8 bits wide.
//!
//! JEDEC JESD68.01, "Common Flash Interface (CFI)", with command set 0001h (Intel StrataFlash data sheets).
//! Blocks have 4 KiB. Programming clears bits, and only erasing a block sets them. Operations complete at once.
//! Deviation: CLEAR STATUS also clears the ready bit, until the next operation, and returns to the array. OVMF
//! detects flash by that.

mod query;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::sync::Arc;

use bitflags::bitflags;
use thiserror::Error;

use crate::bus::Device;
use query::{IDENTIFIERS, query_table};

/// Bytes of a block, which is erased as a whole.
pub const FLASH_BLOCK: usize = 0x1000;
/// Most bytes that one buffered program operation takes.
const BUFFER_MAX: usize = 256;

bitflags! {
    /// The status register.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct FlashStatus: u8 {
        /// SR.4: programming failed.
        const PROGRAM_ERROR = 1 << 4;
        /// SR.5: erasing failed.
        const ERASE_ERROR = 1 << 5;
        /// SR.7: no operation is in progress.
        const READY = 1 << 7;
    }
}

impl FlashStatus {
    /// An impossible sequence of commands.
    const SEQUENCE_ERROR: Self = Self::PROGRAM_ERROR.union(Self::ERASE_ERROR);
}

/// What the next access reads or completes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum FlashMode {
    /// Reads return the contents.
    #[default]
    Array,
    /// Reads return the status register.
    Status,
    /// Reads return the maker and the chip.
    Identifier,
    /// Reads return the CFI table.
    Query,
    /// The next write is programmed.
    Program,
    /// The next write confirms that a block is erased.
    Erase,
    /// The next write locks or unlocks a block, which has no effect.
    Lock,
    /// The next write is the number of bytes of the buffer, less one.
    BufferCount,
    /// Writes go to the buffer, up to `bytes` of them; the one after them confirms.
    Buffer {
        /// Bytes that are still to come.
        left: usize,
        /// Offsets and values of those that came.
        bytes: Vec<(u64, u8)>,
    },
}

/// Receives the changes of the contents, to keep them.
pub trait FlashStore: Send {
    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// The host cannot keep the data; the guest's operation fails.
    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;
}

/// The saved state of a flash chip.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FlashState {
    /// What the next access reads or completes.
    pub mode: FlashMode,
    /// The status register.
    pub status: u8,
    /// The numbers and the contents of the blocks that were changed since the machine was built.
    pub changed: Vec<(usize, Vec<u8>)>,
}

/// A state that belongs to another chip, or contents that no chip has.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FlashError {
    /// The contents are empty or not whole blocks.
    #[error("flash memory has whole blocks of 4 KiB, and {0:#x} bytes are none")]
    Size(usize),
    /// A changed block is not of this chip, or the buffer is larger than this chip's.
    #[error("the state of the flash memory is invalid")]
    State,
}

/// A flash chip.
pub struct Flash {
    contents: Vec<u8>,
    /// The contents when the machine was built.
    first: Arc<[u8]>,
    mode: FlashMode,
    status: FlashStatus,
    store: Option<Box<dyn FlashStore>>,
    /// A failure of the store was logged.
    reported: bool,
}

impl fmt::Debug for Flash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flash")
            .field("len", &self.contents.len())
            .field("mode", &self.mode)
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

impl Flash {
    /// A chip with these contents, whose changes go to `store`, if there is one.
    ///
    /// # Errors
    /// The contents are empty, or not whole blocks.
    pub fn new(contents: Vec<u8>, store: Option<Box<dyn FlashStore>>) -> Result<Self, FlashError> {
        if contents.is_empty() || !contents.len().is_multiple_of(FLASH_BLOCK) {
            return Err(FlashError::Size(contents.len()));
        }
        Ok(Self {
            first: contents.as_slice().into(),
            contents,
            mode: FlashMode::Array,
            status: FlashStatus::READY,
            store,
            reported: false,
        })
    }

    /// Bytes of the chip.
    pub fn size(&self) -> u64 {
        self.contents.len() as u64
    }

    /// Applies a reset: reads return the contents, which stay.
    pub fn reset(&mut self) {
        self.mode = FlashMode::Array;
        self.status = FlashStatus::READY;
    }

    /// The state, to be saved.
    pub fn save(&self) -> FlashState {
        let blocks = self.contents.chunks(FLASH_BLOCK);
        let pairs = blocks.zip(self.first.chunks(FLASH_BLOCK)).enumerate();
        FlashState {
            mode: self.mode.clone(),
            status: self.status.bits(),
            changed: pairs
                .filter(|(_, (now, first))| now != first)
                .map(|(number, (now, _))| (number, now.to_vec()))
                .collect(),
        }
    }

    /// Restores a state. The store does not receive it.
    ///
    /// # Errors
    /// The state is of another chip or invalid; nothing has changed.
    pub fn restore(&mut self, state: &FlashState) -> Result<(), FlashError> {
        let buffered = match &state.mode {
            FlashMode::Buffer { left, bytes } => left.saturating_add(bytes.len()),
            _ => 0,
        };
        let mut contents = self.first.to_vec();
        for (number, block) in &state.changed {
            let start = number.checked_mul(FLASH_BLOCK).ok_or(FlashError::State)?;
            let to = contents.get_mut(start..).ok_or(FlashError::State)?;
            if to.is_empty() || block.len() != FLASH_BLOCK {
                return Err(FlashError::State);
            }
            to[..FLASH_BLOCK].copy_from_slice(block);
        }
        if buffered > BUFFER_MAX {
            return Err(FlashError::State);
        }
        self.contents = contents;
        self.mode = state.mode.clone();
        self.status = FlashStatus::from_bits_truncate(state.status);
        Ok(())
    }

    /// The first cycle of a command.
    fn command(&mut self, command: u8) {
        self.mode = match command {
            0x10 | 0x40 => FlashMode::Program,
            0x20 | 0x28 => FlashMode::Erase,
            0x50 => {
                self.status = FlashStatus::empty();
                FlashMode::Array
            }
            0x60 => FlashMode::Lock,
            0x70 => FlashMode::Status,
            0x90 => FlashMode::Identifier,
            0x98 => FlashMode::Query,
            0xe8 => {
                self.status |= FlashStatus::READY;
                FlashMode::BufferCount
            }
            _ => FlashMode::Array,
        };
    }

    /// Completes an operation, with `error` where it failed.
    fn complete(&mut self, error: FlashStatus) {
        self.status |= FlashStatus::READY | error;
        self.mode = FlashMode::Status;
    }

    /// The contents at `offset`; `None` unless the chip has all `len` bytes.
    fn range(&mut self, offset: u64, len: usize) -> Option<&mut [u8]> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(len)?;
        self.contents.get_mut(start..end)
    }

    /// Passes the contents of a range to the store. Returns whether it was kept.
    fn keep(&mut self, offset: u64, len: usize) -> bool {
        let Ok(start) = usize::try_from(offset) else {
            return false;
        };
        let (Some(store), Some(data)) = (
            &mut self.store,
            self.contents.get(start..start.saturating_add(len)),
        ) else {
            return true;
        };
        match store.write(offset, data) {
            Ok(()) => true,
            Err(error) => {
                if !std::mem::replace(&mut self.reported, true) {
                    tracing::warn!("the firmware's variables cannot be written: {error}");
                }
                false
            }
        }
    }

    fn program(&mut self, offset: u64, data: &[u8]) -> FlashStatus {
        let Some(to) = self.range(offset, data.len()) else {
            return FlashStatus::PROGRAM_ERROR;
        };
        for (to, from) in to.iter_mut().zip(data) {
            *to &= from;
        }
        if self.keep(offset, data.len()) {
            FlashStatus::empty()
        } else {
            FlashStatus::PROGRAM_ERROR
        }
    }

    fn erase(&mut self, offset: u64) -> FlashStatus {
        let start = offset / FLASH_BLOCK as u64 * FLASH_BLOCK as u64;
        let Some(block) = self.range(start, FLASH_BLOCK) else {
            return FlashStatus::ERASE_ERROR;
        };
        block.fill(0xff);
        if self.keep(start, FLASH_BLOCK) {
            FlashStatus::empty()
        } else {
            FlashStatus::ERASE_ERROR
        }
    }

    /// Adds a write to the buffer, or programs the buffer when it is confirmed.
    fn buffer(&mut self, offset: u64, data: &[u8], (left, mut bytes): (usize, Vec<(u64, u8)>)) {
        if left != 0 {
            let taken = data.len().min(left);
            bytes.extend((offset..).zip(data[..taken].iter().copied()));
            let left = left - taken;
            self.mode = FlashMode::Buffer { left, bytes };
            return;
        }
        let block = |at: u64| at / FLASH_BLOCK as u64;
        let mut blocks = bytes.iter().map(|&(at, _)| block(at));
        let first = blocks.next();
        let error = if data[0] != 0xd0 || blocks.any(|other| Some(other) != first) {
            FlashStatus::SEQUENCE_ERROR
        } else {
            let programmed = bytes.iter().map(|&(at, byte)| self.program(at, &[byte]));
            programmed.fold(FlashStatus::empty(), FlashStatus::union)
        };
        self.complete(error);
    }
}

impl Device for Flash {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match self.mode {
            FlashMode::Array => match self.range(offset, data.len()) {
                Some(contents) => data.copy_from_slice(contents),
                None => data.fill(0xff),
            },
            FlashMode::Identifier | FlashMode::Query => {
                let table = if self.mode == FlashMode::Query {
                    query_table(self.contents.len())
                } else {
                    IDENTIFIERS.to_vec()
                };
                for (byte, at) in data.iter_mut().zip(offset..) {
                    let at = usize::try_from(at).unwrap_or(usize::MAX);
                    *byte = table.get(at).copied().unwrap_or(0);
                }
            }
            _ => data.fill(self.status.bits()),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let Some(&value) = data.first() else { return };
        match std::mem::take(&mut self.mode) {
            FlashMode::Array | FlashMode::Status | FlashMode::Identifier | FlashMode::Query => {
                self.command(value);
            }
            FlashMode::Program => {
                let error = self.program(offset, data);
                self.complete(error);
            }
            FlashMode::Erase => match value {
                0xd0 => {
                    let error = self.erase(offset);
                    self.complete(error);
                }
                0xff => {}
                _ => self.complete(FlashStatus::SEQUENCE_ERROR),
            },
            FlashMode::Lock => match value {
                0x01 | 0xd0 => self.complete(FlashStatus::empty()),
                _ => self.complete(FlashStatus::SEQUENCE_ERROR),
            },
            FlashMode::BufferCount => {
                let left = usize::from(value) + 1;
                let bytes = Vec::with_capacity(left);
                self.mode = FlashMode::Buffer { left, bytes };
            }
            FlashMode::Buffer { left, bytes } => self.buffer(offset, data, (left, bytes)),
        }
    }
}
