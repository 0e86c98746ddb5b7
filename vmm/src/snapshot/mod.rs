//! Saving a whole machine, setting it back, and going to any instruction of a run.
//!
//! [`Determined`](crate::vcpu::determined::Determined) is a deterministic machine in its owner's
//! hands: it runs to exactly instruction N, saves itself and is set back. [`Timeline`] keeps
//! checkpoints of one within a bound of memory, and goes to any instruction, forwards or back.
//! [`compare`] finds where two runs part, [`compare_with_kvm`] where KVM parts from the interpreter.
//! `docs/determinism.md` describes both for their users.

mod diverge;
mod native;
mod pages;
mod state;
mod timeline;

pub use diverge::{Divergence, Executed, Progress, Side, Verdict, compare};
pub use native::{Compared, KvmBranch, NativeError, NativeVerdict, Refused, compare_with_kvm};
pub(crate) use pages::MemoryKeeper;
pub use pages::{PAGE, Pages};
pub use state::{RestoreError, Shape, Snapshot, VERSION, VcpuState};
pub use timeline::{Limits, Timeline};
