//! `hindsight diff`: where two runs of a guest first differ.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Parser};

use crate::cli::run::{self, RunArgs};
use crate::deterministic::RunStop;
use crate::deterministic::{CheckpointLimits, Timeline};
use crate::diff::{
    DiffProgress, DiffVerdict, KvmBranch, KvmDiffProgress, KvmDiffVerdict, compare,
    compare_with_kvm,
};

/// No difference.
const SAME: u8 = 0;
/// A difference was found, as with diff(1).
const DIFFERENT: u8 = 1;

/// How often progress is told.
const TELL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
#[command(
    after_help = "Both sides run as with `hindsight run --deterministic`; consoles, --timeout, --stats \
    and --trace have no effect. With --engine kvm on one side, KVM executes each instruction of the \
    other side's run as well, but those that depend on devices, time or the models.\n\n\
    Exit status: 0 no difference, 1 the runs differ, 2 trouble.\n\n\
    Examples:\n  hindsight diff --memory 64M kernel --a '--seed 1' --b '--seed 2'\n  \
    hindsight diff kernel --b '--engine kvm' --from 1000000 --limit 1100000"
)]
pub(super) struct DiffArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Options of `hindsight run` for one side only
    #[arg(
        long,
        value_name = "OPTIONS",
        default_value = "",
        allow_hyphen_values = true
    )]
    a: String,
    /// Options for the other side
    #[arg(
        long,
        value_name = "OPTIONS",
        default_value = "",
        allow_hyphen_values = true
    )]
    b: String,
    /// Compare so many instructions at most
    #[arg(long, value_name = "N", value_parser = run::number)]
    limit: Option<u64>,
    /// With --engine kvm on one side: begin to compare after so many instructions
    #[arg(long, value_name = "N", value_parser = run::number)]
    from: Option<u64>,
    /// With --engine kvm on one side: write the branches that KVM's steps took to FILE, a line each of
    /// two hexadecimal linear addresses; what KVM took over is not among them
    #[arg(long, value_name = "FILE")]
    branches: Option<PathBuf>,
    /// Look every so many instructions for a difference [default: 1000000, with KVM 1000]
    #[arg(long, value_name = "N", value_parser = run::number)]
    stride: Option<u64>,
}

/// [`DiffArgs::stride`] of two runs in the interpreter.
const STRIDE: u64 = 1_000_000;
/// And where KVM follows.
const STRIDE_KVM: u64 = 1_000;

/// The options of one side, as `hindsight run` takes them.
#[derive(Debug, Parser)]
#[command(
    name = "hindsight",
    args_override_self = true,
    disable_help_flag = true
)]
struct SideArgs {
    #[command(flatten)]
    run: RunArgs,
}

/// Runs both sides until they differ.
pub(super) fn run(args: &DiffArgs) -> anyhow::Result<ExitCode> {
    if args.run.records_input() {
        bail!("--record-input makes no sense here: both runs must have the same input");
    }
    let raw: Vec<OsString> = std::env::args_os().skip(1).collect();
    let sides = [("--a", &args.a), ("--b", &args.b)];
    let parsed = sides.map(|(name, options)| {
        side_args(&raw, options).with_context(|| format!("{name} {options:?}"))
    });
    let [a, b] = parsed;
    let (a, b) = (a?, b?);
    match (a.is_for_kvm(), b.is_for_kvm()) {
        (true, true) => bail!("KVM follows the interpreter: --engine kvm is for one side"),
        (false, true) => {
            only_engine(sides[1])?;
            return with_kvm(args, &a, 1);
        }
        (true, false) => {
            only_engine(sides[0])?;
            return with_kvm(args, &b, 0);
        }
        (false, false) if args.from.is_some() || args.branches.is_some() => {
            bail!("--from and --branches are for a comparison with KVM: --b '--engine kvm'")
        }
        (false, false) => {}
    }
    let machines = [timeline(&a)?, timeline(&b)?];
    let mut told = Instant::now();
    let terminal = io::stderr().is_terminal();
    let mut tell = |progress| {
        if told.elapsed() >= TELL {
            told = Instant::now();
            show(progress, terminal);
        }
    };
    let limit = args.limit.unwrap_or(u64::MAX);
    let stride = args.stride.unwrap_or(STRIDE);
    let verdict = compare(machines, limit, stride, &mut tell)?;
    if terminal {
        let _ = write!(io::stderr(), "\r\x1b[K");
    }
    let (status, text) = match verdict {
        DiffVerdict::Same {
            icount,
            ended: true,
        } => (
            SAME,
            format!("no difference: both runs ended after {icount} instructions\n"),
        ),
        DiffVerdict::Same {
            icount,
            ended: false,
        } => (SAME, format!("no difference in {icount} instructions\n")),
        DiffVerdict::Different(divergence) => (DIFFERENT, divergence.to_string()),
    };
    say(&text)?;
    Ok(ExitCode::from(status))
}

fn say(text: &str) -> anyhow::Result<()> {
    let written = io::stdout().write_all(text.as_bytes());
    written.context("standard output")
}

/// The side in KVM is the machine of the other one.
fn only_engine((name, options): (&str, &String)) -> anyhow::Result<()> {
    let words = shlex::split(options).unwrap_or_default();
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        match word {
            "--engine" => drop(words.next()),
            _ if word.starts_with("--engine=") => {}
            _ => bail!("{name} {options:?}: the side in KVM takes no option but --engine"),
        }
    }
    Ok(())
}

/// The run of one side, with KVM following as side `kvm`.
fn with_kvm(args: &DiffArgs, side: &RunArgs, kvm: usize) -> anyhow::Result<ExitCode> {
    let mut branches = args.branches.as_deref().map(Branches::new).transpose()?;
    let mut machine = run::determined(side)?;
    if let Some(from) = args.from
        && machine.run_to(from) != RunStop::Reached
    {
        bail!("the run ends before instruction {from}");
    }
    let mut told = Instant::now();
    let terminal = io::stderr().is_terminal();
    let mut tell = |compared: KvmDiffProgress, taken: &[KvmBranch]| {
        if let Some(branches) = &mut branches {
            branches.add(taken);
        }
        if told.elapsed() >= TELL {
            told = Instant::now();
            show(DiffProgress::SameUntil(compared.icount), terminal);
        }
    };
    let limit = args.limit.unwrap_or(u64::MAX);
    let stride = args.stride.unwrap_or(STRIDE_KVM);
    let verdict = compare_with_kvm(machine, limit, stride, &mut tell)?;
    if let Some(branches) = branches {
        branches.finish()?;
    }
    if terminal {
        let _ = write!(io::stderr(), "\r\x1b[K");
    }
    let counted = |c: KvmDiffProgress| {
        format!(
            "KVM executed {} instructions and took over the results of {}",
            c.executed, c.copied
        )
    };
    match verdict {
        KvmDiffVerdict::Same { compared, ended } => {
            let end = if ended { ", where the run ended" } else { "" };
            let icount = compared.icount;
            say(&format!(
                "no difference up to instruction {icount}{end}; {}\n",
                counted(compared)
            ))?;
            Ok(ExitCode::from(SAME))
        }
        KvmDiffVerdict::Different {
            compared,
            mut divergence,
        } => {
            if kvm == 0 {
                divergence.swap();
            }
            say(&format!("{divergence}{}\n", counted(compared)))?;
            Ok(ExitCode::from(DIFFERENT))
        }
    }
}

/// The file of [`DiffArgs::branches`].
struct Branches<'a> {
    path: &'a Path,
    file: BufWriter<File>,
    /// The first write that failed.
    result: io::Result<()>,
}

impl<'a> Branches<'a> {
    fn new(path: &'a Path) -> anyhow::Result<Self> {
        let file = File::create(path).with_context(|| format!("--branches {}", path.display()))?;
        Ok(Self {
            path,
            file: BufWriter::new(file),
            result: Ok(()),
        })
    }

    fn add(&mut self, taken: &[KvmBranch]) {
        for branch in taken {
            if self.result.is_ok() {
                self.result = writeln!(self.file, "{:x} {:x}", branch.from, branch.to);
            }
        }
    }

    fn finish(mut self) -> anyhow::Result<()> {
        self.result
            .and_then(|()| self.file.flush())
            .with_context(|| format!("--branches {}", self.path.display()))
    }
}

fn show(progress: DiffProgress, terminal: bool) {
    let text = match progress {
        DiffProgress::SameUntil(icount) => format!("the same for {icount} instructions"),
        DiffProgress::Between(from, to) => format!("a difference between {from} and {to}"),
    };
    let _ = if terminal {
        write!(io::stderr(), "\r\x1b[Khindsight: {text}")
    } else {
        writeln!(io::stderr(), "hindsight: {text}")
    };
}

/// The machine of one side, at its start.
fn timeline(args: &RunArgs) -> anyhow::Result<Timeline> {
    Ok(Timeline::new(
        run::determined(args)?,
        CheckpointLimits::default(),
    )?)
}

/// What `raw`, the arguments of `hindsight diff`, and the options of one side make together.
fn side_args(raw: &[OsString], options: &str) -> anyhow::Result<RunArgs> {
    /// Options that are not those of `hindsight run`; each takes a value.
    const OWN: [&str; 6] = ["--a", "--b", "--limit", "--stride", "--from", "--branches"];
    let own = |word: &OsString| {
        let word = word.to_string_lossy();
        OWN.iter().find_map(|name| {
            let rest = word.strip_prefix(name)?;
            (rest.is_empty() || rest.starts_with('=')).then_some(rest.is_empty())
        })
    };
    let mut words = vec![OsString::from("hindsight"), "--deterministic".into()];
    let mut rest = raw.iter().skip_while(|word| *word != "diff").skip(1);
    while let Some(word) = rest.next() {
        match own(word) {
            // The value is a word of its own.
            Some(true) => drop(rest.next()),
            Some(false) => {}
            None if word == "--deterministic" => {}
            None => words.push(word.clone()),
        }
    }
    let Some(extra) = shlex::split(options) else {
        bail!("a quotation that does not end");
    };
    words.extend(extra.into_iter().map(OsString::from));
    SideArgs::try_parse_from(words)
        .map(|side| side.run)
        .map_err(|error| anyhow::Error::msg(super::one_line(&error).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(raw: &[&str], options: &str) -> anyhow::Result<RunArgs> {
        let raw: Vec<_> = raw.iter().map(OsString::from).collect();
        side_args(&raw, options)
    }

    #[test]
    fn side_has_the_common_options_and_its_own_which_win() {
        let raw = [
            "diff",
            "--cpus",
            "2",
            "x",
            "--a",
            "--seed 1",
            "--b=--seed 2",
            "--limit",
            "9",
        ];
        let a = side(&raw, "--cpus 3 --cmdline 'a b'").unwrap();
        let text = format!("{a:?}");
        for part in [
            "cpus: 3",
            "cmdline: \"a b\"",
            "deterministic: true",
            "image: \"x\"",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn side_in_kvm_has_no_options_of_its_own() {
        for (options, fine) in [
            ("", true),
            ("--engine kvm", true),
            ("--engine=kvm", true),
            ("--engine kvm --seed 1", false),
            ("--seed=1", false),
        ] {
            let checked = only_engine(("--b", &options.to_owned()));
            assert_eq!(checked.is_ok(), fine, "{options}");
        }
    }

    #[test]
    fn bad_options_of_a_side_are_one_line() {
        for options in ["--bogus", "'", "--seed x"] {
            let error = side(&["diff", "x"], options).unwrap_err().to_string();
            assert!(!error.is_empty() && !error.contains('\n'), "{error}");
        }
    }
}
