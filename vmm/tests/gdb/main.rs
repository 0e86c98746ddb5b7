//! Sessions of gdb and lldb, and of clients that send malformed packets.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod dump;
mod history;
mod kvm;
mod linux;
mod lldb;
mod malformed;
mod reverse;
mod rig;
mod sessions;
mod trace;
mod writes;
