//! The source of a run's input: a console, or the input log of an earlier run.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context, bail};
use hindsight_devices::i8042::keys::typed;

use crate::cli::config::{DisplayTarget, RunConfig};
use crate::cli::read::read_text;
use crate::console::Deliver;
use crate::deterministic::input::{InputFeed, InputLog, InputQueue, LoggedMachine};
use crate::machine::Machine;
use crate::sync::lock;
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
pub(super) fn quit(
    machine: &Machine,
    queue: Option<Arc<InputQueue>>,
) -> impl Fn() + Clone + Send + use<> {
    let board = machine.board().clone();
    move || match &queue {
        Some(queue) => queue.quit(),
        None => board.run.finish(Outcome::Quit),
    }
}

/// Returns the function that receives what is typed for the serial port.
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

/// Returns the function that receives scan codes; `None` in a deterministic run without a log, and without a
/// keyboard.
pub(super) fn keys(
    config: &RunConfig,
    machine: &Machine,
    queue: Option<Arc<InputQueue>>,
) -> Option<Deliver> {
    if config.console.display.0 == DisplayTarget::None {
        return None;
    }
    match queue {
        Some(queue) => Some(Box::new(move |codes: &[u8]| queue.push_keys(codes))),
        None if config.determinism.deterministic => None,
        None => Some(machine.key_input()),
    }
}

/// Returns the function that receives what is typed for the keyboard.
pub(super) fn typing(keys: Option<Deliver>) -> Deliver {
    let Some(keys) = keys else { return no_input() };
    // How many codes of the first key the keyboard has taken: what it did not take is offered again.
    let sent = Mutex::new(0);
    Box::new(move |bytes| {
        let mut sent = lock(&sent);
        let mut rest = bytes;
        while !rest.is_empty() {
            let (len, codes) = typed(rest);
            *sent += keys(codes.get(*sent..).unwrap_or_default());
            if *sent < codes.len() {
                break;
            }
            *sent = 0;
            rest = rest.get(len..).unwrap_or_default();
        }
        bytes.len() - rest.len()
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typed_keys_are_pressed_and_released_however_little_the_keyboard_takes() {
        let log = Arc::new(Mutex::new(Vec::new()));
        let taken = log.clone();
        let keys: Deliver = Box::new(move |codes: &[u8]| {
            let one = codes.len().min(1);
            lock(&taken).extend_from_slice(&codes[..one]);
            one
        });
        let deliver = typing(Some(keys));
        let mut rest: &[u8] = b"A\x1b[A\r";
        for _ in 0..20 {
            rest = &rest[deliver(rest)..];
        }
        assert!(rest.is_empty());
        let codes = [0x2a, 0x1e, 0x9e, 0xaa, 0xe0, 0x48, 0xe0, 0xc8, 0x1c, 0x9c];
        assert_eq!(*lock(&log), codes);
    }
}
