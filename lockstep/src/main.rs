//! The program `lockstep`: see docs/testing.md.

use anyhow::{Context, Result};
use clap::Parser;
use hindsight_lockstep::class::{ALL, Class};
use hindsight_lockstep::judge::Judge;
use hindsight_lockstep::run::{Plan, run};
use hindsight_lockstep::state::State;
use hindsight_lockstep::stems::Stems;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Compares the interpreter with this host's processor, instruction by instruction.
#[derive(Debug, Parser)]
#[command(name = "lockstep", max_term_width = 100)]
struct Arguments {
    /// Classes of instructions; default: all.
    #[arg(long, value_enum, value_delimiter = ',')]
    classes: Vec<Class>,
    /// Cases of each class, counting those that the state file already has.
    #[arg(long, default_value = "1000000", value_name = "N")]
    cases: u64,
    /// Stop after so many seconds.
    #[arg(long, value_name = "SECONDS")]
    time: Option<u64>,
    /// Decides all; default: by chance. It is printed.
    #[arg(long, value_parser = number, value_name = "SEED")]
    seed: Option<u64>,
    /// Replay one batch of the one class given and show it.
    #[arg(long, value_parser = number, value_name = "SEED")]
    one: Option<u64>,
    /// Threads; default: one for each processor.
    #[arg(long, value_name = "N")]
    jobs: Option<u32>,
    /// Keep in this file what was done, and go on where it ends.
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

/// A seed that no run before had.
fn fresh() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

fn one(class: Class, seed: u64) -> Result<bool> {
    let text = Judge::new(0)?.replay(&Stems::of(class), class, seed)?;
    print!("{text}");
    Ok(!text.contains(": equal")
        || text
            .lines()
            .any(|l| l.starts_with("run ") && !l.ends_with(": equal")))
}

fn go(arguments: &Arguments) -> Result<bool> {
    if let Some(seed) = arguments.one {
        let [class] = arguments.classes[..] else {
            anyhow::bail!("--one wants exactly one class in --classes");
        };
        return Ok(!one(class, seed)?);
    }
    let classes = if arguments.classes.is_empty() {
        ALL.to_vec()
    } else {
        arguments.classes.clone()
    };
    let mut state = match &arguments.state {
        Some(path) => State::read(path)?,
        None => State::default(),
    };
    let seed = arguments.seed.unwrap_or_else(fresh);
    println!("seed {seed:#x}");
    let jobs = match arguments.jobs {
        Some(n) => n,
        None => u32::try_from(
            std::thread::available_parallelism()
                .context("no processor")?
                .get(),
        )?,
    };
    let plan = Plan {
        cases: arguments.cases,
        time: arguments.time.map(Duration::from_secs),
        seed,
        jobs: jobs.max(1),
        state: arguments.state.clone(),
    };
    let before: u64 = state.classes.values().map(|c| c.mismatched).sum();
    run(&classes, &plan, &mut state)?;
    let after: u64 = state.classes.values().map(|c| c.mismatched).sum();
    Ok(after == before)
}

fn main() -> ExitCode {
    match go(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(e) => {
            eprintln!("lockstep: {e:#}");
            ExitCode::from(2)
        }
    }
}
