//! The options of `hindsight test`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Parser, ValueHint};

use crate::cli::config::{ConfigArgs, EngineArg, OptionValue, OptionWord, Size};
use crate::cli::usage::one_line;
use crate::harness::needs;
use crate::harness::select::Shard;

/// Longest `--timeout`.
const TIMEOUT_MAX: Duration = Duration::from_secs(86_400);

/// Run the built-in payloads, or images of your own, and judge them.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Exit status: 0 nothing failed, 1 a case failed, 2 bad usage or KVM cannot be used, 130 interrupted.

Examples:
  hindsight test
  hindsight test --engine interp --filter 'exceptions/*' --jobs 4
  hindsight test --rules 'TSC-*' --list
  hindsight test my-payload.elf --junit report.xml
  hindsight test --run-arg=--cpu --run-arg=skylake-server,-rdt")]
pub struct TestArgs {
    /// Images to run; without any, the built-in payloads
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    pub images: Vec<PathBuf>,
    /// Run only cases whose name contains TEXT, or with * or ? matches it as a glob; may be repeated
    #[arg(long, value_name = "TEXT", help_heading = "Selection")]
    pub filter: Vec<String>,
    /// Run only cases that assert one of these rules, separated by commas; globs are allowed
    #[arg(
        long,
        value_name = "RULES",
        value_delimiter = ',',
        help_heading = "Selection"
    )]
    pub rules: Vec<String>,
    /// Run only every N-th case, beginning with the I-th; auto takes the share of this task of a Slurm
    /// array, and auto/N that of an Indexed Job of Kubernetes or of GNU parallel
    #[arg(long, value_name = "I/N|auto", help_heading = "Selection")]
    pub shard: Option<Shard>,
    /// Run everything N times, at most 1000 [default: 1]
    #[arg(long, value_name = "N", default_value = "1", hide_default_value = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Selection")]
    pub repeat: u32,
    /// List the cases and run none
    #[arg(long, conflicts_with_all = ["tap", "junit"], help_heading = "Selection")]
    pub list: bool,
    /// Run cases even if this host's KVM does not meet their needs
    #[arg(long, help_heading = "Selection")]
    pub ignore_needs: bool,
    /// Skip cases that need NEED of the host's KVM, without measuring it; WHY is reported as the reason
    #[arg(long, value_name = "NEED[=WHY]", value_parser = needs::parse_lacking)]
    #[arg(conflicts_with = "ignore_needs", help_heading = "Selection")]
    pub lacking: Vec<(String, String)>,
    /// Run N cases at a time [default: the number of processors]
    #[arg(long, short, value_name = "N", help_heading = "Execution")]
    pub jobs: Option<NonZeroUsize>,
    /// End each case after TIME, in place of its own limit; in seconds, or with a unit ms, s, m or h
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = "Execution")]
    pub timeout: Option<Duration>,
    /// Engine that runs the cases: kvm, interp (needs nothing of the host), or auto, which changes
    /// between them [default: kvm or interp, whichever auto begins with on this host]
    #[arg(long, value_enum, help_heading = "Execution")]
    pub engine: Option<EngineArg>,
    /// Guest memory in bytes, or with a suffix K, M, G or T
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "64M",
        help_heading = "Execution"
    )]
    pub memory: OptionWord<Size>,
    /// Another option for `hindsight run`, such as --run-arg=--hugepages; may be repeated
    #[arg(
        long,
        value_name = "ARG",
        allow_hyphen_values = true,
        help_heading = "Execution"
    )]
    pub run_arg: Vec<String>,
    /// Run the cases by another VMM: a command with {image}, {cmdline}, {cpus}, {memory}, {timeout}
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["engine", "run_arg"])]
    #[arg(help_heading = "Execution")]
    pub runner: Option<String>,
    /// Write TAP 14 to standard output
    #[arg(long, help_heading = "Reports")]
    pub tap: bool,
    /// Write a JUnit report to FILE
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Reports")]
    pub junit: Option<PathBuf>,
}

/// Parses the limit of [`TestArgs::timeout`].
fn parse_time(text: &str) -> Result<Duration, String> {
    let limit = Duration::parse(text).ok();
    limit
        .filter(|limit| !limit.is_zero() && *limit <= TIMEOUT_MAX)
        .ok_or_else(|| {
            format!(
                "not a number of seconds, more than 0 and at most {}, nor a time such as 500ms, 10s, \
                 5m or 1h",
                TIMEOUT_MAX.as_secs()
            )
        })
}

/// The options in `--run-arg`, as `hindsight run` takes them.
#[derive(Debug, Parser)]
#[command(name = "hindsight", disable_help_flag = true)]
struct RunArgWords {
    #[command(flatten)]
    config: ConfigArgs,
}

/// Checks `--run-arg` before any case runs into its errors.
pub(super) fn check_run_args(words: &[String]) -> Result<()> {
    let words = std::iter::once("hindsight").chain(words.iter().map(String::as_str));
    let parsed = RunArgWords::try_parse_from(words)
        .map_err(|error| anyhow::Error::msg(one_line(&error).unwrap_or_default()))
        .and_then(|words| Ok(words.config.load()?));
    parsed.context("--run-arg").map(drop)
}
