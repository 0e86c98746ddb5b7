//! Guest memory with a kernel and a batch in it.

use crate::mapping::SharedRam;
use crate::system::batch::{KernelMode, SystemBatch};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// How a batch may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchEnd {
    /// The batch executed its last instruction.
    Done,
    /// A triple fault ended the batch, and the cases after it did not run.
    Shutdown,
}

/// Guest memory, and which kernel is in it.
#[derive(Debug)]
pub(super) struct BatchRam {
    ram: SharedRam,
    kernel: Option<KernelMode>,
}

impl BatchRam {
    /// Memory without a kernel.
    pub(super) fn new(ram: SharedRam) -> Self {
        Self { ram, kernel: None }
    }

    /// Writes a batch, and its kernel if memory holds another one.
    pub(super) fn load(&mut self, batch: &SystemBatch) {
        let kernel = batch.kernel;
        let bytes = self.ram.bytes_mut();
        if self.kernel != Some(kernel) {
            bytes.fill(0);
            kernel.install(bytes);
            self.kernel = Some(kernel);
        }
        kernel.load(bytes, batch);
    }

    /// The guest's memory.
    pub(super) fn bytes(&self) -> &[u8] {
        self.ram.bytes()
    }

    /// A digest of the compared memory after a run, and of how the run ended.
    pub(super) fn digest(&self, batch: &SystemBatch, end: BatchEnd) -> u64 {
        let bytes = self.bytes();
        let parts = batch.kernel.compared(batch);
        parts.into_iter().fold(end as u64, |sum, (_, from, to)| {
            xxh3_64_with_seed(&bytes[from..to], sum)
        })
    }
}
