//! The RAM of one machine, as KVM and as the interpreter reach it.

use std::sync::{Arc, Mutex};

use hindsight_interp::Memory;
use vm_memory::GuestMemoryMmap;

use super::{MemoryError, for_interpreter};
use crate::sync::lock;

/// The RAM of one machine.
#[derive(Debug)]
pub struct GuestRam {
    /// The mapped regions.
    pub map: GuestMemoryMmap,
    /// The interpreter's view, once it was needed.
    interp: Mutex<Option<Arc<Memory>>>,
}

impl GuestRam {
    /// RAM that no interpreter has used yet.
    pub fn new(map: GuestMemoryMmap) -> Self {
        Self {
            map,
            interp: Mutex::default(),
        }
    }

    /// The view that all interpreters of this machine share.
    ///
    /// # Errors
    ///
    /// When the regions overlap or are not page-aligned.
    pub fn for_interpreters(&self) -> Result<Arc<Memory>, MemoryError> {
        let mut made = lock(&self.interp);
        if let Some(memory) = &*made {
            return Ok(memory.clone());
        }
        let memory = Arc::new(for_interpreter(&self.map)?);
        Ok(made.insert(memory).clone())
    }
}
