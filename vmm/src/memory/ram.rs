//! The RAM of one machine, as KVM and as the interpreter access it.

use std::sync::{Arc, Mutex, OnceLock};

use hindsight_devices::virtio::DmaMemory;
use hindsight_interp::{Memory, RegionSpec};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::layout::is_firmware;
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
