//! Opens images, and reads and writes them by the crate imago.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hindsight_devices::virtio::block::{BlockBackend, SECTOR, VirtioDisk};
use hindsight_devices::virtio::overlay::Overlay;
use hindsight_devices::virtio::scsi::{self, VirtioCdrom};
use imago::file::File as ImageFile;
use imago::format::gate::ImplicitOpenGate;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::vmdk::Vmdk;
use imago::{FormatAccess, FormatDriverBuilder, Storage, StorageOpenOptions};
use thiserror::Error;

use super::spec::{DiskFormat, DiskSpec};
use crate::memory::ByteSize;
use crate::sync::lock;

/// Maximum number of bytes of changes that a disk with `snapshot` keeps in memory.
const CHANGES_MAX: u64 = 4 << 30;

/// Why a disk's image cannot be used.
#[derive(Debug, Error)]
pub enum DiskError {
    /// The file cannot be opened.
    #[error("{}", .0.display())]
    Open(PathBuf, #[source] io::Error),
    /// The image is not of its format, or one of its backing files cannot be used.
    #[error("{} is not a usable {} image", path.display(), format.name())]
    DiskImage {
        /// The image.
        path: PathBuf,
        /// The image's format.
        format: DiskFormat,
        /// What is wrong.
        #[source]
        source: io::Error,
    },
    /// Another process writes the image, or reads it while this one would write.
    #[error(
        "{} is in use by another process; add `,snapshot` to use it without changing it, or `,ro` if \
         the other only reads",
        .0.display()
    )]
    InUse(PathBuf),
    /// The image has no whole sector.
    #[error("{} has {}, less than a sector", .0.display(), ByteSize(*.1))]
    TooSmall(PathBuf, u64),
    /// The image of a disc has no whole block.
    #[error("{} has {}, less than a block of a disc, 2 KiB", .0.display(), ByteSize(*.1))]
    DiscTooSmall(PathBuf, u64),
}

/// Opens the disk of `spec`, for a machine with `cpus` processors.
///
/// # Errors
///
/// The image cannot be opened, is in use, or is not of its format.
pub fn open(spec: &DiskSpec, cpus: usize) -> Result<VirtioDisk, DiskError> {
    let backend = open_image(spec)?;
    Ok(VirtioDisk::new(backend, &file_name(&spec.path), cpus))
}

/// Opens a drive with the disc in the raw image at `path`.
///
/// # Errors
///
/// The image cannot be opened, another process writes it, or it is smaller than a block.
pub fn open_disc(path: &Path) -> Result<VirtioCdrom, DiskError> {
    let backend = open_image(&DiskSpec {
        path: path.to_owned(),
        read_only: true,
        snapshot: false,
        any_backing: false,
        format: Some(DiskFormat::Raw),
    })?;
    if backend.len() < scsi::BLOCK {
        return Err(DiskError::DiscTooSmall(path.to_owned(), backend.len()));
    }
    Ok(VirtioCdrom::new(backend, &file_name(path)))
}

/// The name of a file in the log.
fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

fn open_image(spec: &DiskSpec) -> Result<Box<dyn BlockBackend>, DiskError> {
    let path = &spec.path;
    let write = !spec.leaves_image();
    let format = spec.format();
    let locks = Arc::new(Mutex::new(Vec::new()));
    let file = lock_file(path, write)?;
    lock(&locks).push(file);
    let bad = |source| DiskError::DiskImage {
        path: path.clone(),
        format,
        source,
    };
    let options = StorageOpenOptions::new().filename(path).write(write);
    let file = ImageFile::open(options).map_err(|e| DiskError::Open(path.clone(), e))?;
    let gate = BackingGate {
        folder: (!spec.any_backing).then(|| folder_of(path)),
        locks: locks.clone(),
    };
    let access = match format {
        DiskFormat::Raw => Raw::builder(file)
            .write(write)
            .open(gate)
            .map(FormatAccess::new),
        DiskFormat::Qcow2 => {
            let builder = Qcow2::<ImageFile>::builder(file).write(write);
            builder.open(gate).map(FormatAccess::new)
        }
        DiskFormat::Vmdk => {
            let builder = Vmdk::<ImageFile>::builder(file).write(write);
            builder.open(gate).map(FormatAccess::new)
        }
    };
    let access = access.map_err(bad)?;
    if access.size() < SECTOR {
        return Err(DiskError::TooSmall(path.clone(), access.size()));
    }
    let image = DiskImage {
        access,
        read_only: spec.read_only || !write && !spec.snapshot,
        _locks: locks,
    };
    Ok(if spec.snapshot && !spec.read_only {
        Box::new(Overlay::new(Box::new(image), CHANGES_MAX))
    } else {
        Box::new(image)
    })
}

/// The folder in which an image's backing files may lie, without symbolic links.
fn folder_of(path: &Path) -> PathBuf {
    let folder = path.canonicalize().ok();
    let folder = folder.and_then(|path| path.parent().map(Path::to_owned));
    folder.unwrap_or_else(|| PathBuf::from("."))
}

/// Opens a file and locks it: alone for writing, with other readers otherwise.
fn lock_file(path: &Path, write: bool) -> Result<File, DiskError> {
    let failed = |error| DiskError::Open(path.to_owned(), error);
    let file = OpenOptions::new().read(true).write(write).open(path);
    let file = file.map_err(failed)?;
    let locked = if write {
        file.try_lock()
    } else {
        file.try_lock_shared()
    };
    match locked {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(DiskError::InUse(path.to_owned())),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// Opens the files to which an image refers: backing files and extents.
///
/// Images are untrusted: unless the user allows it, these files must be in the image's own folder.
struct BackingGate {
    /// The folder; `None` if all files are allowed.
    folder: Option<PathBuf>,
    /// The locked files, which stay open as long as the disk exists.
    locks: Arc<Mutex<Vec<File>>>,
}

impl BackingGate {
    fn check(&self, path: Option<&Path>, write: bool) -> io::Result<()> {
        let Some(path) = path else {
            return Ok(());
        };
        let real = path.canonicalize()?;
        if let Some(folder) = &self.folder
            && !real.starts_with(folder)
        {
            let text = format!(
                "it refers to {}, which is not in its folder; add `,backing` to allow that",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        let file = lock_file(path, write).map_err(io::Error::other)?;
        lock(&self.locks).push(file);
        Ok(())
    }
}

impl ImplicitOpenGate<ImageFile> for BackingGate {
    fn open_format<F: FormatDriverBuilder<ImageFile>>(
        &mut self,
        builder: F,
    ) -> io::Result<FormatAccess<ImageFile>> {
        self.check(builder.get_image_path().as_deref(), builder.get_writable())?;
        let gate = Self {
            folder: self.folder.clone(),
            locks: self.locks.clone(),
        };
        // The image itself is opened through `gate` again, which locks it a second time: a shared
        // lock.
        Ok(FormatAccess::new(builder.open(gate)?))
    }

    fn open_storage(&mut self, options: StorageOpenOptions) -> io::Result<ImageFile> {
        self.check(options.get_filename(), options.get_writable())?;
        ImageFile::open(options)
    }
}

/// An image as the contents of a disk.
struct DiskImage {
    access: FormatAccess<ImageFile>,
    read_only: bool,
    /// The locked files: other processes can write them when these are closed.
    _locks: Arc<Mutex<Vec<File>>>,
}

impl BlockBackend for DiskImage {
    fn len(&self) -> u64 {
        self.access.size()
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.access.read(data, offset)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.access.write(data, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.read_only {
            return Ok(());
        }
        self.access.flush()?;
        self.access.sync()
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        match self.access.discard_to_any(offset, len) {
            // A discard is a hint: ignore that the image does not support it.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            result => result,
        }
    }

    fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        if unmap {
            match self.access.discard_to_zero(offset, len) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                result => return result,
            }
        }
        self.access.write_zeroes(offset, len)
    }
}

#[cfg(test)]
mod tests;
