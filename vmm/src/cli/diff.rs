//! `hindsight diff`: where two runs of a guest first differ.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Parser};

use super::run::{self, RunArgs};
use crate::snapshot::{Limits, Progress, Timeline, Verdict, compare};

/// No difference.
const SAME: u8 = 0;
/// A difference was found, as with diff(1).
const DIFFERENT: u8 = 1;

/// How often progress is told.
const TELL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
#[command(
    after_help = "Both sides run as with `hindsight run --deterministic`; consoles, --timeout, --stats \
    and --trace have no effect.\n\nExit status: 0 no difference, 1 the runs differ, 2 trouble.\n\n\
    Example: hindsight diff --memory 64M kernel --a '--seed 1' --b '--seed 2'"
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
    /// Look every so many instructions for a difference
    #[arg(long, value_name = "N", default_value = "1000000", value_parser = run::number)]
    stride: u64,
}

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
    let [a, b] = sides.map(|(name, options)| timeline(&raw, name, options));
    let mut told = Instant::now();
    let terminal = io::stderr().is_terminal();
    let mut tell = |progress| {
        if told.elapsed() >= TELL {
            told = Instant::now();
            show(progress, terminal);
        }
    };
    let limit = args.limit.unwrap_or(u64::MAX);
    let verdict = compare([a?, b?], limit, args.stride, &mut tell)?;
    if terminal {
        let _ = write!(io::stderr(), "\r\x1b[K");
    }
    let (status, text) = match verdict {
        Verdict::Same { place, ended: true } => (
            SAME,
            format!("no difference: both runs ended after {place} instructions\n"),
        ),
        Verdict::Same {
            place,
            ended: false,
        } => (SAME, format!("no difference in {place} instructions\n")),
        Verdict::Different(divergence) => (DIFFERENT, divergence.to_string()),
    };
    io::stdout()
        .write_all(text.as_bytes())
        .context("standard output")?;
    Ok(ExitCode::from(status))
}

fn show(progress: Progress, terminal: bool) {
    let text = match progress {
        Progress::Same(place) => format!("the same for {place} instructions"),
        Progress::Between(from, to) => format!("a difference between {from} and {to}"),
    };
    let _ = if terminal {
        write!(io::stderr(), "\r\x1b[Khindsight: {text}")
    } else {
        writeln!(io::stderr(), "hindsight: {text}")
    };
}

/// The machine of one side, at its start.
fn timeline(raw: &[OsString], name: &str, options: &str) -> anyhow::Result<Timeline> {
    let args = side_args(raw, options).with_context(|| format!("{name} {options:?}"))?;
    let machine = run::determined(&args).with_context(|| format!("{name} {options:?}"))?;
    Ok(Timeline::new(machine, Limits::default())?)
}

/// What `raw`, the arguments of `hindsight diff`, and the options of one side make together.
fn side_args(raw: &[OsString], options: &str) -> anyhow::Result<RunArgs> {
    /// Options that are not those of `hindsight run`; each takes a value.
    const OWN: [&str; 4] = ["--a", "--b", "--limit", "--stride"];
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
    fn bad_options_of_a_side_are_one_line() {
        for options in ["--bogus", "'", "--seed x"] {
            let error = side(&["diff", "x"], options).unwrap_err().to_string();
            assert!(!error.is_empty() && !error.contains('\n'), "{error}");
        }
    }
}
