//! A client's session: the packet filter in front of the crate `gdbstub`.
//!
//! `gdbstub` gets whole, well-formed packets while the machine is paused, and never sees
//! acknowledgements or Ctrl-C. The filter answers what `gdbstub` lacks: `?` with the true reason,
//! detach and kill, lists of threads, branch traces. An error that `gdbstub` takes for fatal costs the
//! client that one packet: a fresh state machine replaces the one that failed ([`proxy`]).

mod client;
mod packets;
mod proxy;
mod region;
mod restart;
mod supported;
mod transfer;

pub use client::{ClientSession, SessionStatus};
