//! Confines this process before it runs a guest: seccomp by thread, Landlock, resource limits.
//!
//! A guest that took over the monitor would find a thread that can make the system calls of its task
//! and no others, no file but those that are open, and no way to a new program. docs/internals/security.md
//! has the threat model. The rules are in `resources/seccomp`, a file for each kind of thread.

mod allocator;
mod files;
mod filters;
mod limits;
mod names;
mod threads;
mod trap;

pub use files::{FileAccess, confine_files};
pub use filters::{SandboxNeeds, Strictness, ThreadKind};
pub use threads::{SandboxError, enter, prepare};
