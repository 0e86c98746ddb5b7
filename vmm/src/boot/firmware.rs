//! Firmware: an image of a flash chip, entered at the reset vector.
//!
//! The image ends at 4 GiB, where it is read-only; a copy of its end is in the BIOS area below 1 MiB.
//! Deviation: the copy is RAM from the start, while a chipset maps the image itself until firmware
//! programs it otherwise.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::boot::BootError;
use crate::boot::placement::PlacedPart;
use crate::memory::layout::{
    EXTENDED_START, FIRMWARE_COPY_MAX, FIRMWARE_MAX, FIRMWARE_MIN, PCI_HOLE_END, to_usize,
};

/// Granularity of an image's size, which KVM maps in pages.
const PAGE: usize = 0x1000;

/// Checks the size of an image: whole pages, [`FIRMWARE_MIN`] to [`FIRMWARE_MAX`].
///
/// # Errors
///
/// [`BootError::FirmwareSize`].
pub fn check(image: &[u8]) -> Result<(), BootError> {
    let fits = (FIRMWARE_MIN..=FIRMWARE_MAX).contains(&(image.len() as u64));
    if fits && image.len().is_multiple_of(PAGE) {
        Ok(())
    } else {
        Err(BootError::FirmwareSize { size: image.len() })
    }
}

/// Writes the image to its two places in `memory`.
pub(super) fn write(memory: &GuestMemoryMmap, image: &[u8]) -> Result<Vec<PlacedPart>, BootError> {
    check(image)?;
    let low = &image[image.len() - image.len().min(to_usize(FIRMWARE_COPY_MAX))..];
    let parts = [
        ("the copy of the firmware below 1 MiB", EXTENDED_START, low),
        ("the firmware", PCI_HOLE_END, image),
    ];
    let mut placed = Vec::new();
    for (name, end, data) in parts {
        let start = end - data.len() as u64;
        memory
            .write_slice(data, GuestAddress(start))
            .map_err(|source| BootError::Write {
                name: name.to_owned(),
                start,
                source,
            })?;
        placed.push(PlacedPart {
            name: name.to_owned(),
            range: start..end,
        });
    }
    Ok(placed)
}
