//! The divergence finder behind `hindsight diff`.
//!
//! [`compare`] finds the first instruction after which two deterministic runs differ,
//! [`compare_with_kvm`] the first one that KVM and the interpreter execute differently.

mod difference;
mod divergence;
mod kvm;
mod runs;

pub use divergence::{DivergedMachine, Divergence, ExecutedInstruction};
pub use kvm::{
    KvmBranch, KvmDiffError, KvmDiffProgress, KvmDiffVerdict, NotComparable, compare_with_kvm,
};
pub use runs::{DiffProgress, DiffVerdict, compare};
