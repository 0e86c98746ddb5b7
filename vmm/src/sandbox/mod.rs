//! Confines this process before it runs a guest: seccomp by thread, Landlock, resource limits.
//!
//! An attacker who has taken over a thread of the monitor can make only the system calls that this
//! thread's task needs, can access only files that are open, and can start no program.
//! docs/internals/security.md has the threat model. `resources/seccomp` has a file with the rules
//! of each kind of thread.

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
