//! The interpreter's side of system batches.

#![expect(
    unsafe_code,
    reason = "the interpreter gets the address of guest memory"
)]

use crate::mapping::SharedRam;
use crate::platform::ExitPortPlatform;
use crate::system::batch::SystemBatch;
use crate::system::kernel64::MEMORY;
use crate::system::ram::{BatchEnd, BatchRam};
use anyhow::{Result, bail};
use hindsight_interp::{Exit, Memory, RegionSpec, Vcpu};
use std::sync::Arc;

/// Batches after which the vCPU is replaced, so that its code cache stays small.
const BATCHES_PER_VCPU: u64 = 256;
/// Maximum number of instructions of a run, more than any batch has: a longer run counts as
/// endless.
const BUDGET: u64 = 1 << 20;

/// The interpreter with one vCPU.
#[derive(Debug)]
pub(super) struct SystemInterpRunner {
    // Before the memory that it uses: fields drop in this order.
    vcpu: Vcpu,
    platform: ExitPortPlatform,
    ram: BatchRam,
    batches: u64,
}

impl SystemInterpRunner {
    /// A new guest.
    ///
    /// # Errors
    /// If memory cannot be mapped.
    pub(super) fn new() -> Result<Self> {
        let ram = SharedRam::new(MEMORY)?;
        let spec = RegionSpec {
            gpa: 0,
            len: MEMORY as u64,
            host: ram.pointer(),
            writable: true,
        };
        // SAFETY: the mapping has this length, and its owner goes along. The runner accesses the
        // RAM only while the vCPU does not run, because both need the runner mutably.
        let memory = unsafe { Memory::new(&[spec], ram.owner()) }?;
        Ok(Self {
            vcpu: Vcpu::new(Arc::new(memory)),
            platform: ExitPortPlatform::default(),
            ram: BatchRam::new(ram),
            batches: 0,
        })
    }

    /// The guest's memory.
    pub(super) fn ram(&self) -> &BatchRam {
        &self.ram
    }

    /// Runs a batch.
    ///
    /// # Errors
    /// If the interpreter ends it in another way than a [`BatchEnd`] says; a new runner must then
    /// replace this one.
    pub(super) fn run(&mut self, batch: &SystemBatch) -> Result<BatchEnd> {
        self.batches += 1;
        if self.batches > BATCHES_PER_VCPU {
            *self = Self::new()?;
        }
        self.ram.load(batch);
        self.vcpu.code_changed(0, MEMORY as u64);
        self.vcpu.load(&batch.kernel.start(batch));
        self.platform.exited = false;
        match self.vcpu.run(&mut self.platform, BUDGET) {
            Exit::Leave if self.platform.exited => Ok(BatchEnd::Done),
            Exit::Shutdown => Ok(BatchEnd::Shutdown),
            other => bail!("the interpreter ended the batch with {other:?}"),
        }
    }
}
