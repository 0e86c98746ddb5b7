//! The file with the variables of firmware.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use hindsight_devices::flash::{Flash, FlashError, FlashStore};
use thiserror::Error;

use crate::memory::layout::FIRMWARE_MAX;

/// Why a file cannot have the variables of firmware.
#[derive(Debug, Error)]
pub enum FirmwareVarsError {
    /// The file cannot be opened.
    #[error("it cannot be opened")]
    Open(#[source] io::Error),
    /// The file cannot be locked or read.
    #[error("it cannot be read")]
    Read(#[from] io::Error),
    /// It is a folder, a device or a pipe.
    #[error("it is not a file")]
    NotFile,
    /// Another process writes it, or reads it while this one would write.
    #[error("it is in use by another process; use a copy of it")]
    InUse,
    /// The file is larger than any firmware.
    #[error("it has more than {} KiB", FIRMWARE_MAX >> 10)]
    TooLarge,
    /// No flash chip has such contents.
    #[error(transparent)]
    Flash(#[from] FlashError),
}

/// The file to which the guest's changes go. It stays locked as long as the machine exists.
struct VarsFile(File);

impl FlashStore for VarsFile {
    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}

/// A flash chip with the contents of the file at `path`, which receives its changes if `keeps`.
///
/// # Errors
///
/// The file cannot be opened or read, another process uses it, or no chip has its size.
pub fn open_firmware_vars(path: &Path, keeps: bool) -> Result<Flash, FirmwareVarsError> {
    let mut options = OpenOptions::new();
    options.read(true).write(keeps);
    // A pipe without a writer would block.
    let file = options.custom_flags(libc::O_NONBLOCK).open(path);
    let mut file = file.map_err(FirmwareVarsError::Open)?;
    if !file.metadata()?.is_file() {
        return Err(FirmwareVarsError::NotFile);
    }
    let locked = if keeps {
        file.try_lock()
    } else {
        file.try_lock_shared()
    };
    match locked {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(FirmwareVarsError::InUse),
        Err(TryLockError::Error(error)) => return Err(error.into()),
    }
    let mut contents = Vec::new();
    let limited = Read::by_ref(&mut file).take(FIRMWARE_MAX + 1);
    { limited }.read_to_end(&mut contents)?;
    if contents.len() as u64 > FIRMWARE_MAX {
        return Err(FirmwareVarsError::TooLarge);
    }
    let store = keeps.then(|| Box::new(VarsFile(file)) as Box<dyn FlashStore>);
    Ok(Flash::new(contents, store)?)
}
