//! The state of a whole machine as plain data.

use std::io;

use hindsight_cpu::cpuid::CpuidTable;
use hindsight_cpu::msr::{MsrStateError, MsrsState};
use hindsight_cpu::state::{CpuState, StateError};
use hindsight_cpu::uarch::{CacheState, CoreUarchState, UarchStateError};
use hindsight_devices::clock::Ticks;
use hindsight_devices::irq::{InterruptsError, InterruptsState};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{DevicesError, DevicesState, Pages, PmuTotalsState, RunLogState, Schedule};

/// The version of the [`Snapshot`] format. A snapshot of another version is refused.
pub const SNAPSHOT_VERSION: u32 = 8;

/// The configuration of a machine: a snapshot fits only machines of the same shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineShape {
    /// Number of vCPUs.
    pub cpus: usize,
    /// First address and size in bytes of each range of memory.
    pub memory: Vec<(u64, u64)>,
    /// The clock's frequency.
    pub clock_hz: u64,
    /// The processor model.
    pub cpuid: CpuidTable,
}

/// One vCPU with its models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuState {
    /// The architectural state.
    pub cpu: CpuState,
    /// The MSRs of the models.
    pub msrs: MsrsState,
    /// The totals behind its performance counters.
    pub events: PmuTotalsState,
    /// The vCPU's branch predictor and caches.
    pub unit: CoreUarchState,
    /// The vCPU's run log: the event hash, the instruction count and the random numbers.
    pub log: RunLogState,
}

/// A whole machine between two instructions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`SNAPSHOT_VERSION`].
    pub version: u32,
    /// The machine's configuration.
    pub shape: MachineShape,
    /// The clock.
    pub ticks: Ticks,
    /// The position in the round of turns.
    pub schedule: Schedule,
    /// The vCPUs.
    pub vcpus: Vec<VcpuState>,
    /// The interrupt controllers and timers.
    pub interrupts: InterruptsState,
    /// The other devices.
    pub devices: DevicesState,
    /// The last-level cache.
    pub cache: CacheState,
    /// Guest memory.
    pub memory: Pages,
}

impl Snapshot {
    /// Instructions that all vCPUs together had retired.
    pub fn icount(&self) -> u64 {
        let retired = self.vcpus.iter().map(|vcpu| vcpu.log.retired);
        retired.fold(0, u64::wrapping_add)
    }
}

/// Why a snapshot cannot be restored or made.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// Another version of Hindsight made it.
    #[error("the snapshot has format version {0}; this program reads version {SNAPSHOT_VERSION}")]
    Version(u32),
    /// The machine has other vCPUs, memory, clock or CPUID.
    #[error("the snapshot is of a machine of another shape: its {0} differ")]
    Shape(&'static str),
    /// The schedule names a vCPU that does not exist, or more instructions than a turn has.
    #[error("the snapshot's schedule is invalid")]
    Schedule,
    /// The clock would overflow before any run ends.
    #[error("the snapshot's clock is impossible")]
    Clock,
    /// A page is not in guest memory.
    #[error("the snapshot has a page at {0:#x}, where this machine has no memory")]
    Page(u64),
    /// A vCPU's state is invalid.
    #[error("the state of vCPU {cpu} in the snapshot is invalid")]
    Vcpu {
        /// Number of the vCPU.
        cpu: usize,
        /// What is invalid.
        #[source]
        source: StateError,
    },
    /// A vCPU's MSRs are invalid.
    #[error("the MSRs of vCPU {cpu} in the snapshot are invalid")]
    Msrs {
        /// Number of the vCPU.
        cpu: usize,
        /// What is invalid.
        #[source]
        source: MsrStateError,
    },
    /// A vCPU's counts of instructions contradict each other, or could overflow.
    #[error("the counts of instructions of vCPU {0} in the snapshot are impossible")]
    Counts(usize),
    /// A cache's or a branch predictor's state is invalid.
    #[error(transparent)]
    Model(#[from] UarchStateError),
    /// The interrupt controllers' state is invalid.
    #[error(transparent)]
    Interrupts(#[from] InterruptsError),
    /// A device's state is invalid.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// The host cannot read or write guest memory.
    #[error("guest memory cannot be read or written")]
    Memory(#[from] io::Error),
}
