//! Why a machine does not do what a program requires.

use std::path::PathBuf;

use hindsight_export::LocationError;
use hindsight_trace::TraceError;
use hindsight_vmm::state::{RestoreError, SnapshotFileError};
use thiserror::Error;

/// Why a machine does not do what a program requires.
#[derive(Debug, Error)]
pub enum Error {
    /// The machine cannot be built: the reasons, in one text.
    #[error("{0}")]
    Build(String),
    /// There is no such virtual processor.
    #[error("the machine has {cpus} processors, numbered from 0, and no processor {cpu}")]
    Cpu {
        /// The number that was given.
        cpu: usize,
        /// How many there are.
        cpus: usize,
    },
    /// There is no such register.
    #[error("{0:?} is no register; those that can be read are in REGISTER_NAMES")]
    Register(String),
    /// The register exists, and cannot have this value.
    #[error("{name} cannot be {value:#x}")]
    RegisterValue {
        /// The register.
        name: String,
        /// The value that was given.
        value: u64,
        /// What is wrong with it.
        #[source]
        source: RestoreError,
    },
    /// Memory is not mapped, or is not RAM.
    #[error(
        "there is no memory at {address:#x}: the guest does not map it, or it belongs to a device"
    )]
    Unmapped {
        /// The first address without memory.
        address: u64,
    },
    /// More bytes are required than the guest has.
    #[error("{len:#x} bytes are more than the guest's memory of {memory:#x}")]
    Length {
        /// How many were required.
        len: u64,
        /// The size of guest memory.
        memory: u64,
    },
    /// A location is neither an address nor a symbol.
    #[error(transparent)]
    Symbol(#[from] LocationError),
    /// A file cannot be read or written.
    #[error("{}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A snapshot's file cannot be read or written.
    #[error("{}", path.display())]
    SnapshotFile {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: SnapshotFileError,
    },
    /// The machine cannot be saved, restored, or brought to an instruction.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The trace cannot be written or read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A trace is in progress.
    #[error("the machine records: finish the trace first, it cannot go back")]
    Traced,
    /// No trace is in progress.
    #[error("the machine records nothing: begin a trace first")]
    NoTrace,
    /// These events cannot be recorded from a program.
    #[error("processes cannot be recorded here: `hindsight trace --events processes` can")]
    Processes,
    /// The guest has not taken earlier input.
    #[error(
        "{len} bytes of input do not fit: up to 4096 bytes wait until the guest takes them; run the \
         machine, then send the rest"
    )]
    Input {
        /// How many bytes were to be sent.
        len: usize,
    },
    /// What to run until says nothing to stop for.
    #[error("a predicate needs at least 1 instruction between two calls")]
    Every,
}
