//! Runs classes: shares the batches between jobs, tells the progress, keeps the state.

use crate::class::Class;
use crate::jobs::{self, Counter};
use crate::judge::{Judge, RUNS, Tally, batch_seed};
use crate::layout::SLOTS;
use crate::state::State;
use crate::stems::Stems;
use anyhow::{Context, Result};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What to run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Cases of each class, counting those that the state has.
    pub cases: u64,
    /// For all classes together.
    pub time: Option<Duration>,
    /// Decides all.
    pub seed: u64,
    /// Processes.
    pub jobs: u32,
    /// Where the state is kept.
    pub state: Option<PathBuf>,
}

/// How often the state is written.
const SAVE: Duration = Duration::from_secs(20);

/// Runs classes one after the other and adds to the state.
///
/// # Errors
/// When memory or the state's file fails.
pub fn run(classes: &[Class], plan: &Plan, state: &mut State) -> Result<()> {
    let start = Instant::now();
    for &class in classes {
        if !class.on_this_host() {
            println!("{:14} not on this processor", class.name());
            continue;
        }
        loop {
            let left = plan.time.map(|t| t.saturating_sub(start.elapsed()));
            if left == Some(Duration::ZERO) {
                return Ok(());
            }
            let slice = left.map_or(SAVE, |t| t.min(SAVE));
            if part(class, plan, slice, state)? {
                break;
            }
        }
        tell(class, state);
    }
    Ok(())
}

/// Works on a class for some time; true when all is done.
fn part(class: Class, plan: &Plan, slice: Duration, state: &mut State) -> Result<bool> {
    let stems = Stems::of(class);
    let record = state.classes.entry(class.name()).or_default();
    record.opcodes = stems.codes().count();
    let done = *record.seeds.entry(plan.seed).or_default();
    let missing = plan.cases.saturating_sub(record.cases);
    let last = done + missing.div_ceil(RUNS * SLOTS as u64);
    let counter = Counter::new(done)?;
    let start = Instant::now();
    let work = |job: u32| -> Result<Tally> {
        let mut judge = Judge::new()?;
        let mut tally = Tally::default();
        while start.elapsed() < slice {
            let index = counter.take();
            if index >= last {
                break;
            }
            let seed = batch_seed(class, plan.seed, index);
            counter.begin(job, seed);
            judge.batch(&stems, class, seed, &mut tally)?;
        }
        judge.tell(&mut tally);
        Ok(tally)
    };
    let tallies = jobs::all(plan.jobs, &counter, work)
        .with_context(|| format!("class {}, seed {:#x}", class.name(), plan.seed))?;
    record.seconds += start.elapsed().as_secs_f64() * f64::from(plan.jobs);
    // Jobs stop only after a batch, so that all below were done.
    record.seeds.insert(plan.seed, counter.next().min(last));
    for tally in tallies {
        record.add(tally);
    }
    record.opcodes = record.opcodes.max(record.codes.len());
    let finished = record.cases >= plan.cases || counter.next() >= last;
    if let Some(path) = &plan.state {
        state.write(path)?;
    }
    if !finished && std::io::stderr().is_terminal() {
        let record = &state.classes[&class.name()];
        eprintln!(
            "{:14} {} of {} cases",
            class.name(),
            record.cases,
            plan.cases
        );
    }
    Ok(finished)
}

fn tell(class: Class, state: &State) {
    let record = &state.classes[&class.name()];
    println!(
        "{:14} {:>10} cases, {:>4} of {:>4} opcodes, {:>7.0} cases/s per job, {} mismatches",
        class.name(),
        record.cases,
        record.codes.len(),
        record.opcodes,
        record.cases as f64 / record.seconds.max(0.001),
        record.mismatched
    );
    let mut shown = std::collections::BTreeSet::new();
    for m in &record.mismatches {
        if shown.insert(&m.code) {
            println!(
                "    --classes {} --one {:#x} (run {}) {}: {}: {}",
                class.name(),
                m.seed,
                m.run,
                m.code,
                m.text,
                m.what
            );
        }
    }
}
