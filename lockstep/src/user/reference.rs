//! What a batch is compared with: this host's processor, or the interpreter.

use crate::user::batch::Batch;
use crate::user::host::HostRunner;
use crate::user::interp::{InterpRunner, Tier};
use anyhow::Result;
use clap::ValueEnum;

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TierComparison {
    /// The interpreter with this host's processor.
    Host,
    /// The interpreter's own computation of vector instructions with this host's processor.
    Software,
    /// Translated code with the interpreter.
    Translated,
}

/// The side that is taken to be right.
#[derive(Debug)]
pub(super) enum Reference {
    Host(HostRunner),
    Interp(InterpRunner),
}

impl Reference {
    /// Both sides of a comparison: the reference, and the side that is tested.
    ///
    /// # Errors
    /// If memory cannot be mapped.
    pub(super) fn sides(comparison: TierComparison) -> Result<(Self, InterpRunner)> {
        Ok(match comparison {
            TierComparison::Host => Self::host_and(Tier::Interpreter)?,
            TierComparison::Software => Self::host_and(Tier::Software)?,
            // Translated code is mapped where code that the host executes could find it, so both
            // sides are guests.
            TierComparison::Translated => {
                let base = crate::layout::REGION_BASE;
                let interp = InterpRunner::new(base, Tier::Interpreter)?;
                (
                    Self::Interp(interp),
                    InterpRunner::new(base, Tier::Translator)?,
                )
            }
        })
    }

    fn host_and(tier: Tier) -> Result<(Self, InterpRunner)> {
        let host = HostRunner::new()?;
        let interp = InterpRunner::new(host.base(), tier)?;
        Ok((Self::Host(host), interp))
    }

    /// What messages call the two sides.
    pub(super) fn names(&self) -> [&'static str; 2] {
        match self {
            Self::Host(_) => ["host", "interpreter"],
            Self::Interp(_) => ["interpreter", "translated"],
        }
    }

    /// Linear address of the region.
    pub(super) fn base(&self) -> u32 {
        match self {
            Self::Host(host) => host.base(),
            Self::Interp(interp) => interp.base(),
        }
    }

    /// The region's memory.
    pub(super) fn region(&self) -> &[u8] {
        match self {
            Self::Host(host) => host.region(),
            Self::Interp(interp) => interp.memory(),
        }
    }

    /// Puts a batch into the region; its data is filled in before each run.
    pub(super) fn install(&mut self, batch: &Batch) {
        match self {
            Self::Host(host) => host.install(batch),
            Self::Interp(interp) => interp.install(batch),
        }
    }

    /// Fills parameters and data of the installed batch for the run with this number.
    pub(super) fn fill(&mut self, batch: &Batch, run: u64) {
        match self {
            Self::Host(host) => host.fill(batch, run),
            Self::Interp(interp) => batch.fill(run, interp.region()),
        }
    }

    /// Runs the batch that is installed.
    ///
    /// # Errors
    /// If the interpreter cannot execute it.
    pub(super) fn run(&mut self) -> Result<()> {
        match self {
            Self::Host(host) => host.run(),
            Self::Interp(interp) => return interp.run(),
        }
        Ok(())
    }

    /// Clears the parts of the region that are not compared.
    pub(super) fn clear_ignored(&mut self, batch: &Batch) {
        match self {
            Self::Host(host) => host.clear_ignored(batch),
            Self::Interp(interp) => {
                for &(at, len) in &batch.ignored {
                    interp.region()[at as usize..][..len as usize].fill(0);
                }
            }
        }
    }

    /// Starts a new vCPU, if the side has one.
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn renew(&mut self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Interp(interp) => interp.renew(),
        }
    }
}
