//! The interpreter's side: a guest with a small kernel that runs one batch after the other.

#![expect(
    unsafe_code,
    reason = "the interpreter gets the address of guest memory"
)]

use crate::layout::*;
use crate::mapping::SharedRam;
use crate::platform::ExitPortPlatform;
use crate::user::batch::{Batch, normalize_faults};
use crate::user::kernel::{self, MEMORY, REGION};
use anyhow::{Result, anyhow};
use hindsight_interp::{Exit, Memory, RegionSpec, Vcpu};
use std::sync::Arc;

/// Instructions after which a run is taken for one without an end: more than any batch takes.
const BUDGET: u64 = 1 << 24;

/// The interpreter with one region.
#[derive(Debug)]
pub(super) struct InterpRunner {
    // Before the memory that it uses: fields drop in this order.
    vcpu: Vcpu,
    platform: ExitPortPlatform,
    ram: SharedRam,
    base: u32,
    tier: Tier,
    /// Instructions that retired in vCPUs before the current one: in translated code, and in all.
    before: (u64, u64),
}

/// What executes the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tier {
    Interpreter,
    /// The interpreter, which executes vector instructions in software.
    Software,
    /// Translated code, from the first run of a block on.
    Translator,
}

/// Maximum size of translated code in bytes.
const CODE_MAX: usize = 16 << 20;

impl InterpRunner {
    /// A guest whose user code has the region at the linear address `base`.
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn new(base: u32, tier: Tier) -> Result<Self> {
        let mut ram = SharedRam::new(MEMORY)?;
        kernel::install(ram.bytes_mut(), base);
        let vcpu = new_vcpu(&ram, base, tier)?;
        Ok(Self {
            vcpu,
            platform: ExitPortPlatform::default(),
            ram,
            base,
            tier,
            before: (0, 0),
        })
    }

    /// Linear address of the region.
    pub(super) fn base(&self) -> u32 {
        self.base
    }

    /// Returns how many instructions retired in translated code, and how many in all.
    pub(super) fn retired(&self) -> (u64, u64) {
        let stats = self.vcpu.stats();
        let (translated, all) = self.before;
        (translated + stats.translated, all + stats.retired)
    }

    /// Starts a new vCPU, whose code cache is empty.
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn renew(&mut self) -> Result<()> {
        kernel::install(self.ram.bytes_mut(), self.base);
        self.before = self.retired();
        self.vcpu = new_vcpu(&self.ram, self.base, self.tier)?;
        self.platform = ExitPortPlatform::default();
        Ok(())
    }

    /// The region's memory.
    pub(super) fn region(&mut self) -> &mut [u8] {
        &mut self.ram.bytes_mut()[REGION..]
    }

    /// The region's memory, to read.
    pub(super) fn memory(&self) -> &[u8] {
        &self.ram.bytes()[REGION..]
    }

    /// Puts a batch into the region; its data is filled in before each run.
    pub(super) fn install(&mut self, batch: &Batch) {
        batch.install(self.region());
        let at = REGION as u64 + u64::from(CODE);
        self.vcpu.code_changed(at, CODE_LEN.into());
    }

    /// Runs the batch that is installed.
    ///
    /// # Errors
    /// If the interpreter does not know an instruction, shuts down, or does not end.
    pub(super) fn run(&mut self) -> Result<()> {
        self.platform.exited = false;
        let exit = self.vcpu.run(&mut self.platform, BUDGET);
        normalize_faults(self.region());
        if exit == Exit::Leave && self.platform.exited {
            return Ok(());
        }
        self.renew()?;
        Err(match exit {
            Exit::Missing { bytes, rip } => {
                anyhow!("the interpreter does not know the instruction {bytes:02x?} at {rip:#x}")
            }
            Exit::Budget => anyhow!("the batch did not end within {BUDGET} instructions"),
            other => anyhow!("the interpreter ended the batch with {other:?}"),
        })
    }
}

fn new_vcpu(ram: &SharedRam, base: u32, tier: Tier) -> Result<Vcpu> {
    let spec = RegionSpec {
        gpa: 0,
        len: MEMORY as u64,
        host: ram.pointer(),
        writable: true,
    };
    // SAFETY: the mapping has this length, and its owner goes along. The runner accesses the RAM
    // only while the vCPU does not run, because both need the runner mutably.
    let memory = unsafe { Memory::new(&[spec], ram.owner()) }?;
    let mut vcpu = Vcpu::new(Arc::new(memory));
    match tier {
        // Translated code would be mapped where the code of the cases finds it on the host.
        Tier::Interpreter => vcpu.set_translation(u64::MAX, 0),
        Tier::Software => {
            vcpu.set_translation(u64::MAX, 0);
            vcpu.set_software_vectors(true);
        }
        Tier::Translator => vcpu.set_translation(1, CODE_MAX),
    }
    vcpu.load(&kernel::start(base));
    Ok(vcpu)
}
