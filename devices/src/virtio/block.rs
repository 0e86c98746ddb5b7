//! Virtio disks. VIRTIO 1.2, "Block Device".

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::chain::Chain;
use super::device::{VirtioDevice, VirtioDeviceState, VirtioKind, VirtioStateError};
use super::memory::DmaMemory;
use super::queues::{QueueError, SLOW_REQUEST, VirtQueues};

/// Bytes of a sector, the unit of requests.
pub const SECTOR: u64 = 512;
const SECTOR_LEN: usize = 512;
/// Bytes that are copied at once between disk and guest memory.
const COPY_LEN: usize = 1 << 17;
/// Bytes of the identification string.
const ID_LEN: usize = 20;
const QUEUE_SIZE: u16 = 256;
/// Buffers of one request.
const SEGMENTS_MAX: u32 = 254;
/// Segments of one discard request, and sectors of one segment.
const RANGES_MAX: u32 = 16;
const RANGE_SECTORS_MAX: u32 = 1 << 22;
/// Sectors of the one segment of a write-zeroes request: the host may have to write them.
const ZERO_SECTORS_MAX: u32 = 1 << 17;
/// Bytes of one read or write. OVMF's driver makes requests of up to this size.
const TRANSFER_MAX: u64 = 1 << 30;
/// Failures of one disk that are logged.
const REPORTED_MAX: u32 = 16;

const FEATURE_SEG_MAX: u64 = 1 << 2;
const FEATURE_READ_ONLY: u64 = 1 << 5;
const FEATURE_BLOCK_SIZE: u64 = 1 << 6;
const FEATURE_FLUSH: u64 = 1 << 9;
const FEATURE_TOPOLOGY: u64 = 1 << 10;
const FEATURE_QUEUES: u64 = 1 << 12;
const FEATURE_DISCARD: u64 = 1 << 13;
const FEATURE_WRITE_ZEROES: u64 = 1 << 14;

const REQUEST_IN: u32 = 0;
const REQUEST_OUT: u32 = 1;
const REQUEST_FLUSH: u32 = 4;
const REQUEST_GET_ID: u32 = 8;
const REQUEST_DISCARD: u32 = 11;
const REQUEST_WRITE_ZEROES: u32 = 13;

const HEADER_LEN: usize = 16;
const RANGE_LEN: usize = 16;

const STATUS_OK: u8 = 0;
const STATUS_ERROR: u8 = 1;
const STATUS_UNSUPPORTED: u8 = 2;

/// The contents of a disk.
pub trait BlockBackend: Send {
    /// Bytes of the disk; those after the last whole sector are not used.
    fn len(&self) -> u64;

    /// Whether the disk has no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether writes are refused.
    fn read_only(&self) -> bool;

    /// Reads bytes.
    ///
    /// # Errors
    /// The host cannot read them.
    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()>;

    /// Writes bytes.
    ///
    /// # Errors
    /// The host cannot write them, for instance because its disk is full.
    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Makes all that was written durable.
    ///
    /// # Errors
    /// The host cannot write it.
    fn flush(&mut self) -> io::Result<()>;

    /// Frees the space of bytes whose contents no longer matter.
    ///
    /// # Errors
    /// The host cannot change the image.
    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes bytes read as zero; `unmap` allows to free their space.
    ///
    /// # Errors
    /// The host cannot change the image.
    fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;

    /// What a snapshot of the machine must contain of the disk.
    fn save(&self) -> BlockState {
        BlockState::default()
    }

    /// Restores the contents of a snapshot.
    ///
    /// # Errors
    /// The state is of another disk; nothing has changed.
    fn restore(&mut self, state: &BlockState) -> Result<(), VirtioStateError> {
        if state.blocks.is_empty() {
            Ok(())
        } else {
            Err(VirtioStateError::Disk)
        }
    }
}

/// The saved contents of a disk: the blocks that the guest changed, if the disk keeps them in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BlockState {
    /// By number of the block.
    pub blocks: BTreeMap<u64, Arc<[u8]>>,
}

/// A virtio disk.
pub struct VirtioDisk {
    backend: Box<dyn BlockBackend>,
    /// The file's name, for the log.
    name: String,
    id: [u8; ID_LEN],
    queues: u16,
    buffer: Vec<u8>,
    reported: u32,
}

impl std::fmt::Debug for VirtioDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtioDisk")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A request, and what the device has written to its chain so far.
struct Request<'a> {
    chain: &'a Chain,
    memory: &'a DmaMemory,
    kind: u32,
    sector: u64,
    /// Bytes that the device has written to the chain, without the status.
    written: usize,
}

/// Why a request is answered with an error.
enum Refusal {
    /// The device does not know the request.
    Unsupported,
    /// The request leaves the disk, or is malformed in itself.
    Invalid,
    /// The host failed.
    Host(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

/// An answer to the guest, or an error of its driver.
type DiskAnswer = Result<Result<(), Refusal>, QueueError>;

impl VirtioDisk {
    /// A disk with `backend`'s contents and one queue for each of `cpus` processors, up to 4. `name` is
    /// the file's name; its last 20 bytes are the disk's serial number.
    pub fn new(backend: Box<dyn BlockBackend>, name: &str, cpus: usize) -> Self {
        let mut id = [0; ID_LEN];
        let serial = &name.as_bytes()[name.len().saturating_sub(ID_LEN)..];
        id[..serial.len()].copy_from_slice(serial);
        Self {
            backend,
            name: name.to_owned(),
            id,
            queues: u16::try_from(cpus.clamp(1, 4)).unwrap_or(1),
            buffer: vec![0; COPY_LEN],
            reported: 0,
        }
    }

    /// The first byte of `len` bytes from a sector on, if all are on the disk.
    fn range(&self, sector: u64, len: u64) -> Result<u64, Refusal> {
        let first = sector.checked_mul(SECTOR).ok_or(Refusal::Invalid)?;
        let end = first.checked_add(len).ok_or(Refusal::Invalid)?;
        if end <= self.backend.len() / SECTOR * SECTOR {
            Ok(first)
        } else {
            Err(Refusal::Invalid)
        }
    }

    /// As [`VirtioDisk::range`], of whole sectors that one request may transfer.
    fn transfer(&self, sector: u64, len: usize) -> Result<u64, Refusal> {
        if !len.is_multiple_of(SECTOR_LEN) || len as u64 > TRANSFER_MAX {
            return Err(Refusal::Invalid);
        }
        self.range(sector, len as u64)
    }

    fn read(&mut self, request: &mut Request<'_>) -> DiskAnswer {
        let len = request.chain.writable_len() - 1;
        let first = match self.transfer(request.sector, len) {
            Ok(first) => first,
            Err(refusal) => return Ok(Err(refusal)),
        };
        while request.written < len {
            let count = (len - request.written).min(COPY_LEN);
            let data = &mut self.buffer[..count];
            if let Err(error) = self.backend.read(first + request.written as u64, data) {
                return Ok(Err(error.into()));
            }
            request.chain.write(request.memory, request.written, data)?;
            request.written += count;
        }
        Ok(Ok(()))
    }

    fn write(&mut self, request: &Request<'_>) -> DiskAnswer {
        let len = request.chain.readable_len() - HEADER_LEN;
        let first = match self.transfer(request.sector, len) {
            Ok(first) if !self.backend.read_only() => first,
            _ => return Ok(Err(Refusal::Invalid)),
        };
        let mut done = 0;
        while done < len {
            let count = (len - done).min(COPY_LEN);
            let data = &mut self.buffer[..count];
            request
                .chain
                .read(request.memory, HEADER_LEN + done, data)?;
            if let Err(error) = self.backend.write(first + done as u64, data) {
                return Ok(Err(error.into()));
            }
            done += count;
        }
        Ok(Ok(()))
    }

    /// Serves a discard or write-zeroes request.
    fn ranges(&mut self, request: &Request<'_>) -> DiskAnswer {
        let len = request.chain.readable_len() - HEADER_LEN;
        let most = match request.kind {
            REQUEST_DISCARD => RANGES_MAX as usize,
            _ => 1,
        };
        if len == 0 || !len.is_multiple_of(RANGE_LEN) || len > most * RANGE_LEN {
            return Ok(Err(Refusal::Invalid));
        }
        let mut bytes = [0; RANGE_LEN];
        for at in (HEADER_LEN..HEADER_LEN + len).step_by(RANGE_LEN) {
            request.chain.read(request.memory, at, &mut bytes)?;
            if let Err(refusal) = self.one_range(request.kind, bytes) {
                return Ok(Err(refusal));
            }
        }
        Ok(Ok(()))
    }

    fn one_range(&mut self, kind: u32, bytes: [u8; RANGE_LEN]) -> Result<(), Refusal> {
        let [sector, rest] = [0, 8].map(|at| {
            let word = bytes[at..at + 8].try_into();
            u64::from_le_bytes(word.expect("half of 16 bytes"))
        });
        let (sectors, flags) = (rest & 0xffff_ffff, rest >> 32);
        // Only write-zeroes has a flag, bit 0: unmap.
        let known = if kind == REQUEST_WRITE_ZEROES { 1 } else { 0 };
        if flags & !known != 0 {
            return Err(Refusal::Unsupported);
        }
        let len = sectors * SECTOR;
        let first = self.range(sector, len)?;
        let most = match kind {
            REQUEST_DISCARD => RANGE_SECTORS_MAX,
            _ => ZERO_SECTORS_MAX,
        };
        if self.backend.read_only() || sectors > most.into() {
            return Err(Refusal::Invalid);
        }
        if kind == REQUEST_DISCARD {
            self.backend.discard(first, len)?;
        } else {
            self.backend.write_zeroes(first, len, flags != 0)?;
        }
        Ok(())
    }

    fn answer(&mut self, request: &mut Request<'_>) -> DiskAnswer {
        match request.kind {
            REQUEST_IN => self.read(request),
            REQUEST_OUT => self.write(request),
            REQUEST_FLUSH => Ok(self.backend.flush().map_err(Refusal::from)),
            REQUEST_GET_ID => {
                let len = request.chain.writable_len() - 1;
                let id = &self.id[..len.min(ID_LEN)];
                request.written = request.chain.write(request.memory, 0, id)?;
                Ok(Ok(()))
            }
            REQUEST_DISCARD | REQUEST_WRITE_ZEROES => self.ranges(request),
            _ => Ok(Err(Refusal::Unsupported)),
        }
    }

    fn report(&mut self, kind: u32, sector: u64, error: &io::Error) {
        self.reported = self.reported.saturating_add(1);
        let action = match kind {
            REQUEST_IN => "read",
            REQUEST_OUT => "write",
            REQUEST_FLUSH => "flush",
            _ => "discard",
        };
        match self.reported {
            ..REPORTED_MAX => {
                tracing::error!("{}: {action} at sector {sector} failed: {error}", self.name);
            }
            REPORTED_MAX => tracing::error!("{}: further failures are not logged", self.name),
            _ => {}
        }
    }

    /// Serves one request. Returns the bytes written to the chain, and the cost besides its bytes.
    fn serve(&mut self, chain: &Chain, memory: &DmaMemory) -> Result<(usize, usize), QueueError> {
        let mut header = [0; HEADER_LEN];
        if chain.read(memory, 0, &mut header)? != HEADER_LEN {
            return Err(QueueError::Request("a disk request has no header"));
        }
        let status_at = chain.writable_len().checked_sub(1);
        let status_at = status_at.ok_or(QueueError::Request("a disk request has no status"))?;
        let [kind, _, low, high] = [0, 4, 8, 12].map(|at| {
            let word = header[at..at + 4].try_into();
            u32::from_le_bytes(word.expect("a quarter of 16 bytes"))
        });
        let mut request = Request {
            chain,
            memory,
            kind,
            sector: u64::from(low) | u64::from(high) << 32,
            written: 0,
        };
        let status = match self.answer(&mut request)? {
            Ok(()) => STATUS_OK,
            Err(Refusal::Unsupported) => STATUS_UNSUPPORTED,
            Err(Refusal::Invalid) => STATUS_ERROR,
            Err(Refusal::Host(error)) => {
                self.report(request.kind, request.sector, &error);
                STATUS_ERROR
            }
        };
        chain.write(memory, status_at, &[status])?;
        let cost = match kind {
            REQUEST_FLUSH | REQUEST_DISCARD => SLOW_REQUEST,
            REQUEST_WRITE_ZEROES => ZERO_SECTORS_MAX as usize * SECTOR_LEN,
            _ => 0,
        };
        // The used length covers the status, which follows all data.
        Ok((status_at + 1, cost))
    }
}

impl VirtioDevice for VirtioDisk {
    fn kind(&self) -> VirtioKind {
        VirtioKind::Block
    }

    fn features(&self) -> u64 {
        let common = FEATURE_SEG_MAX | FEATURE_BLOCK_SIZE | FEATURE_FLUSH | FEATURE_TOPOLOGY;
        let kind = if self.backend.read_only() {
            FEATURE_READ_ONLY
        } else {
            FEATURE_DISCARD | FEATURE_WRITE_ZEROES
        };
        common | kind | FEATURE_QUEUES
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; self.queues.into()]
    }

    fn config(&self) -> Vec<u8> {
        let mut config = Vec::with_capacity(60);
        config.extend((self.backend.len() / SECTOR).to_le_bytes());
        config.extend(0_u32.to_le_bytes());
        config.extend(SEGMENTS_MAX.to_le_bytes());
        // No geometry.
        config.extend([0; 4]);
        config.extend(&SECTOR.to_le_bytes()[..4]);
        // Physical blocks of 8 sectors, aligned; transfers of at least one, at best of 64 KiB.
        config.extend([3, 0]);
        config.extend(8_u16.to_le_bytes());
        config.extend(128_u32.to_le_bytes());
        // The cache mode cannot be changed.
        config.extend([0, 0]);
        config.extend(self.queues.to_le_bytes());
        config.extend(RANGE_SECTORS_MAX.to_le_bytes());
        config.extend(RANGES_MAX.to_le_bytes());
        // The alignment of discards.
        config.extend(8_u32.to_le_bytes());
        config.extend(ZERO_SECTORS_MAX.to_le_bytes());
        config.extend(1_u32.to_le_bytes());
        // Write zeroes may unmap.
        config.extend([1, 0, 0, 0]);
        config
    }

    fn process(&mut self, queues: &mut VirtQueues<'_>, index: usize) -> Result<(), QueueError> {
        while let Some(chain) = queues.pop(index)? {
            let (written, cost) = self.serve(&chain, queues.memory())?;
            queues.charge(cost);
            queues.complete(index, &chain, written)?;
        }
        Ok(())
    }

    fn save(&self) -> VirtioDeviceState {
        VirtioDeviceState::Block(self.backend.save())
    }

    fn restore(&mut self, state: &VirtioDeviceState) -> Result<(), VirtioStateError> {
        match state {
            VirtioDeviceState::Block(state) => self.backend.restore(state),
            _ => Err(VirtioStateError::OtherDevices),
        }
    }
}

#[cfg(test)]
mod tests;
