//! Guest images: programs, multiboot images, the busybox initramfs, Linux with its tools, and Debian.

pub mod debian;
pub mod gdb;
pub mod grub;
pub mod initramfs;
pub mod linux;
pub mod programs;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::kernel;
use crate::packages::{fetch, find_file, know, with_cache_lock};

/// Puts the Linux kernel of the labs and memtest86+, which boots by the Linux protocol, into a folder.
pub fn fetch_guests(to: &Path) -> Result<()> {
    let (kernel, memtest) = with_cache_lock(|| {
        kernel::install_tools()?;
        let kernel = kernel::fetch_kernel()?;
        know("memtest86+")?;
        Ok((kernel, fetch("memtest86+")?))
    })?;
    let image = find_file(&memtest, &|path| {
        path.ends_with("memtest86+x64.bin") || path.ends_with("mt86+x64")
    })
    .context("the package memtest86+ holds no x64 image")?;
    fs::create_dir_all(to)?;
    fs::copy(kernel.join("vmlinuz"), to.join("vmlinuz"))?;
    fs::copy(image, to.join("memtest86+x64.bin"))?;
    Ok(())
}

/// Puts the images that ci/guest/image-tests boots into a folder.
pub fn make_images(to: &Path) -> Result<()> {
    fetch_guests(to)?;
    initramfs::make(&to.join("initrd.gz"), &[])?;
    grub::make(&to.join("grub-multiboot"))?;
    programs::make_multiboot(&to.join("multiboot"))
}
