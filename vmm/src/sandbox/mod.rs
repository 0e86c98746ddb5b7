//! Confines this process before it runs a guest: seccomp by thread, Landlock, resource limits.
//!
//! An attacker who took over a thread of the monitor could make only the system calls that this
//! thread's task needs, access only open files, and start no program. docs/internals/security.md
//! has the threat model. The rules are in `resources/seccomp`, a file for each kind of thread.

mod allocator;
mod files;
mod filters;
mod limits;
mod names;
mod threads;
mod trap;

pub use allocator::settle_allocator;
pub use files::{FileAccess, confine_files};
pub use filters::{SandboxNeeds, Strictness, ThreadKind};
pub use threads::{SandboxError, enter, prepare};
