//! A virtio SCSI host adapter with one CD-ROM drive. VIRTIO 1.2, "SCSI Host Device".
//!
//! BIOSes boot from it by El Torito, and Linux has the drive as `/dev/sr0`. The drive is target 0, LUN
//! 0. There are no hot-plug events, and task management succeeds at once, since every command is
//! complete when the driver's notification returns.

mod cdrom;
mod command;

use std::ops::RangeInclusive;

use super::block::{BlockBackend, SECTOR};
use super::chain::Chain;
use super::device::{VirtioDevice, VirtioDeviceState, VirtioKind, VirtioStateError};
use super::memory::DmaMemory;
use super::queues::{QueueError, VirtQueues};
pub use cdrom::BLOCK;
use cdrom::{CdDrive, CdReply};
use command::{CDB_LEN, CDB_MAX, Response, ScsiRequest, Sense, response_len};

const CONTROL_QUEUE: usize = 0;
const EVENT_QUEUE: usize = 1;
const QUEUE_SIZE: u16 = 128;
/// Buffers of the data of one request.
const SEGMENTS_MAX: u32 = 126;
/// Buffers of one request: its data, the request and the response.
const BUFFERS_MAX: usize = SEGMENTS_MAX as usize + 2;
/// Sectors of 512 bytes of one request.
const SECTORS_MAX: u32 = 0xffff;
/// Bytes of one request.
const TRANSFER_MAX: u64 = SECTORS_MAX as u64 * SECTOR;
/// Requests of the drive at a time.
const COMMANDS_MAX: u32 = 64;
const EVENT_LEN: u32 = 16;
/// Offset of the size of sense data in the configuration, and its value after reset.
const SENSE_SIZE: usize = 20;
const SENSE_SIZE_RESET: u32 = 96;
/// Sizes of sense data that the driver may set. SPC-4 limits it to 252 bytes.
const SENSE_SIZES: RangeInclusive<u32> = 0..=252;
/// Offset of the size of commands in the configuration, and its value after reset.
const CDB_SIZE: usize = 24;
const CDB_SIZE_RESET: u32 = 32;
/// Sizes of commands that the driver may set.
const CDB_SIZES: RangeInclusive<u32> = 6..=260;
const _: () = assert!(
    CDB_SIZE_RESET as usize == CDB_LEN && *CDB_SIZES.end() as usize == CDB_MAX,
    "requests have these sizes"
);
/// Bytes of the answer of a control request: of a query of events, and at least of task management.
const CONTROL_ANSWER: [u8; 5] = [0; 5];
/// Bytes that are copied at once between the disc and guest memory.
const COPY_LEN: usize = 1 << 16;

/// The host adapter with its drive.
#[derive(Debug)]
pub struct VirtioCdrom {
    drive: CdDrive,
    buffer: Vec<u8>,
    /// Bytes of sense data in a response.
    sense_size: u32,
    /// Bytes of the command in a request.
    cdb_size: u32,
}

impl VirtioCdrom {
    /// A drive with a disc of `backend`'s contents. `name` is the file's name, for the log.
    pub fn new(backend: Box<dyn BlockBackend>, name: &str) -> Self {
        Self {
            drive: CdDrive::new(backend, name),
            buffer: vec![0; COPY_LEN],
            sense_size: SENSE_SIZE_RESET,
            cdb_size: CDB_SIZE_RESET,
        }
    }

    /// Serves one command. Returns the bytes written to the chain.
    fn serve(&mut self, chain: &Chain, memory: &DmaMemory) -> Result<usize, QueueError> {
        if chain.buffer_count() > BUFFERS_MAX {
            return Err(QueueError::Request("a SCSI request has too many buffers"));
        }
        let request = ScsiRequest::read(chain, memory, self.cdb_size as usize)?;
        let response_len = self.response_len();
        let space = chain.writable_len().checked_sub(response_len);
        let space = space.ok_or(QueueError::Request("a SCSI request has no response"))?;
        let (response, copied) = if request.is_for_drive() {
            self.execute(&request.cdb, (chain, memory), space)?
        } else {
            (Response::bad_target(), 0)
        };
        let response = response.bytes(self.sense_size as usize, space - copied);
        chain.write(memory, 0, &response)?;
        Ok(response_len + copied)
    }

    /// Bytes of a response, which the data follows.
    fn response_len(&self) -> usize {
        response_len(self.sense_size as usize)
    }

    /// Executes a command whose data has `space` bytes. Returns how many of them were written.
    fn execute(
        &mut self,
        cdb: &[u8; CDB_LEN],
        (chain, memory): (&Chain, &DmaMemory),
        space: usize,
    ) -> Result<(Response, usize), QueueError> {
        let response_len = self.response_len();
        let (first, len) = match self.drive.execute(cdb) {
            CdReply::Data(data) if data.len() > space => return Ok((Response::overrun(), 0)),
            CdReply::Data(data) => {
                let copied = chain.write(memory, response_len, &data)?;
                return Ok((Response::good(), copied));
            }
            CdReply::Refused(sense) => return Ok((Response::check_condition(sense), 0)),
            CdReply::Read { len, .. } if len > TRANSFER_MAX => {
                return Ok((Response::check_condition(Sense::INVALID_FIELD), 0));
            }
            CdReply::Read { first, len } => (first, usize::try_from(len).unwrap_or(usize::MAX)),
        };
        if len > space {
            return Ok((Response::overrun(), 0));
        }
        let mut copied = 0;
        while copied < len {
            let count = (len - copied).min(COPY_LEN);
            let data = &mut self.buffer[..count];
            if let Err(sense) = self.drive.read(first + copied as u64, data) {
                return Ok((Response::check_condition(sense), copied));
            }
            chain.write(memory, response_len + copied, data)?;
            copied += count;
        }
        Ok((Response::good(), copied))
    }
}

impl VirtioDevice for VirtioCdrom {
    fn kind(&self) -> VirtioKind {
        VirtioKind::Scsi
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; 3]
    }

    fn config(&self) -> Vec<u8> {
        // One request queue; one channel, one target, LUN 0.
        let words = [
            1,
            SEGMENTS_MAX,
            SECTORS_MAX,
            COMMANDS_MAX,
            EVENT_LEN,
            self.sense_size,
            self.cdb_size,
        ];
        let mut config: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        config.extend([0; 8]);
        config
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        let Ok(bytes) = data.try_into() else {
            return;
        };
        let size = u32::from_le_bytes(bytes);
        match offset {
            SENSE_SIZE if SENSE_SIZES.contains(&size) => self.sense_size = size,
            CDB_SIZE if CDB_SIZES.contains(&size) => self.cdb_size = size,
            _ => {}
        }
    }

    fn reset(&mut self) {
        self.sense_size = SENSE_SIZE_RESET;
        self.cdb_size = CDB_SIZE_RESET;
    }

    fn save(&self) -> VirtioDeviceState {
        VirtioDeviceState::Scsi {
            sense_size: self.sense_size,
            cdb_size: self.cdb_size,
        }
    }

    fn restore(&mut self, state: &VirtioDeviceState) -> Result<(), VirtioStateError> {
        match *state {
            VirtioDeviceState::Scsi {
                sense_size,
                cdb_size,
            } if SENSE_SIZES.contains(&sense_size) && CDB_SIZES.contains(&cdb_size) => {
                self.sense_size = sense_size;
                self.cdb_size = cdb_size;
                Ok(())
            }
            VirtioDeviceState::Scsi { .. } => Err(VirtioStateError::Sizes),
            _ => Err(VirtioStateError::OtherDevices),
        }
    }

    fn process(&mut self, queues: &mut VirtQueues<'_>, index: usize) -> Result<(), QueueError> {
        // Nothing happens that would fill the buffers for events.
        if index == EVENT_QUEUE {
            return Ok(());
        }
        while let Some(chain) = queues.pop(index)? {
            let memory = queues.memory();
            let written = if index == CONTROL_QUEUE {
                chain.write(memory, 0, &CONTROL_ANSWER)?
            } else {
                self.serve(&chain, memory)?
            };
            queues.complete(index, &chain, written)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
