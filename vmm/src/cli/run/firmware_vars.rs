//! The file of `--firmware-vars`.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, bail};
use hindsight_devices::flash::{Flash, FlashStore};

use crate::memory::layout::FIRMWARE_MAX;

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
pub(super) fn open(path: &Path, keeps: bool) -> anyhow::Result<Flash> {
    let mut options = OpenOptions::new();
    options.read(true).write(keeps);
    // A pipe without a writer would block.
    let file = options.custom_flags(libc::O_NONBLOCK).open(path);
    let mut file = file.context("it cannot be opened")?;
    if !file.metadata()?.is_file() {
        bail!("it is not a file");
    }
    let locked = if keeps {
        file.try_lock()
    } else {
        file.try_lock_shared()
    };
    match locked {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => bail!("it is in use by another process; use a copy of it"),
        Err(TryLockError::Error(error)) => return Err(error).context("it cannot be locked"),
    }
    let mut contents = Vec::new();
    let limited = Read::by_ref(&mut file).take(FIRMWARE_MAX + 1);
    { limited }
        .read_to_end(&mut contents)
        .context("it cannot be read")?;
    if contents.len() as u64 > FIRMWARE_MAX {
        bail!("it has more than {} KiB", FIRMWARE_MAX >> 10);
    }
    let store = keeps.then(|| Box::new(VarsFile(file)) as Box<dyn FlashStore>);
    Ok(Flash::new(contents, store)?)
}
