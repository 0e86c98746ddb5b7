//! The source of a run's input: a console, or the input log of an earlier run.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};

use crate::cli::config::RunConfig;
use crate::cli::read::read_text;
use crate::console::Deliver;
use crate::deterministic::input::{InputFeed, InputLog, InputQueue, LoggedMachine};
use crate::machine::Machine;
use crate::vcpu::run_control::Outcome;

/// The largest input log that is read, in bytes.
const INPUT_LOG_MAX: u64 = 4 << 30;

/// The machine from which the input log must be.
fn logged_machine(config: &RunConfig) -> LoggedMachine {
    LoggedMachine {
        cpus: config.machine.cpus as u64,
        memory: config.machine.memory.0.0,
        seed: config.deterministic_seed().unwrap_or(0),
    }
}

/// Reads the log of `--replay-input`.
pub(super) fn read_log(config: &RunConfig) -> anyhow::Result<Option<InputLog>> {
    let Some(path) = config.determinism.replay_input.as_deref() else {
        return Ok(None);
    };
    let name = path.display();
    let text = read_text("input log", path, INPUT_LOG_MAX)?;
    let log: InputLog = text.parse().with_context(|| format!("input log {name}"))?;
    let own = logged_machine(config);
    if log.machine != own {
        let other = log.machine;
        bail!("input log {name} is of a machine with {other}, this one has {own}");
    }
    Ok(Some(log))
}

/// The feed of a deterministic machine, and the queue for input that is recorded.
pub(super) fn feed(
    config: &RunConfig,
    replay: Option<InputFeed>,
) -> anyhow::Result<(InputFeed, Option<Arc<InputQueue>>)> {
    let Some(path) = config.determinism.record_input.as_deref() else {
        return Ok((replay.unwrap_or_default(), None));
    };
    let context = || format!("--record-input {}", path.display());
    let file = File::create(path).with_context(context)?;
    let queue = Arc::new(InputQueue::default());
    let feed = InputFeed::record(queue.clone(), logged_machine(config), Box::new(file));
    Ok((feed.with_context(context)?, Some(queue)))
}

/// Returns the function that ends the run for the user.
///
/// If input is recorded, the function also records the end.
pub(super) fn quit(machine: &Machine, queue: Option<Arc<InputQueue>>) -> impl Fn() + Send + use<> {
    let board = machine.board().clone();
    move || match &queue {
        Some(queue) => queue.quit(),
        None => board.run.finish(Outcome::Quit),
    }
}

/// Returns the function that receives typed input.
///
/// It records the input, drops it in a deterministic run without a log, or passes it to the serial
/// port.
pub(super) fn delivery(
    config: &RunConfig,
    machine: &Machine,
    queue: Option<Arc<InputQueue>>,
) -> Deliver {
    match queue {
        Some(queue) => Box::new(move |bytes: &[u8]| queue.push(bytes)),
        None if config.determinism.deterministic => no_input(),
        None => machine.serial_input(),
    }
}

/// Drops typed input, with a warning: input at the host's time would make every run a different
/// one.
fn no_input() -> Deliver {
    let warned = AtomicBool::new(false);
    Box::new(move |bytes| {
        if !bytes.is_empty() && !warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("deterministic mode takes no input without --record-input");
        }
        bytes.len()
    })
}
