//! Where the input of a run comes from: the console, a log, nowhere.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};

use crate::cli::run::{RunArgs, read};
use crate::console::Deliver;
use crate::deterministic::input::{InputFeed, InputLog, InputQueue, LoggedMachine};
use crate::machine::Machine;
use crate::vcpu::run_control::Outcome;

impl RunArgs {
    /// Input goes to a log.
    pub(in crate::cli) const fn records_input(&self) -> bool {
        self.record_input.is_some()
    }

    /// Which machine an input log must be of.
    fn logged_machine(&self) -> LoggedMachine {
        LoggedMachine {
            cpus: self.cpus as u64,
            memory: self.memory,
            seed: self.seed,
        }
    }
}

/// The log of `--replay-input`.
pub(super) fn input_log(args: &RunArgs) -> anyhow::Result<Option<InputLog>> {
    let Some(path) = &args.replay_input else {
        return Ok(None);
    };
    let name = path.display();
    let text = String::from_utf8(read("input log", path)?)
        .map_err(|_| anyhow::anyhow!("input log {name} is not text"))?;
    let log: InputLog = text.parse().with_context(|| format!("input log {name}"))?;
    let own = args.logged_machine();
    if log.machine != own {
        let other = log.machine;
        bail!("input log {name} is of a machine with {other}, this one has {own}");
    }
    Ok(Some(log))
}

/// Where the input of a deterministic machine comes from, and goes to.
pub(super) fn feed(
    args: &RunArgs,
    log: Option<InputLog>,
) -> anyhow::Result<(InputFeed, Option<Arc<InputQueue>>)> {
    let Some(path) = &args.record_input else {
        return Ok((log.map(InputFeed::replay).unwrap_or_default(), None));
    };
    let context = || format!("--record-input {}", path.display());
    let file = File::create(path).with_context(context)?;
    let inbox = Arc::new(InputQueue::default());
    let feed = InputFeed::record(inbox.clone(), args.logged_machine(), Box::new(file));
    Ok((feed.with_context(context)?, Some(inbox)))
}

/// What ends a run from outside: where input is recorded, that is input too.
pub(super) fn ending(
    machine: &Machine,
    inbox: &Option<Arc<InputQueue>>,
) -> impl Fn() + Send + use<> {
    let (board, inbox) = (machine.board().clone(), inbox.clone());
    move || match &inbox {
        Some(inbox) => inbox.quit(),
        None => board.run.finish(Outcome::Quit),
    }
}

/// Takes what is typed and drops it: input at the host's time would make every run another one.
pub(super) fn no_input() -> Deliver {
    let said = AtomicBool::new(false);
    Box::new(move |bytes| {
        if !bytes.is_empty() && !said.swap(true, Ordering::Relaxed) {
            let _ = write!(
                io::stderr(),
                "hindsight: deterministic mode takes no input without --record-input\r\n"
            );
        }
        bytes.len()
    })
}
