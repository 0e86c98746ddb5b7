//! Why a machine could not be built or run.

use std::io;

use hindsight_cpu::profile::ProfileError;
use hindsight_devices::BusError;
use thiserror::Error;

use super::CPUS_MAX;
use crate::boot::BootError;
use crate::boot::acpi::AcpiTablesError;
use crate::kvm::KvmError;
use crate::memory::RamError;
use crate::memory::layout::LayoutError;

/// Why a machine could not be built, or its threads could not be started.
#[derive(Debug, Error)]
pub enum MachineError {
    /// KVM refused.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The size of memory is impossible.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The ACPI tables cannot be placed.
    #[error(transparent)]
    Acpi(#[from] AcpiTablesError),
    /// Guest memory could not be allocated.
    #[error(transparent)]
    Memory(#[from] RamError),
    /// The image cannot be booted.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Two devices at one address: a bug of the monitor.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The host cannot provide the processor.
    #[error("--cpu")]
    Profile(#[from] ProfileError),
    /// The number of processors is impossible.
    #[error("a machine has 1 to {CPUS_MAX} processors, not {0}")]
    Cpus(usize),
    /// Deterministic mode with KVM.
    #[error("deterministic mode needs the interpreter: KVM cannot count instructions")]
    Deterministic,
    /// Only deterministic machines can be taken to an instruction.
    #[error("the machine is not deterministic")]
    NotDeterministic,
    /// The host has no more file descriptors.
    #[error("no file descriptor for the debugger's events")]
    StopReports(#[source] io::Error),
    /// A thread could not be started.
    #[error("a thread cannot be started")]
    Thread(#[source] io::Error),
}
