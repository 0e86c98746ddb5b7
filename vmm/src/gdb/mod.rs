//! The gdb stub: a debugger outside the machine.
//!
//! Read `server` (the one thread of the stub), `filter` (a client's session, in front of
//! `gdbstub`), `target` (the machine as `gdbstub` sees it) and `debugger` (the hold on the
//! machine). Whatever a client sets, no guest can see: breakpoints are the engine's, never changes
//! of the guest's memory or debug registers.

mod breakpoints;
mod btrace;
mod debugger;
mod filter;
mod framing;
mod kernel;
mod listen;
mod memory;
mod monitor;
mod registers;
mod server;
mod stop;
mod target;
mod threads;

pub use listen::{Address, ListenError, Listener};
pub use server::Server;
