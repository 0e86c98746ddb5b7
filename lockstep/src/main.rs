//! The program `lockstep`: see docs/internals/testing.md.

use anyhow::{Context, Result};
use clap::Parser;
use hindsight_lockstep::progress::ProgressFile;
use hindsight_lockstep::report;
use hindsight_lockstep::system::class::{KVM_CLASSES, SystemClass};
use hindsight_lockstep::system::compare::SystemComparer;
use hindsight_lockstep::system::expected::ExpectedDigests;
use hindsight_lockstep::system::run::{SystemOptions, expect, run as run_system};
use hindsight_lockstep::tally::Tally;
use hindsight_lockstep::user::class::{ALL_CLASSES, InsnClass};
use hindsight_lockstep::user::compare::UserComparer;
use hindsight_lockstep::user::reference::TierComparison;
use hindsight_lockstep::user::run::{UserOptions, run as run_user};
use hindsight_lockstep::user::stems::Stems;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Compares the interpreter with this host's processor, or translated code with the interpreter,
/// instruction by instruction.
#[derive(Debug, Parser)]
#[command(name = "lockstep", max_term_width = 100)]
struct Arguments {
    /// Classes of instructions; default: all.
    #[arg(long, value_enum, value_delimiter = ',')]
    classes: Vec<InsnClass>,
    /// Cases of each class, counting those that the state file already has.
    #[arg(long, default_value = "1000000", value_name = "N")]
    cases: u64,
    /// Stop after so many seconds.
    #[arg(long, value_name = "SECONDS")]
    time: Option<u64>,
    /// The seed from which all batches follow; a random one is chosen and printed if it is not
    /// given.
    #[arg(long, value_parser = number, value_name = "SEED")]
    seed: Option<u64>,
    /// What to compare.
    #[arg(long, value_enum, default_value = "host")]
    compare: TierComparison,
    /// Run one batch of one class again and print its code.
    #[arg(long, value_parser = number, value_name = "SEED")]
    one: Option<u64>,
    /// Worker processes; default: one for each processor of the host.
    #[arg(long, value_name = "N")]
    jobs: Option<u32>,
    /// Compare these classes of system instructions with this host's KVM instead; `all` is all but
    /// tasks, because KVM emulates task switches
    #[arg(long, value_delimiter = ',', value_name = "CLASS")]
    system: Vec<String>,
    /// With --system: run only the interpreter, and write digests of its results to this file
    #[arg(long, requires = "system", value_name = "FILE")]
    expect: Option<PathBuf>,
    /// With --system: run only KVM, and the interpreter where KVM's results differ from this file
    /// of --expect
    #[arg(long, requires = "system", value_name = "FILE")]
    against: Option<PathBuf>,
    /// Print the contents of the state file as a page of markdown, and run nothing.
    #[arg(long, requires = "state")]
    report: bool,
    /// Keep the progress in this file, and continue from it.
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
}

fn number(text: &str) -> Result<u64, String> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    }
    .map_err(|e| e.to_string())
}

impl Arguments {
    fn time_limit(&self) -> Option<Duration> {
        self.time.map(Duration::from_secs)
    }

    /// The seed of the run, which is printed.
    fn run_seed(&self) -> u64 {
        let seed = self.seed.unwrap_or_else(random_seed);
        println!("seed {seed:#x}");
        seed
    }

    fn read_progress(&self) -> Result<ProgressFile> {
        match &self.state {
            Some(path) => ProgressFile::read(path),
            None => Ok(ProgressFile::default()),
        }
    }

    fn system_classes(&self) -> Result<Vec<SystemClass>> {
        let mut classes = Vec::new();
        for name in &self.system {
            if name == "all" {
                classes.extend(KVM_CLASSES);
            } else {
                let class = <SystemClass as clap::ValueEnum>::from_str(name, true);
                classes.push(class.map_err(anyhow::Error::msg)?);
            }
        }
        Ok(classes)
    }
}

fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

/// Runs one batch of user code again; returns whether all its runs are equal.
fn replay_user(class: InsnClass, seed: u64, comparison: TierComparison) -> Result<bool> {
    let stems = Stems::compared(class, comparison);
    let text = UserComparer::new(comparison)?.replay(&stems, class, seed);
    print!("{text}");
    let runs: Vec<_> = text.lines().filter(|l| l.starts_with("run ")).collect();
    Ok(!runs.is_empty() && runs.iter().all(|l| l.ends_with(": equal")))
}

/// Runs one batch of system code again; returns whether all its cases are equal.
fn replay_system(class: SystemClass, seed: u64) -> Result<bool> {
    let mut tally = Tally::default();
    SystemComparer::new()?.compare_batch(class, seed, None, &mut tally)?;
    println!("{:#x?}", tally.mismatches);
    Ok(tally.mismatches.is_empty())
}

/// Compares system classes with KVM; returns whether no mismatch was found.
fn compare_system(arguments: &Arguments) -> Result<bool> {
    let classes = arguments.system_classes()?;
    if let Some(path) = &arguments.expect {
        let seed = arguments.seed.context("--expect needs --seed")?;
        expect(&classes, arguments.cases, seed)?.write(path)?;
        return Ok(true);
    }
    if let (Some(seed), [class]) = (arguments.one, &classes[..]) {
        return replay_system(*class, seed);
    }
    let mut progress = arguments.read_progress()?;
    let before = progress.mismatched();
    let seed = arguments.run_seed();
    let expected = match &arguments.against {
        Some(path) => ExpectedDigests::read(path)?,
        None => ExpectedDigests::default(),
    };
    let options = SystemOptions {
        classes: &classes,
        cases: arguments.cases,
        time: arguments.time_limit(),
        seed,
        path: arguments.state.as_deref(),
        expected: &expected,
    };
    run_system(&options, &mut progress)?;
    Ok(progress.mismatched() == before)
}

/// Compares user classes with this host's processor; returns whether no mismatch was found.
fn compare_user(arguments: &Arguments) -> Result<bool> {
    if let Some(seed) = arguments.one {
        let [class] = arguments.classes[..] else {
            anyhow::bail!("--one needs exactly one class in --classes");
        };
        return replay_user(class, seed, arguments.compare);
    }
    let classes = if arguments.classes.is_empty() {
        ALL_CLASSES.to_vec()
    } else {
        arguments.classes.clone()
    };
    let mut progress = arguments.read_progress()?;
    let seed = arguments.run_seed();
    let jobs = match arguments.jobs {
        Some(n) => n,
        None => {
            let processors = std::thread::available_parallelism()
                .context("cannot count the host's processors; use --jobs")?;
            u32::try_from(processors.get())?
        }
    };
    let options = UserOptions {
        cases: arguments.cases,
        time: arguments.time_limit(),
        seed,
        jobs: jobs.max(1),
        path: arguments.state.clone(),
        comparison: arguments.compare,
    };
    let before = progress.mismatched();
    run_user(&classes, &options, &mut progress)?;
    Ok(progress.mismatched() == before)
}

/// Does what the arguments say; returns whether no mismatch was found.
fn execute(arguments: &Arguments) -> Result<bool> {
    if arguments.report {
        print!("{}", report::page(&arguments.read_progress()?));
        return Ok(true);
    }
    if arguments.system.is_empty() {
        compare_user(arguments)
    } else {
        compare_system(arguments)
    }
}

fn main() -> ExitCode {
    match execute(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => {
            eprintln!("lockstep: {e:#}");
            ExitCode::from(2)
        }
    }
}
