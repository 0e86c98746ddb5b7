//! Serves debuggers in `hindsight run`.

use std::io::{self, Write};

use anyhow::{Context, anyhow};

use hindsight_export::FunctionTable;
use hindsight_gdb::{GdbServer, ListenError, Listener};

use crate::boot;
use crate::cli::config::{DebugOptions, OptionWord, RecordEnd};
use crate::debugger::{self, DebuggerFiles};
use crate::machine::Machine;
use crate::vcpu::branch_history::{RecordOptions, RecordStop};
use crate::vcpu::run_control::Outcome;

/// Listens for debuggers, if `options` name an address.
pub(super) fn listen(options: &DebugOptions) -> anyhow::Result<Option<Listener>> {
    let Some(address) = options.gdb.as_ref().map(|address| &address.0) else {
        return Ok(None);
    };
    let listener = address.listen(options.gdb_allow_remote);
    let listener = listener.map_err(|error| match error {
        ListenError::Remote(_) => anyhow!("{error}; --gdb-allow-remote permits that"),
        error => error.into(),
    });
    let listener = listener.context("--gdb")?;
    let mut stderr = io::stderr();
    if address.is_remote() {
        tracing::warn!("--gdb {address}: whoever can connect there can do anything to the guest");
    }
    let bound = listener.address().unwrap_or_else(|| address.clone());
    let waits = if options.gdb_wait { ", and waits" } else { "" };
    let _ = writeln!(stderr, "hindsight: gdb may connect at {bound}{waits}");
    Ok(Some(listener))
}

/// What `--record` asks for.
pub(super) struct BranchRecording {
    options: RecordOptions,
    /// The function of a Linux kernel that ends it: one that is found only in guest memory.
    function: Option<String>,
}

/// Returns the options of `--record`. Names of functions are looked up in `image`, or if that is a
/// Linux kernel without symbols, later in guest memory.
///
/// # Errors
///
/// When the image has no function with the name.
pub(super) fn record_options(
    options: &DebugOptions,
    image: &[u8],
) -> anyhow::Result<Option<BranchRecording>> {
    let Some(OptionWord(record)) = &options.record else {
        return Ok(None);
    };
    let mut function = None;
    let stop = match &record.stop {
        Some(RecordEnd::Exception(vector)) => Some(RecordStop::Exception(*vector)),
        Some(RecordEnd::Location(text)) => match FunctionTable::of(image).locate(text) {
            Err(_) if boot::is_linux(image) => {
                function = Some(text.clone());
                None
            }
            located => {
                let hint = "--record needs a function of the image, or stop=ADDRESS";
                Some(RecordStop::Address(located.context(hint)?.0))
            }
        },
        None => None,
    };
    Ok(Some(BranchRecording {
        options: RecordOptions {
            limit: record.limit,
            every: record.every,
            stop,
        },
        function,
    }))
}

/// Starts a server for the debuggers that connect at `listener`. The debugger starts the machine, and may
/// have `files` written.
pub(super) fn start(
    options: &DebugOptions,
    (listener, files): (Option<Listener>, DebuggerFiles),
    record: Option<BranchRecording>,
    machine: &mut Machine,
) -> anyhow::Result<Option<GdbServer>> {
    if let Some(record) = record {
        machine.record_branches(record.options, record.function);
    }
    let Some(listener) = listener else {
        return Ok(None);
    };
    machine.start_paused();
    if let Some(limit) = options.checkpoint_memory {
        machine.limit_checkpoints(limit.0.0);
    }
    let server = debugger::serve(machine.board(), listener, options.gdb_wait, files);
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
