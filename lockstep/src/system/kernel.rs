//! Puts a batch and its kernel into guest memory.

use crate::layout::REGION_BASE;
use crate::system::batch::{KernelMode, SystemBatch};
use crate::system::{kernel32, kernel64};
use hindsight_cpu::state::CpuState;

impl KernelMode {
    /// Writes the kernel and its tables to guest memory that is all zero.
    pub(super) fn install(self, ram: &mut [u8]) {
        match self {
            Self::Long => kernel64::install(ram, REGION_BASE),
            Self::Protected => kernel32::install(ram),
        }
    }

    /// Writes a batch.
    pub(super) fn load(self, ram: &mut [u8], batch: &SystemBatch) {
        match self {
            Self::Long => kernel64::load(ram, REGION_BASE, batch),
            Self::Protected => kernel32::load(ram, batch),
        }
    }

    /// The state at the start of a batch.
    pub(super) fn start(self, batch: &SystemBatch) -> CpuState {
        match self {
            Self::Long => kernel64::start(REGION_BASE),
            Self::Protected => kernel32::start(batch),
        }
    }

    /// The parts of guest memory that must be equal after a run: name, from, to.
    pub(super) fn compared(self, batch: &SystemBatch) -> Vec<(&'static str, usize, usize)> {
        match self {
            Self::Long => kernel64::compared(REGION_BASE, batch).to_vec(),
            Self::Protected => kernel32::compared(),
        }
    }
}
