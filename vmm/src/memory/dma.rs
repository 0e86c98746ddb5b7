//! Guest memory as devices access it.
//!
//! The memory file is mapped once more, with a bitmap that reports each write of a device. So devices
//! use vm-memory's accesses as they are, and the interpreters drop the code that a device overwrites.

use std::sync::Arc;

use hindsight_devices::virtio::{DmaMemory, WriteReport, WriteReporter};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use super::RamError;
use super::layout::is_firmware;

/// Maps guest memory for the DMA of devices. `report` is called for each of their writes.
///
/// # Errors
///
/// The memory cannot be mapped a second time.
pub(super) fn device_memory(
    map: &GuestMemoryMmap,
    report: &Arc<WriteReport>,
) -> Result<DmaMemory, RamError> {
    // Devices cannot write to the flash chip, but to the video memory.
    let ram = map
        .iter()
        .filter(|region| !is_firmware(region.start_addr().0));
    let regions = ram.map(|region| {
        let base = region.start_addr();
        let failed = |reason: String| RamError::Map {
            address: base.0,
            reason,
        };
        let file = region
            .file_offset()
            .ok_or_else(|| failed("it has no file".to_owned()))?;
        let reporter = WriteReporter::new(base.0, report.clone());
        let mapping = MmapRegionBuilder::new_with_bitmap(region.size(), reporter)
            .with_file_offset(file.clone())
            .with_mmap_prot(region.prot())
            .with_mmap_flags(region.flags())
            .build()
            .map_err(|error| failed(error.to_string()))?;
        GuestRegionMmap::new(mapping, base)
            .ok_or_else(|| failed("it exceeds the address space".to_owned()))
    });
    let regions = regions.collect::<Result<Vec<_>, _>>()?;
    GuestMemoryMmap::from_regions(regions).map_err(|error| RamError::Map {
        address: 0,
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::memory::allocate;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn writes_of_devices_reach_the_guest_and_are_reported() {
        let ranges = [(GuestAddress(0), 0x2000), (GuestAddress(1 << 32), 0x1000)];
        let map = allocate(&ranges, false).unwrap();
        let reported = Arc::new(Mutex::new(Vec::new()));
        let log = reported.clone();
        let report: Arc<WriteReport> = Arc::new(move |at, len| log.lock().unwrap().push((at, len)));
        let devices = device_memory(&map, &report).unwrap();
        let address = GuestAddress((1 << 32) + 0xff0);
        devices.write_slice(&[1, 2, 3], address).unwrap();
        assert_eq!(map.read_obj::<u16>(address).unwrap(), 0x201);
        map.write_obj(7_u8, GuestAddress(0x1fff)).unwrap();
        assert_eq!(devices.read_obj::<u8>(GuestAddress(0x1fff)).unwrap(), 7);
        assert_eq!(*reported.lock().unwrap(), [(address.0, 3)]);
    }
}
