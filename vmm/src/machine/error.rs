//! Errors of building and starting a machine.

use std::io;

use hindsight_cpu::profile::ProfileError;
use hindsight_devices::BusError;
use thiserror::Error;

use super::CPUS_MAX;
use crate::boot::BootError;
use crate::boot::acpi::AcpiTablesError;
use crate::kvm::KvmError;
use crate::memory::layout::{FIRMWARE_MAX, LayoutError};
use crate::memory::{ByteSize, RamError};

/// Why a machine could not be built or started.
#[derive(Debug, Error)]
pub enum MachineError {
    /// KVM refused.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The memory size is impossible.
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
    /// The firmware's variables do not fit below its code.
    #[error(
        "{} of the firmware's variables and the firmware are more than {} KiB together",
        ByteSize(*.0),
        FIRMWARE_MAX >> 10
    )]
    FirmwareVars(u64),
    /// Two devices overlap on a bus, which is a bug of the monitor.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The host cannot provide the processor.
    #[error("--cpu")]
    Profile(#[from] ProfileError),
    /// The number of vCPUs is impossible.
    #[error("a machine has 1 to {CPUS_MAX} processors, not {0}; change --cpus")]
    Cpus(usize),
    /// There are more devices than the PCI bus has slots.
    #[error("a machine has up to {1} PCI devices, not {0}")]
    Devices(usize, usize),
    /// A deterministic machine cannot run under KVM.
    #[error(
        "deterministic mode needs the interpreter, since KVM cannot count instructions; \
         use --engine interp or auto"
    )]
    Deterministic,
    /// Only a deterministic machine can be run by its caller.
    #[error("the machine is not deterministic")]
    NotDeterministic,
    /// The host has no file descriptor left.
    #[error("the event descriptor for the debugger cannot be created")]
    StopReports(#[source] io::Error),
    /// A thread could not be started.
    #[error("a thread of the machine cannot be started")]
    Thread(#[source] io::Error),
}
