//! The whole of a machine as plain data.

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

/// The version of [`Snapshot`]'s form. One of another version is refused.
pub const VERSION: u32 = 3;

/// What a machine is, apart from what it did: a snapshot fits only a machine of its own shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Processors.
    pub cpus: usize,
    /// First address and bytes of each range of memory.
    pub memory: Vec<(u64, u64)>,
    /// The clock's ticks in a second.
    pub clock_hz: u64,
    /// Which processor.
    pub cpuid: CpuidTable,
}

/// One processor with its models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuState {
    /// The architectural state.
    pub cpu: CpuState,
    /// The MSRs of the models.
    pub msrs: MsrsState,
    /// What its performance counters count.
    pub events: PmuTotalsState,
    /// Its branch predictor and caches.
    pub unit: CoreUarchState,
    /// What deterministic mode keeps: the hash, the place, the random numbers.
    pub log: RunLogState,
}

/// A whole machine between two instructions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`VERSION`].
    pub version: u32,
    /// What machine it is of.
    pub shape: Shape,
    /// The time.
    pub ticks: Ticks,
    /// Whose turn it is.
    pub schedule: Schedule,
    /// The processors.
    pub vcpus: Vec<VcpuState>,
    /// The interrupt controllers and timers.
    pub interrupts: InterruptsState,
    /// The other devices.
    pub devices: DevicesState,
    /// The last level of cache.
    pub cache: CacheState,
    /// Memory.
    pub memory: Pages,
}

impl Snapshot {
    /// Instructions that all processors together had retired.
    pub fn retired(&self) -> u64 {
        let retired = self.vcpus.iter().map(|vcpu| vcpu.log.retired);
        retired.fold(0, u64::wrapping_add)
    }
}

/// Why a snapshot was refused, or could not be made.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// Made by another version of Hindsight.
    #[error("the snapshot has version {0}, this program reads {VERSION}")]
    Version(u32),
    /// Of a machine with other processors, memory or CPUID.
    #[error("the snapshot is of another kind of machine: its {0} differ")]
    Shape(&'static str),
    /// The schedule names a processor or a place that does not exist.
    #[error("the snapshot's schedule is not possible")]
    Schedule,
    /// A page is not in guest memory.
    #[error("the snapshot has a page at {0:#x}, where this machine has no memory")]
    Page(u64),
    /// A processor's state is impossible.
    #[error("processor {cpu} of the snapshot cannot be restored")]
    Vcpu {
        /// Which.
        cpu: usize,
        /// What is wrong.
        #[source]
        source: StateError,
    },
    /// A processor's MSRs are impossible.
    #[error("the MSRs of processor {cpu} of the snapshot cannot be restored")]
    Msrs {
        /// Which.
        cpu: usize,
        /// What is wrong.
        #[source]
        source: MsrStateError,
    },
    /// A cache or a branch predictor is impossible.
    #[error(transparent)]
    Model(#[from] UarchStateError),
    /// The interrupt controllers' state is impossible.
    #[error(transparent)]
    Interrupts(#[from] InterruptsError),
    /// A device's state is impossible.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// Guest memory cannot be read or written: a flaw of the host.
    #[error("guest memory cannot be reached")]
    Memory(#[from] io::Error),
}
