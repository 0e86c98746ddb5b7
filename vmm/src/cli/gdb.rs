//! The options of `hindsight run` for debuggers.

use std::io::{self, Write};

use anyhow::Context;
use clap::Args;

use crate::gdb::{Address, Server};
use crate::machine::{Machine, Outcome};

#[derive(Debug, Args)]
pub(super) struct GdbArgs {
    /// Serve gdb or lldb at tcp:HOST:PORT (tcp::PORT on this machine only) or unix:PATH
    #[arg(long, value_name = "WHERE")]
    gdb: Option<Address>,
    /// Stop before the first instruction, until a debugger connects
    #[arg(long, requires = "gdb")]
    gdb_wait: bool,
    /// Let other machines connect to --gdb, and with that do anything to the guest
    #[arg(long, requires = "gdb")]
    gdb_allow_remote: bool,
}

/// Serves debuggers, if that is wanted. The machine is theirs to start.
pub(super) fn start(args: &GdbArgs, machine: &mut Machine) -> anyhow::Result<Option<Server>> {
    let Some(address) = &args.gdb else {
        return Ok(None);
    };
    let listener = address.listen(args.gdb_allow_remote).context("--gdb")?;
    let mut stderr = io::stderr();
    if address.is_remote() {
        let _ = writeln!(
            stderr,
            "hindsight: warning: --gdb {address}: whoever can connect there can do anything to the \
             guest"
        );
    }
    let shown = listener.address().unwrap_or_else(|| address.clone());
    let waits = if args.gdb_wait { ", and waits" } else { "" };
    let _ = writeln!(stderr, "hindsight: gdb may connect at {shown}{waits}");
    machine.start_paused();
    let server = Server::start(machine.board(), listener, args.gdb_wait);
    Ok(Some(server.context("--gdb")?))
}

/// What a debugger is told of the end: the status of a guest that ended by itself.
pub(super) fn exit_status(outcome: &Outcome) -> Option<u8> {
    match outcome {
        Outcome::Exit(code) => Some(code.to_le_bytes()[0] << 1 | 1),
        Outcome::PowerOff => Some(0),
        Outcome::Reset => Some(8),
        Outcome::Crash(_) => Some(4),
        _ => None,
    }
}
