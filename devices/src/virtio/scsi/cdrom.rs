//! The commands of a CD-ROM drive with one data track. SPC-4 and MMC-6.

use std::fmt;
use std::io;

use super::command::{CDB_LEN, Sense};
use crate::virtio::block::BlockBackend;

/// Bytes of a block of a disc.
pub const BLOCK: u64 = 2048;
/// Failures of the disc that are logged.
const REPORTED_MAX: u32 = 16;

/// Operation codes.
mod operation {
    pub(super) const TEST_UNIT_READY: u8 = 0x00;
    pub(super) const REQUEST_SENSE: u8 = 0x03;
    pub(super) const INQUIRY: u8 = 0x12;
    pub(super) const MODE_SENSE_6: u8 = 0x1a;
    pub(super) const START_STOP: u8 = 0x1b;
    pub(super) const PREVENT_REMOVAL: u8 = 0x1e;
    pub(super) const READ_CAPACITY: u8 = 0x25;
    pub(super) const READ_10: u8 = 0x28;
    pub(super) const READ_TOC: u8 = 0x43;
    pub(super) const GET_CONFIGURATION: u8 = 0x46;
    pub(super) const EVENT_STATUS: u8 = 0x4a;
    pub(super) const MODE_SENSE_10: u8 = 0x5a;
    pub(super) const REPORT_LUNS: u8 = 0xa0;
    pub(super) const READ_12: u8 = 0xa8;
}

/// INQUIRY: a removable CD-ROM drive of SPC-3, with its names.
const INQUIRY: [u8; 36] = *b"\x05\x80\x05\x02\x1f\0\0\0HINDSGHTCD-ROM          1.0 ";
/// The mode page of a drive's capabilities: it reads, and its tray is locked.
const CAPABILITIES_PAGE: [u8; 20] = [
    0x2a, 18, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];
const ALL_PAGES: u8 = 0x3f;
/// Page control of MODE SENSE: saved values.
const SAVED_VALUES: u8 = 3;
/// GET CONFIGURATION: the current profile is CD-ROM, without features.
const CONFIGURATION: [u8; 8] = [0, 0, 0, 4, 0, 0, 0, 8];
/// GET EVENT STATUS NOTIFICATION: no media event, and a disc is present.
const MEDIA_STATUS: [u8; 8] = [0, 6, 4, MEDIA_CLASS, 0, 2, 0, 0];
/// GET EVENT STATUS NOTIFICATION without a class that the drive has: only media events exist.
const NO_EVENT: [u8; 4] = [0, 2, 0x80, MEDIA_CLASS];
/// The class of media events in a mask of classes.
const MEDIA_CLASS: u8 = 1 << 4;
/// The number of the lead-out in a table of contents.
const LEAD_OUT: u8 = 0xaa;
/// ADR 1 and control 4: a data track.
const DATA_TRACK: u8 = 0x14;
/// Frames before the first block: two seconds of 75 frames.
const MSF_START: u32 = 150;

/// What a command asks for.
pub(super) enum CdReply {
    /// These bytes.
    Data(Vec<u8>),
    /// The `len` bytes of the disc from `first` on, which are on it.
    Read { first: u64, len: u64 },
    /// An error.
    Refused(Sense),
}

/// The drive.
pub(super) struct CdDrive {
    backend: Box<dyn BlockBackend>,
    name: String,
    pub(super) reported: u32,
}

impl fmt::Debug for CdDrive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CdDrive")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

fn big16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

fn big32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

impl CdDrive {
    /// A drive with a disc of `backend`'s contents.
    pub(super) fn new(backend: Box<dyn BlockBackend>, name: &str) -> Self {
        Self {
            backend,
            name: name.to_owned(),
            reported: 0,
        }
    }

    /// Blocks of the disc. Zeros complete the last one.
    fn blocks(&self) -> u32 {
        u32::try_from(self.backend.len().div_ceil(BLOCK)).unwrap_or(u32::MAX)
    }

    /// Executes a command, except that the caller reads the disc.
    pub(super) fn execute(&self, cdb: &[u8; CDB_LEN]) -> CdReply {
        match cdb[0] {
            operation::TEST_UNIT_READY | operation::START_STOP | operation::PREVENT_REMOVAL => {
                CdReply::Data(Vec::new())
            }
            operation::REQUEST_SENSE => limited(Sense::NONE.bytes().to_vec(), cdb[4].into()),
            operation::INQUIRY => inquiry(cdb),
            operation::MODE_SENSE_6 => mode_sense(cdb[2], 4, cdb[4].into()),
            operation::MODE_SENSE_10 => mode_sense(cdb[2], 8, big16(&cdb[7..]).into()),
            operation::READ_CAPACITY => {
                let last = self.blocks().saturating_sub(1);
                let block = BLOCK.to_be_bytes();
                CdReply::Data([&last.to_be_bytes()[..], &block[4..]].concat())
            }
            operation::READ_10 => self.range(big32(&cdb[2..]), big16(&cdb[7..]).into()),
            operation::READ_12 => self.range(big32(&cdb[2..]), big32(&cdb[6..])),
            operation::READ_TOC => self.table_of_contents(cdb),
            operation::GET_CONFIGURATION => {
                limited(CONFIGURATION.to_vec(), big16(&cdb[7..]).into())
            }
            // Only polling is possible.
            operation::EVENT_STATUS if cdb[1] & 1 != 0 => {
                let status = if cdb[4] & MEDIA_CLASS == 0 {
                    NO_EVENT.to_vec()
                } else {
                    MEDIA_STATUS.to_vec()
                };
                limited(status, big16(&cdb[7..]).into())
            }
            operation::EVENT_STATUS => CdReply::Refused(Sense::INVALID_FIELD),
            operation::REPORT_LUNS => {
                let mut list = vec![0; 16];
                list[3] = 8;
                limited(list, big32(&cdb[6..]))
            }
            _ => CdReply::Refused(Sense::INVALID_COMMAND),
        }
    }

    fn range(&self, first: u32, count: u32) -> CdReply {
        if u64::from(first) + u64::from(count) > self.blocks().into() {
            return CdReply::Refused(Sense::OUT_OF_RANGE);
        }
        CdReply::Read {
            first: u64::from(first) * BLOCK,
            len: u64::from(count) * BLOCK,
        }
    }

    /// READ TOC: the tracks, or the session, of which there is one each.
    fn table_of_contents(&self, cdb: &[u8; CDB_LEN]) -> CdReply {
        let (msf, format, track) = (cdb[1] & 2 != 0, cdb[2] & 0xf, cdb[6]);
        let entry = |number: u8, block: u32| {
            let mut entry = vec![0, DATA_TRACK, number, 0];
            entry.extend(track_address(block, msf));
            entry
        };
        let mut toc = vec![0, 0, 1, 1];
        match format {
            0 if track <= 1 || track == LEAD_OUT => {
                if track <= 1 {
                    toc.extend(entry(1, 0));
                }
                toc.extend(entry(LEAD_OUT, self.blocks()));
            }
            1 => toc.extend(entry(1, 0)),
            _ => return CdReply::Refused(Sense::INVALID_FIELD),
        }
        toc[1] = (toc.len() - 2).to_le_bytes()[0];
        limited(toc, big16(&cdb[7..]).into())
    }

    /// Reads bytes of the disc, which are zeros after its end.
    pub(super) fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), Sense> {
        let present = self.backend.len().saturating_sub(offset);
        let present = usize::try_from(present).unwrap_or(usize::MAX);
        let (data, padding) = data.split_at_mut(present.min(data.len()));
        padding.fill(0);
        let read = self.backend.read(offset, data);
        read.map_err(|error| {
            self.report(offset, &error);
            Sense::READ_ERROR
        })
    }

    /// Logs a failure of the disc, unless there were too many.
    pub(super) fn report(&mut self, offset: u64, error: &io::Error) {
        self.reported = self.reported.saturating_add(1);
        match self.reported {
            ..REPORTED_MAX => tracing::error!("{}: read at {offset:#x}: {error}", self.name),
            REPORTED_MAX => tracing::error!("{}: further failures are not logged", self.name),
            _ => {}
        }
    }
}

/// The first `len` bytes, as many as the command allows.
fn limited(mut data: Vec<u8>, len: u32) -> CdReply {
    data.truncate(usize::try_from(len).unwrap_or(usize::MAX));
    CdReply::Data(data)
}

fn inquiry(cdb: &[u8; CDB_LEN]) -> CdReply {
    let len = big16(&cdb[3..]).into();
    match (cdb[1] & 1 != 0, cdb[2]) {
        (false, 0) => limited(INQUIRY.to_vec(), len),
        // The list of vital product data pages has only itself.
        (true, 0) => limited(vec![5, 0, 0, 1, 0], len),
        _ => CdReply::Refused(Sense::INVALID_FIELD),
    }
}

/// MODE SENSE with a header of 4 or 8 bytes.
fn mode_sense(page: u8, header: usize, len: u32) -> CdReply {
    if page >> 6 == SAVED_VALUES {
        return CdReply::Refused(Sense::NOT_SAVED);
    }
    if !matches!(page & ALL_PAGES, 0x2a | ALL_PAGES) {
        return CdReply::Refused(Sense::INVALID_FIELD);
    }
    let mut data = vec![0; header];
    data.extend(CAPABILITIES_PAGE);
    // The length does not count itself.
    let (at, counted) = if header == 4 { (0, 1) } else { (1, 2) };
    data[at] = (data.len() - counted).to_le_bytes()[0];
    limited(data, len)
}

/// A block's address, as a number or as minutes, seconds and frames.
fn track_address(block: u32, msf: bool) -> [u8; 4] {
    if !msf {
        return block.to_be_bytes();
    }
    let frames = block.saturating_add(MSF_START);
    let minutes = u8::try_from(frames / (75 * 60)).unwrap_or(u8::MAX);
    let [seconds, ..] = (frames / 75 % 60).to_le_bytes();
    let [frame, ..] = (frames % 75).to_le_bytes();
    [0, minutes, seconds, frame]
}
