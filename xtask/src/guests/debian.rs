//! A disk with Debian that boots by BIOS and by UEFI.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::Result;
use xshell::cmd;

use crate::packages;
use crate::process::{root, shell};

/// Puts the disk into a folder that exists, unless it has one; returns its path.
///
/// A change of the program that makes the disk makes another one.
pub fn make(to: &Path) -> Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    fs::read(root().join("ci/make-debian-image"))?.hash(&mut hasher);
    let image = to.join(format!("debian-{:016x}.qcow2", hasher.finish()));
    if !image.exists() {
        packages::install(&["e2fsprogs", "fakeroot", "fdisk", "mmdebstrap", "mtools"])?;
        packages::install(&["grub-efi-amd64-bin", "grub-pc-bin", "qemu-utils"])?;
        let shell = shell()?;
        cmd!(shell, "sh ci/make-debian-image {image}").run()?;
    }
    Ok(image)
}
