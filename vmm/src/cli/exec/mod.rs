//! `hindsight exec`: runs a command of this machine in a guest that sees this machine's files.
//!
//! The guest is Debian's kernel, or another one, with an initramfs that is made for each run: the
//! program `guest-tests/init`, the modules that it loads, and what to run. The host's root is a share
//! below an overlay in the guest's memory. Input, output and exit status pass through the ports of a
//! virtio console.

mod command;
mod initramfs;
mod kernel;
mod modules;
mod session;

pub use command::{ExecArgs, run};
