//! A virtio SCSI host adapter with one CD-ROM drive. VIRTIO 1.2, "SCSI Host Device".
//!
//! BIOSes boot from it by El Torito, and Linux has the drive as `/dev/sr0`. The drive is target 0, LUN
//! 0. There are no hot-plug events, and task management succeeds at once, since every command is
//! complete when the driver's notification returns.

mod cdrom;
mod command;

use super::block::BlockBackend;
use super::chain::Chain;
use super::device::{VirtioDevice, VirtioKind};
use super::memory::DmaMemory;
use super::queues::{QueueError, VirtQueues};
use cdrom::{CdDrive, CdReply};
use command::{CDB_LEN, RESPONSE_LEN, Response, ScsiRequest};

const CONTROL_QUEUE: usize = 0;
const EVENT_QUEUE: usize = 1;
const QUEUE_SIZE: u16 = 128;
/// Buffers of one request.
const SEGMENTS_MAX: u32 = 126;
/// Sectors of 512 bytes of one request.
const SECTORS_MAX: u32 = 0xffff;
/// Requests of the drive at a time.
const COMMANDS_MAX: u32 = 64;
const EVENT_LEN: u32 = 16;
const SENSE_LEN: u32 = 96;
/// Bytes of the answer of a control request: of a query of events, and at least of task management.
const CONTROL_ANSWER: [u8; 5] = [0; 5];
/// Bytes that are copied at once between the disc and guest memory.
const COPY_LEN: usize = 1 << 16;

/// The host adapter with its drive.
#[derive(Debug)]
pub struct VirtioCdrom {
    drive: CdDrive,
    buffer: Vec<u8>,
}

impl VirtioCdrom {
    /// A drive with a disc of `backend`'s contents. `name` is the file's name, for the log.
    pub fn new(backend: Box<dyn BlockBackend>, name: &str) -> Self {
        Self {
            drive: CdDrive::new(backend, name),
            buffer: vec![0; COPY_LEN],
        }
    }

    /// Serves one command. Returns the bytes written to the chain.
    fn serve(&mut self, chain: &Chain, memory: &DmaMemory) -> Result<usize, QueueError> {
        let request = ScsiRequest::read(chain, memory)?;
        let space = chain.writable_len().checked_sub(RESPONSE_LEN);
        let space = space.ok_or(QueueError::Request("a SCSI request has no response"))?;
        let (response, copied) = if request.is_for_drive() {
            self.execute(&request.cdb, (chain, memory), space)?
        } else {
            (Response::bad_target(), 0)
        };
        chain.write(memory, 0, &response.bytes(space - copied))?;
        Ok(RESPONSE_LEN + copied)
    }

    /// Executes a command whose data has `space` bytes. Returns how many of them were written.
    fn execute(
        &mut self,
        cdb: &[u8; CDB_LEN],
        (chain, memory): (&Chain, &DmaMemory),
        space: usize,
    ) -> Result<(Response, usize), QueueError> {
        let (first, len) = match self.drive.execute(cdb) {
            CdReply::Data(data) => {
                let data = &data[..data.len().min(space)];
                let copied = chain.write(memory, RESPONSE_LEN, data)?;
                return Ok((Response::good(), copied));
            }
            CdReply::Refused(sense) => return Ok((Response::check_condition(sense), 0)),
            CdReply::Read { first, len } => (first, len),
        };
        let len = usize::try_from(len).unwrap_or(usize::MAX).min(space);
        let mut copied = 0;
        while copied < len {
            let count = (len - copied).min(COPY_LEN);
            let data = &mut self.buffer[..count];
            if let Err(sense) = self.drive.read(first + copied as u64, data) {
                return Ok((Response::check_condition(sense), copied));
            }
            chain.write(memory, RESPONSE_LEN + copied, data)?;
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
            SENSE_LEN,
        ];
        let mut config: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        config.extend(32_u32.to_le_bytes());
        config.extend([0; 8]);
        config
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
