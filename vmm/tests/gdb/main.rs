//! Sessions of the real gdb, and of clients that misbehave.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod bad;
mod history;
mod linux;
mod lldb;
mod native;
mod reverse;
mod rig;
mod sessions;
