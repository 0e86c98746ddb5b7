//! Runs system classes in turn, and adds the results to the progress file.

use crate::layout::SLOTS;
use crate::progress::{ClassProgress, ProgressFile};
use crate::system::build::build;
use crate::system::class::SystemClass;
use crate::system::compare::{SystemComparer, batch_seed};
use crate::system::expected::{ExpectedDigests, NO_DIGEST};
use crate::system::interp::SystemInterpRunner;
use crate::tally::Tally;
use anyhow::Result;
use std::path::Path;
use std::time::{Duration, Instant};

/// Batches of a class before it is the turn of the next class.
const BATCHES_PER_TURN: u64 = 16;
/// Differences after which a class is not run any more.
const MISMATCHES_MAX: u64 = 60;
/// Mismatches of a class that are printed.
const MISMATCHES_PRINTED: usize = 12;

/// How much of the system classes to run.
#[derive(Debug)]
pub struct SystemOptions<'a> {
    /// The classes.
    pub classes: &'a [SystemClass],
    /// Cases of each class, counting those that the progress has.
    pub cases: u64,
    /// Stop after this time.
    pub time: Option<Duration>,
    /// The seed from which all batches follow.
    pub seed: u64,
    /// The progress file, if there is one.
    pub path: Option<&'a Path>,
    /// Digests of the interpreter's results, as far as they are known.
    pub expected: &'a ExpectedDigests,
}

/// Runs system classes in turn and adds to the progress.
///
/// # Errors
/// If KVM cannot be used, or memory or the progress file fails.
pub fn run(options: &SystemOptions<'_>, progress: &mut ProgressFile) -> Result<()> {
    let mut comparer = SystemComparer::new()?;
    let begin = Instant::now();
    let has_time = || options.time.is_none_or(|t| begin.elapsed() < t);
    let mut ran = true;
    while ran && has_time() {
        ran = false;
        for &class in options.classes {
            let record = progress.classes.entry(class.key()).or_default();
            let open = record.cases < options.cases && record.mismatched < MISMATCHES_MAX;
            if open && has_time() {
                run_turn(&mut comparer, class, options, record)?;
                ran = true;
            }
        }
        if let Some(path) = options.path {
            progress.write(path)?;
        }
    }
    for class in options.classes {
        if let Some(record) = progress.classes.get(&class.key()) {
            print_class(&class.name(), record);
        }
    }
    Ok(())
}

/// Runs the next batches of a class.
fn run_turn(
    comparer: &mut SystemComparer,
    class: SystemClass,
    options: &SystemOptions<'_>,
    record: &mut ClassProgress,
) -> Result<()> {
    let start = Instant::now();
    let mut tally = Tally::default();
    let mut index = record.seeds.get(&options.seed).copied().unwrap_or_default();
    let until = index + BATCHES_PER_TURN;
    while record.cases + tally.cases < options.cases && index < until {
        let expected = options.expected.digest(options.seed, &class.name(), index);
        let seed = batch_seed(options.seed, class, index);
        comparer.compare_batch(class, seed, expected, &mut tally)?;
        index += 1;
    }
    record.seeds.insert(options.seed, index);
    record.seconds += start.elapsed().as_secs_f64();
    record.add(tally);
    record.opcodes = record.codes.len();
    Ok(())
}

fn print_class(name: &str, record: &ClassProgress) {
    println!(
        "{name:14} {:>8} cases, {:>7.1} s, {} mismatches",
        record.cases, record.seconds, record.mismatched
    );
    for m in record.mismatches.iter().take(MISMATCHES_PRINTED) {
        println!(
            "    --system {name} --one {:#x} case {}: {}: {}",
            m.seed, m.run, m.text, m.difference
        );
    }
}

/// Digests of the interpreter's results for so many cases of each class.
///
/// # Errors
/// If memory cannot be mapped.
pub fn expect(classes: &[SystemClass], cases: u64, seed: u64) -> Result<ExpectedDigests> {
    let mut interp = SystemInterpRunner::new()?;
    let mut expected = ExpectedDigests::new(seed);
    for &class in classes {
        let mut digests = Vec::new();
        for index in 0..cases.div_ceil(SLOTS as u64 - 1) {
            let batch_seed = batch_seed(seed, class, index);
            let batch = build(class, batch_seed, SLOTS);
            digests.push(match interp.run(&batch) {
                Ok(end) => interp.ram().digest(&batch, end),
                Err(e) => {
                    println!("{} {batch_seed:#x}: {e}", class.name());
                    interp = SystemInterpRunner::new()?;
                    NO_DIGEST
                }
            });
        }
        expected.insert(class.name(), digests);
    }
    Ok(expected)
}
