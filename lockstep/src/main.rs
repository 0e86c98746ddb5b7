//! The program `lockstep`: see docs/testing.md.

use anyhow::{Context, Result};
use clap::Parser;
use hindsight_lockstep::class::{ALL, Class};
use hindsight_lockstep::expected::Expected;
use hindsight_lockstep::judge::{Judge, Tally};
use hindsight_lockstep::run::{Plan, run};
use hindsight_lockstep::state::State;
use hindsight_lockstep::stems::Stems;
use hindsight_lockstep::system::{SYSTEM, SystemClass};
use hindsight_lockstep::{report, versus};
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
    /// Processes at once; default: one for each processor.
    #[arg(long, value_name = "N")]
    jobs: Option<u32>,
    /// Compare these classes of system instructions with this host's KVM instead; `all` for all but tasks, which KVM does not leave to the processor
    #[arg(long, value_delimiter = ',', value_name = "CLASS")]
    system: Vec<String>,
    /// With --system: write to this file what the interpreter leaves, and run nothing else
    #[arg(long, requires = "system", value_name = "FILE")]
    expect: Option<PathBuf>,
    /// With --system: run only KVM, and the interpreter where KVM leaves other than this file of --expect says
    #[arg(long, requires = "system", value_name = "FILE")]
    against: Option<PathBuf>,
    /// Print what the state file says as a page of markdown, and run nothing.
    #[arg(long, requires = "state")]
    report: bool,
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
    let text = Judge::new()?.replay(&Stems::of(class), class, seed)?;
    print!("{text}");
    Ok(!text.contains(": equal")
        || text
            .lines()
            .any(|l| l.starts_with("run ") && !l.ends_with(": equal")))
}

fn state_of(arguments: &Arguments) -> Result<State> {
    match &arguments.state {
        Some(path) => State::read(path),
        None => Ok(State::default()),
    }
}

fn mismatched(state: &State) -> u64 {
    state.classes.values().map(|c| c.mismatched).sum()
}

/// The system classes against KVM.
fn system(arguments: &Arguments) -> Result<bool> {
    let mut classes = Vec::new();
    for name in &arguments.system {
        if name == "all" {
            classes.extend(SYSTEM);
        } else {
            let class = <SystemClass as clap::ValueEnum>::from_str(name, true);
            classes.push(class.map_err(anyhow::Error::msg)?);
        }
    }
    if let Some(path) = &arguments.expect {
        let seed = arguments.seed.context("--expect wants a --seed")?;
        versus::expect(&classes, arguments.cases, seed)?.write(path)?;
        return Ok(true);
    }
    let mut state = state_of(arguments)?;
    let before = mismatched(&state);
    if let (Some(seed), [class]) = (arguments.one, &classes[..]) {
        let mut tally = Tally::default();
        versus::Versus::new()?.batch(*class, seed, None, &mut tally)?;
        println!("{:#x?}", tally.mismatches);
        return Ok(tally.mismatches.is_empty());
    }
    let seed = arguments.seed.unwrap_or_else(fresh);
    println!("seed {seed:#x}");
    let expected = match &arguments.against {
        Some(path) => Expected::read(path)?,
        None => Expected::default(),
    };
    let plan = versus::Plan {
        classes: &classes,
        cases: arguments.cases,
        time: arguments.time.map(Duration::from_secs),
        seed,
        path: arguments.state.as_deref(),
        expected: &expected,
    };
    versus::run(&plan, &mut state)?;
    Ok(mismatched(&state) == before)
}

fn go(arguments: &Arguments) -> Result<bool> {
    if arguments.report {
        print!("{}", report::page(&state_of(arguments)?));
        return Ok(true);
    }
    if !arguments.system.is_empty() {
        return system(arguments);
    }
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
    let mut state = state_of(arguments)?;
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
    let before = mismatched(&state);
    run(&classes, &plan, &mut state)?;
    Ok(mismatched(&state) == before)
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
