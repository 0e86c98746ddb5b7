//! The machine as `gdbstub` sees it.
//!
//! What `gdbstub` lacks, or takes for fatal, the [filter](crate::session) in front of it answers.

mod arch;
mod base;
mod breakpoints;
pub(crate) mod errno;
mod host_io;
mod resume;

pub(crate) use arch::RegisterNumber;
