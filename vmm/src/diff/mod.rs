//! The divergence finder behind `hindsight diff`.
//!
//! [`compare`] finds the first instruction at which two deterministic runs differ,
//! [`compare_with_kvm`] the first one that KVM and the interpreter execute differently.

mod kvm;
mod runs;

pub use kvm::{Compared, KvmBranch, KvmDiffError, KvmVerdict, Refused, compare_with_kvm};
pub use runs::{Divergence, Executed, Progress, Side, Verdict, compare};
