//! Why the engines could not be compared.

use std::io;

use thiserror::Error;

use crate::kvm::KvmError;
use crate::memory::RamError;
use crate::probe::ProbeError;
use crate::state::RestoreError;

/// Why the engines could not be compared.
#[derive(Debug, Error)]
pub enum KvmDiffError {
    /// A request to KVM failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM rejected the guest's state, usually because it lacks a feature that the guest uses.
    #[error("this KVM does not take the guest's state: CR0 {cr0:#x}, CR4 {cr4:#x}, EFER {efer:#x}")]
    State {
        /// CR0.
        cr0: u64,
        /// CR4.
        cr4: u64,
        /// IA32_EFER.
        efer: u64,
        /// KVM's error.
        #[source]
        source: KvmError,
    },
    /// The probes of this KVM's single-step and breakpoints failed.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// No memory for the machine in KVM.
    #[error(transparent)]
    Memory(#[from] RamError),
    /// The interpreter's machine could not be saved or restored.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The machine is not one that can be compared.
    #[error(transparent)]
    NotComparable(#[from] NotComparable),
    /// The memory of the machine in KVM could not be read or written, or there is no timer.
    #[error("cannot access the memory or the timer of the machine in KVM")]
    Io(#[from] io::Error),
}

/// A machine that cannot be compared with KVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotComparable {
    /// Which vCPU executes the next instruction depends on all of them.
    #[error("a comparison with KVM takes a guest of one processor: use --cpus 1")]
    SeveralVcpus,
    /// Guest memory does not fit in this host's address space.
    #[error("guest memory is too large to have it twice: use a smaller --memory")]
    MemoryTooLarge,
}
