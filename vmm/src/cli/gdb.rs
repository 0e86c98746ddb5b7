//! The options of `hindsight run` for debuggers.

use std::io::{self, Write};

use anyhow::{Context, anyhow};
use clap::Args;
use hindsight_gdb::{GdbServer, ListenAddress, ListenError};

use crate::debugger;
use crate::machine::Machine;
use crate::vcpu::branch_history;
use crate::vcpu::run_control::Outcome;

#[derive(Debug, Args)]
pub(super) struct GdbArgs {
    /// Serve gdb or lldb at tcp:HOST:PORT (tcp::PORT on this machine only) or unix:PATH
    #[arg(long, value_name = "WHERE")]
    gdb: Option<ListenAddress>,
    /// Stop before the first instruction, until a debugger connects
    #[arg(long, requires = "gdb")]
    gdb_wait: bool,
    /// Let other machines connect to --gdb, and with that do anything to the guest
    #[arg(long, requires = "gdb")]
    gdb_allow_remote: bool,
    /// Keep the last N branches of every processor [default: 65536], for a debugger that connects
    /// later
    #[arg(long, value_name = "branches[=N]", value_parser = parse_record)]
    record: Option<usize>,
    /// Most memory for the checkpoints by which a debugger goes back in a deterministic run, in bytes
    /// or with a suffix K, M, G
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = crate::cli::run::size,
        default_value = "1G",
        requires_all = ["gdb", "deterministic"]
    )]
    checkpoint_memory: u64,
}

impl GdbArgs {
    /// Whether an option requires the interpreter.
    pub(super) const fn needs_interpreter(&self) -> bool {
        self.record.is_some()
    }
}

/// Parses the argument of `--record`: how many branches to keep.
fn parse_record(text: &str) -> Result<usize, String> {
    let number = match text.split_once('=') {
        None if text == "branches" => return Ok(0x1_0000),
        Some(("branches", number)) => number,
        _ => return Err("only branches can be recorded: branches or branches=N".to_owned()),
    };
    let max = branch_history::MOST;
    let limit = number
        .parse()
        .ok()
        .filter(|limit| (1..=max).contains(limit));
    limit.ok_or_else(|| format!("{number} is not a number from 1 to {max}"))
}

/// Starts the server of `--gdb`, if that was given. The machine then resumes when the server says so.
pub(super) fn start(args: &GdbArgs, machine: &mut Machine) -> anyhow::Result<Option<GdbServer>> {
    if let Some(limit) = args.record {
        machine.record_branches(limit);
    }
    let Some(address) = &args.gdb else {
        return Ok(None);
    };
    let listener = address.listen(args.gdb_allow_remote);
    let listener = listener.map_err(|error| match error {
        ListenError::Remote(_) => anyhow!("{error}; --gdb-allow-remote permits that"),
        error => error.into(),
    });
    let listener = listener.context("--gdb")?;
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
    machine.limit_checkpoints(args.checkpoint_memory);
    let server = debugger::serve(machine.board(), listener, args.gdb_wait);
    Ok(Some(server.context("--gdb")?))
}

/// The exit status that a debugger shows for the end of the run; `None` if the guest did not end by
/// itself.
pub(super) fn exit_status(outcome: &Outcome) -> Option<u8> {
    match outcome {
        Outcome::Exit(code) => Some(code.to_le_bytes()[0] << 1 | 1),
        Outcome::PowerOff => Some(0),
        Outcome::Reset => Some(8),
        Outcome::Crash(_) => Some(4),
        _ => None,
    }
}
