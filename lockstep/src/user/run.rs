//! Runs user-mode classes: spreads the batches over processes, and adds the results to the progress
//! file.

use crate::layout::SLOTS;
use crate::progress::ProgressFile;
use crate::tally::Tally;
use crate::user::class::InsnClass;
use crate::user::compare::{RUNS, UserComparer, batch_seed};
use crate::user::reference::TierComparison;
use crate::user::stems::Stems;
use crate::workers::{self, BatchCounter};
use anyhow::{Context, Result};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How much of the user-mode classes to run.
#[derive(Clone, Debug)]
pub struct UserOptions {
    /// Cases of each class, counting those that the progress has.
    pub cases: u64,
    /// Stop after this time, for all classes together.
    pub time: Option<Duration>,
    /// The seed from which all batches follow.
    pub seed: u64,
    /// Worker processes.
    pub jobs: u32,
    /// The progress file, if there is one.
    pub path: Option<PathBuf>,
    /// What is compared.
    pub comparison: TierComparison,
}

/// How often the progress file is written.
const SAVE_INTERVAL: Duration = Duration::from_secs(20);

/// Runs classes one after the other and adds to the progress.
///
/// # Errors
/// If memory, a worker process or the progress file fails.
pub fn run(
    classes: &[InsnClass],
    options: &UserOptions,
    progress: &mut ProgressFile,
) -> Result<()> {
    let start = Instant::now();
    for &class in classes {
        if !class.on_this_host() {
            println!("{:14} not on this processor", class.name());
            continue;
        }
        loop {
            let left = options.time.map(|t| t.saturating_sub(start.elapsed()));
            if left == Some(Duration::ZERO) {
                return Ok(());
            }
            let slice = left.map_or(SAVE_INTERVAL, |t| t.min(SAVE_INTERVAL));
            if run_slice(class, options, slice, progress)? {
                break;
            }
        }
        print_class(class, progress);
    }
    Ok(())
}

/// Runs cases of a class for a time slice; returns whether all its cases are done.
fn run_slice(
    class: InsnClass,
    options: &UserOptions,
    slice: Duration,
    progress: &mut ProgressFile,
) -> Result<bool> {
    let stems = Stems::compared(class, options.comparison);
    let record = progress.classes.entry(class.name()).or_default();
    record.opcodes = stems.codes().count();
    let done = *record.seeds.entry(options.seed).or_default();
    let missing = options.cases.saturating_sub(record.cases);
    let last = done + missing.div_ceil(RUNS * SLOTS as u64);
    let counter = BatchCounter::new(done)?;
    let start = Instant::now();
    let work = |worker: u32| -> Result<Tally> {
        let mut comparer = UserComparer::new(options.comparison)?;
        let mut tally = Tally::default();
        while start.elapsed() < slice {
            let index = counter.take();
            if index >= last {
                break;
            }
            let seed = batch_seed(class, options.seed, index);
            counter.begin(worker, seed);
            comparer.compare_batch(&stems, class, seed, &mut tally)?;
        }
        comparer.flush_counts(&mut tally);
        Ok(tally)
    };
    let tallies = workers::run_all(options.jobs, &counter, work)
        .with_context(|| format!("class {}, seed {:#x}", class.name(), options.seed))?;
    record.seconds += start.elapsed().as_secs_f64() * f64::from(options.jobs);
    // A worker finishes every batch that it takes, so all below this number are done.
    record.seeds.insert(options.seed, counter.next().min(last));
    for tally in tallies {
        record.add(tally);
    }
    record.opcodes = record.opcodes.max(record.codes.len());
    let finished = record.cases >= options.cases || counter.next() >= last;
    if let Some(path) = &options.path {
        progress.write(path)?;
    }
    if !finished && std::io::stderr().is_terminal() {
        let record = &progress.classes[&class.name()];
        eprintln!(
            "{:14} {} of {} cases",
            class.name(),
            record.cases,
            options.cases
        );
    }
    Ok(finished)
}

/// Prints the counts of a class, and one mismatch of each opcode that has some.
fn print_class(class: InsnClass, progress: &ProgressFile) {
    let record = &progress.classes[&class.name()];
    println!(
        "{:14} {:>10} cases, {:>4} of {:>4} opcodes, {:>7.0} cases/s per job, {} mismatches",
        class.name(),
        record.cases,
        record.codes.len(),
        record.opcodes,
        record.cases as f64 / record.seconds.max(0.001),
        record.mismatched
    );
    if record.translated != 0 {
        println!(
            "{:14} {:.1} % of the instructions in translated code",
            "",
            100.0 * record.translated as f64 / record.retired as f64
        );
    }
    let mut printed = std::collections::BTreeSet::new();
    for m in &record.mismatches {
        if printed.insert(&m.code) {
            println!(
                "    --classes {} --one {:#x} (run {}) {}: {}: {}",
                class.name(),
                m.seed,
                m.run,
                m.code,
                m.text,
                m.difference
            );
        }
    }
}
