//! The RAM of one machine, as KVM and as the interpreter access it.

use std::sync::{Arc, Mutex, OnceLock};

use hindsight_devices::virtio::DmaMemory;
use hindsight_interp::{Memory, RegionSpec};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion,
};

use super::layout::{EXTENDED_START, FIRMWARE_COPY_MAX, is_firmware, to_usize};
use super::{RamError, dma};
use crate::sync::lock;

/// The RAM of one machine.
#[derive(Debug)]
pub struct GuestRam {
    /// The mapped regions.
    pub map: GuestMemoryMmap,
    /// The interpreters' view, from its first use on.
    interp: Arc<OnceLock<Arc<Memory>>>,
    /// Held while the interpreters' view is made.
    making: Mutex<()>,
}

impl GuestRam {
    /// RAM that no interpreter has used yet.
    pub fn new(map: GuestMemoryMmap) -> Self {
        Self {
            map,
            interp: Arc::default(),
            making: Mutex::default(),
        }
    }

    /// The view that all interpreters of this machine share.
    ///
    /// # Errors
    ///
    /// The regions overlap or are not page-aligned.
    pub fn for_interpreters(&self) -> Result<Arc<Memory>, RamError> {
        let _making = lock(&self.making);
        if let Some(memory) = self.interp.get() {
            return Ok(memory.clone());
        }
        let memory = Arc::new(interp_memory(&self.map)?);
        Ok(self.interp.get_or_init(|| memory).clone())
    }

    /// Copies the end of the firmware below 1 MiB again, as a reset of the machine does.
    ///
    /// # Errors
    ///
    /// Memory cannot be read or written.
    pub fn restore_firmware_copy(&self) -> Result<(), GuestMemoryError> {
        let mut regions = self.map.iter();
        let Some(firmware) = regions.find(|region| is_firmware(region.start_addr().0)) else {
            return Ok(());
        };
        let mut copy = vec![0; to_usize(firmware.len().min(FIRMWARE_COPY_MAX))];
        let len = copy.len() as u64;
        let end = firmware.start_addr().0 + firmware.len();
        self.map.read_slice(&mut copy, GuestAddress(end - len))?;
        let start = EXTENDED_START - len;
        self.map.write_slice(&copy, GuestAddress(start))?;
        if let Some(memory) = self.interp.get() {
            memory.changed(start, len);
        }
        Ok(())
    }

    /// The view of devices, whose writes are reported to the interpreters.
    ///
    /// # Errors
    ///
    /// The memory cannot be mapped once more.
    pub fn for_devices(&self) -> Result<DmaMemory, RamError> {
        let interp = self.interp.clone();
        let report = move |address, len| {
            // An interpreter that is made later has decoded nothing yet.
            if let Some(memory) = interp.get() {
                memory.changed(address, len);
            }
        };
        dma::device_memory(&self.map, &(Arc::new(report) as _))
    }
}

/// Guest memory as the interpreter accesses it. It keeps `memory` mapped as long as it exists.
///
/// # Errors
///
/// The regions overlap or are not page-aligned.
#[expect(
    unsafe_code,
    reason = "the interpreter accesses guest memory through host pointers"
)]
pub fn interp_memory(memory: &GuestMemoryMmap) -> Result<Memory, RamError> {
    let regions: Vec<_> = memory
        .iter()
        .map(|region| RegionSpec {
            gpa: region.start_addr().0,
            len: region.len(),
            host: region.as_ptr(),
            writable: !is_firmware(region.start_addr().0),
        })
        .collect();
    // SAFETY: the regions are mapped readable and writable, firmware too. The clone of `memory` that the result
    // owns keeps them mapped, and vm-memory never makes Rust references into them.
    let view = unsafe { Memory::new(&regions, Box::new(memory.clone())) }?;
    Ok(view)
}
