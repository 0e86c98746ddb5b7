//! A server of gdb's remote protocol for x86 virtual machines.
//!
//! The debugger is outside the machine: no guest can see, lose or overwrite what a client sets. It
//! serves gdb and lldb with any number of breakpoints and watchpoints, registers in every mode of the
//! processor, reverse execution, branch traces, stops at exceptions, ports and MSRs, and the symbols
//! of the guest's own Linux kernel.
//!
//! A virtual machine monitor implements [`DebugTarget`] and starts a [`GdbServer`]:
//!
//! ```
//! use hindsight_gdb::{DebugTarget, GdbServer, ListenAddress};
//!
//! fn serve(machine: Box<dyn DebugTarget>) -> Result<GdbServer, Box<dyn std::error::Error>> {
//!     let address: ListenAddress = "tcp::1234".parse()?;
//!     let listener = address.listen(false)?;
//!     Ok(GdbServer::start(machine, listener, |message| eprint!("{message}"))?)
//! }
//! ```
//!
//! `examples/toy` is a machine of three instructions that does so.
//!
//! # Layers
//!
//! Each layer can be used without those after it:
//!
//! - [`framing`]: packets in a stream of bytes;
//! - [`registers`]: register layouts, target descriptions, reading and writing registers of a
//!   [`CpuState`](hindsight_cpu::state::CpuState);
//! - [`memory`]: guest memory by linear address;
//! - [`breakpoints`], [`btrace`]: what clients set, and branch traces in gdb's format;
//! - [`kernel`]: symbols of a Linux kernel from its memory;
//! - [`target`]: the traits that a machine implements;
//! - [`Debugger`]: the state of a debugging session with a machine;
//! - [`ClientSession`]: the protocol, from received bytes to bytes to send, without a socket;
//! - [`GdbServer`], [`Listener`]: a thread and sockets.

pub mod breakpoints;
pub mod btrace;
mod cancel;
mod client_file;
mod core_file;
mod debugger;
mod elf_header;
mod file_client;
pub mod framing;
pub mod kernel;
mod listen;
pub mod memory;
pub mod modes;
pub mod monitor;
pub mod registers;
mod server;
mod session;
mod stop_reply;
mod stub;
pub mod target;
#[cfg(test)]
mod test_ram;
mod thread_id;
mod threads;

pub use debugger::{DebugError, DebugStop, Debugger};
pub use file_client::RemoteFile;
pub use listen::{ClientStream, ListenAddress, ListenError, Listener};
pub use server::GdbServer;
pub use session::{ClientSession, SessionStatus};
pub use target::DebugTarget;

/// The README's examples compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
