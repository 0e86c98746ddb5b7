//! The requests and responses of the host adapter, around SCSI commands.

use super::super::chain::Chain;
use super::super::memory::DmaMemory;
use super::super::queues::QueueError;

/// Bytes of a command descriptor block that the drive evaluates.
pub(super) const CDB_LEN: usize = 32;
/// Most bytes of a command descriptor block. SPC-4, "Variable length CDB formats".
pub(super) const CDB_MAX: usize = 260;
/// Bytes of a request before the command: LUN, tag, attributes.
const REQUEST_HEADER: usize = 19;
/// Bytes of a response before the sense data.
const RESPONSE_HEADER: usize = 12;
/// Bytes of the sense data that a response has.
const SENSE_LEN: usize = 18;

const STATUS_GOOD: u8 = 0;
const STATUS_CHECK_CONDITION: u8 = 2;
const RESPONSE_OK: u8 = 0;
const RESPONSE_OVERRUN: u8 = 1;
const RESPONSE_BAD_TARGET: u8 = 3;

/// Bytes of a response without data.
pub(super) const fn response_len(sense_size: usize) -> usize {
    RESPONSE_HEADER + sense_size
}

/// Sense key, additional sense code and its qualifier. SPC-4, "Sense data".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sense {
    pub(super) key: u8,
    pub(super) code: u8,
}

impl Sense {
    /// No error.
    pub(super) const NONE: Self = Self { key: 0, code: 0 };
    /// Medium error: unrecovered read error.
    pub(super) const READ_ERROR: Self = Self { key: 3, code: 0x11 };
    /// Illegal request: invalid command.
    pub(super) const INVALID_COMMAND: Self = Self { key: 5, code: 0x20 };
    /// Illegal request: the block is not on the disc.
    pub(super) const OUT_OF_RANGE: Self = Self { key: 5, code: 0x21 };
    /// Illegal request: a field of the command is invalid.
    pub(super) const INVALID_FIELD: Self = Self { key: 5, code: 0x24 };
    /// Illegal request: values are not saved.
    pub(super) const NOT_SAVED: Self = Self { key: 5, code: 0x39 };

    /// The sense data in fixed format.
    pub(super) fn bytes(self) -> [u8; SENSE_LEN] {
        let mut bytes = [0; SENSE_LEN];
        bytes[0] = 0x70;
        bytes[2] = self.key;
        bytes[7] = 10;
        bytes[12] = self.code;
        bytes
    }
}

/// A request of the driver, without its data.
pub(super) struct ScsiRequest {
    lun: [u8; 8],
    pub(super) cdb: [u8; CDB_LEN],
}

impl ScsiRequest {
    /// Reads the request of a chain, whose command has `cdb_size` bytes, up to [`CDB_MAX`].
    pub(super) fn read(
        chain: &Chain,
        memory: &DmaMemory,
        cdb_size: usize,
    ) -> Result<Self, QueueError> {
        let mut bytes = [0; REQUEST_HEADER + CDB_MAX];
        let bytes = &mut bytes[..REQUEST_HEADER + cdb_size];
        if chain.read(memory, 0, bytes)? != bytes.len() {
            return Err(QueueError::Request("a SCSI request is too short"));
        }
        let (header, command) = bytes.split_at(REQUEST_HEADER);
        let (mut lun, mut cdb) = ([0; 8], [0; CDB_LEN]);
        lun.copy_from_slice(&header[..8]);
        let evaluated = cdb_size.min(CDB_LEN);
        cdb[..evaluated].copy_from_slice(&command[..evaluated]);
        Ok(Self { lun, cdb })
    }

    /// Whether it is for target 0, LUN 0, in either form of a LUN.
    pub(super) fn is_for_drive(&self) -> bool {
        matches!(self.lun, [1, 0, 0 | 0x40, 0, 0, 0, 0, 0])
    }
}

/// The response to a request.
pub(super) struct Response {
    status: u8,
    response: u8,
    sense: Option<Sense>,
}

impl Response {
    /// The command succeeded.
    pub(super) const fn good() -> Self {
        Self {
            status: STATUS_GOOD,
            response: RESPONSE_OK,
            sense: None,
        }
    }

    /// The drive refuses the command.
    pub(super) const fn check_condition(sense: Sense) -> Self {
        Self {
            status: STATUS_CHECK_CONDITION,
            response: RESPONSE_OK,
            sense: Some(sense),
        }
    }

    /// There is no such target or LUN.
    pub(super) const fn bad_target() -> Self {
        Self {
            status: STATUS_GOOD,
            response: RESPONSE_BAD_TARGET,
            sense: None,
        }
    }

    /// The command has more data than the driver has space for: none was written.
    pub(super) const fn overrun() -> Self {
        Self {
            status: STATUS_GOOD,
            response: RESPONSE_OVERRUN,
            sense: None,
        }
    }

    /// The response with `sense_size` bytes for sense data, where `residual` bytes of the data were not
    /// written.
    pub(super) fn bytes(&self, sense_size: usize, residual: usize) -> Vec<u8> {
        let mut bytes = vec![0; response_len(sense_size)];
        let residual = u32::try_from(residual).unwrap_or(u32::MAX);
        bytes[4..8].copy_from_slice(&residual.to_le_bytes());
        bytes[10] = self.status;
        bytes[11] = self.response;
        if let Some(sense) = self.sense {
            let len = SENSE_LEN.min(sense_size);
            bytes[0] = len.to_le_bytes()[0];
            bytes[RESPONSE_HEADER..][..len].copy_from_slice(&sense.bytes()[..len]);
        }
        bytes
    }
}
