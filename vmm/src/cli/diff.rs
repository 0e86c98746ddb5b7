//! `hindsight diff`: where two runs of a guest first differ.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Parser, ValueHint};
use hindsight_cpu::cpuid::CpuModel;

use super::config::{ConfigArgs, EngineArg, Number, OptionWord, RunConfig};
use super::logging::{LogSettings, Logging};
use super::run::deterministic_machine;
use super::usage::one_line;
use crate::deterministic::RunStop;
use crate::deterministic::{CheckpointLimits, Timeline};
use crate::diff::{
    DiffProgress, DiffVerdict, KvmBranch, KvmDiffProgress, KvmDiffVerdict, compare,
    compare_with_kvm,
};
use crate::output::RunOutputs;

/// Exit status when no difference was found.
const SAME: u8 = 0;
/// Exit status when a difference was found, as with diff(1).
const DIFFERENT: u8 = 1;

/// The shortest time between two reports of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Find the first instruction at which two deterministic runs, or the two engines, differ.
#[derive(Debug, Args)]
#[command(after_help = "\
Both sides run as with `hindsight run --deterministic`. Consoles, debuggers, --timeout, --stats and
--trace have no effect. With --engine kvm on one side, KVM executes each instruction of the other
side's run as well, except those that depend on devices, time or the models.

Exit status: 0 no difference, 1 the runs differ, 2 trouble.

Examples:
  hindsight diff kernel.elf --memory 64M --a '--seed 1' --b '--seed 2'
  hindsight diff kernel.elf --b '--engine kvm' --from 1000000 --limit 1100000")]
pub struct DiffArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Options of `hindsight run` for side a only
    #[arg(
        long,
        value_name = "OPTIONS",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true,
        help_heading = "Comparison"
    )]
    a: String,
    /// Options of `hindsight run` for side b only
    #[arg(
        long,
        value_name = "OPTIONS",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true,
        help_heading = "Comparison"
    )]
    b: String,
    /// Compare at most N instructions
    #[arg(long, value_name = "N", help_heading = "Comparison")]
    limit: Option<OptionWord<Number>>,
    /// With --engine kvm on one side: begin to compare after N instructions
    #[arg(long, value_name = "N", help_heading = "Comparison")]
    from: Option<OptionWord<Number>>,
    /// With --engine kvm on one side: write the branches that KVM took in single-steps to FILE, a line
    /// each of two hexadecimal linear addresses
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Comparison")]
    branches: Option<PathBuf>,
    /// Compare states every N instructions [default: 1000000, or 1000 with KVM]
    #[arg(long, value_name = "N", help_heading = "Comparison")]
    stride: Option<OptionWord<Number>>,
}

/// The default of [`DiffArgs::stride`] for two runs in the interpreter.
const STRIDE: u64 = 1_000_000;
/// The default of [`DiffArgs::stride`] where KVM follows.
const STRIDE_KVM: u64 = 1_000;

/// The options of one side, as `hindsight run` takes them.
#[derive(Debug, Parser)]
#[command(name = "hindsight", disable_help_flag = true)]
struct SideArgs {
    #[command(flatten)]
    config: ConfigArgs,
}

/// Runs both sides until they differ.
///
/// # Errors
///
/// When the options conflict, or a side cannot be run.
pub fn run(args: &DiffArgs) -> anyhow::Result<ExitCode> {
    let mut common = args.config.load()?;
    let logging = Logging::start(&LogSettings {
        trace: None,
        ..common.log.settings(&RunOutputs::default())
    });
    logging.open_files()?;
    common.determinism.deterministic = true;
    let sides = [("--a", &args.a), ("--b", &args.b)];
    let mut configs = side_configs(&common, sides)?;
    if common.machine.cpu.is_none() && configs.iter().any(is_in_kvm) {
        // KVM stores XSAVE areas in the layout of its host's processor.
        common.machine.cpu = Some(OptionWord(CpuModel::PortableV1.into()));
        configs = side_configs(&common, sides)?;
    }
    let [a, b] = configs;
    if [&a, &b]
        .iter()
        .any(|side| side.determinism.record_input.is_some())
    {
        bail!("--record-input does not go with diff: both runs must have the same input");
    }
    match [&a, &b].map(is_in_kvm) {
        [true, true] => bail!("KVM follows the interpreter: --engine kvm is for one side"),
        [false, true] => {
            check_kvm_side(sides[1])?;
            run_with_kvm(args, &a, 1)
        }
        [true, false] => {
            check_kvm_side(sides[0])?;
            run_with_kvm(args, &b, 0)
        }
        [false, false] if args.from.is_some() || args.branches.is_some() => {
            bail!("--from and --branches are for a comparison with KVM: --b '--engine kvm'")
        }
        [false, false] => run_interpreters(args, &a, &b),
    }
}

impl DiffArgs {
    fn limit(&self) -> u64 {
        self.limit.map_or(u64::MAX, |limit| limit.0.0)
    }

    fn stride(&self, default: u64) -> u64 {
        self.stride.map_or(default, |stride| stride.0.0)
    }
}

/// Compares two runs in the interpreter.
fn run_interpreters(args: &DiffArgs, a: &RunConfig, b: &RunConfig) -> anyhow::Result<ExitCode> {
    let machines = [timeline(a)?, timeline(b)?];
    let mut line = DiffProgressLine::new();
    let verdict = compare(
        machines,
        args.limit(),
        args.stride(STRIDE),
        &mut |progress| {
            line.show(progress);
        },
    )?;
    line.clear();
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
    print(&text)?;
    Ok(ExitCode::from(status))
}

fn print(text: &str) -> anyhow::Result<()> {
    let written = io::stdout().write_all(text.as_bytes());
    written.context("standard output")
}

/// Checks that the side in KVM has no options of its own: it executes the machine of the other side.
fn check_kvm_side((name, options): (&str, &String)) -> anyhow::Result<()> {
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

/// Compares the run of `side` in the interpreter with KVM, which follows it as side `kvm`.
fn run_with_kvm(args: &DiffArgs, side: &RunConfig, kvm: usize) -> anyhow::Result<ExitCode> {
    let mut branches = args.branches.as_deref().map(BranchFile::new).transpose()?;
    let mut machine = deterministic_machine(side)?;
    if let Some(from) = args.from.map(|from| from.0.0)
        && machine.run_to(from) != RunStop::Reached
    {
        bail!("the run ends before instruction {from}: give a smaller --from");
    }
    let mut line = DiffProgressLine::new();
    let mut on_progress = |compared: KvmDiffProgress, taken: &[KvmBranch]| {
        if let Some(branches) = &mut branches {
            branches.add(taken);
        }
        line.show(DiffProgress::SameUntil(compared.icount));
    };
    let stride = args.stride(STRIDE_KVM);
    let verdict = compare_with_kvm(machine, args.limit(), stride, &mut on_progress)?;
    if let Some(branches) = branches {
        branches.finish()?;
    }
    line.clear();
    let counts = |c: KvmDiffProgress| {
        format!(
            "KVM executed {} instructions and took over the results of {}",
            c.executed, c.copied
        )
    };
    let (status, text) = match verdict {
        KvmDiffVerdict::Same { compared, ended } => {
            let end = if ended { ", where the run ended" } else { "" };
            let (at, counts) = (compared.icount, counts(compared));
            let text = format!("no difference up to instruction {at}{end}; {counts}\n");
            (SAME, text)
        }
        KvmDiffVerdict::Different {
            compared,
            mut divergence,
        } => {
            if kvm == 0 {
                divergence.swap();
            }
            (DIFFERENT, format!("{divergence}{}\n", counts(compared)))
        }
    };
    print(&text)?;
    Ok(ExitCode::from(status))
}

/// The file of [`DiffArgs::branches`].
struct BranchFile<'a> {
    path: &'a Path,
    file: BufWriter<File>,
    /// The first write that failed.
    result: io::Result<()>,
}

impl<'a> BranchFile<'a> {
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

/// Progress on standard error, at most once in [`PROGRESS_INTERVAL`].
struct DiffProgressLine {
    terminal: bool,
    last: Instant,
}

impl DiffProgressLine {
    fn new() -> Self {
        Self {
            terminal: io::stderr().is_terminal(),
            last: Instant::now(),
        }
    }

    fn show(&mut self, progress: DiffProgress) {
        if self.last.elapsed() < PROGRESS_INTERVAL {
            return;
        }
        self.last = Instant::now();
        let text = match progress {
            DiffProgress::SameUntil(icount) => format!("the same for {icount} instructions"),
            DiffProgress::Between(from, to) => format!("a difference between {from} and {to}"),
        };
        let _ = if self.terminal {
            write!(io::stderr(), "\r\x1b[Khindsight: {text}")
        } else {
            writeln!(io::stderr(), "hindsight: {text}")
        };
    }

    /// Clears the line on a terminal.
    fn clear(&self) {
        if self.terminal {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// The machine of one side, at its start.
fn timeline(config: &RunConfig) -> anyhow::Result<Timeline> {
    let machine = deterministic_machine(config)?;
    Ok(Timeline::new(machine, CheckpointLimits::default())?)
}

/// Whether KVM executes a side.
fn is_in_kvm(side: &RunConfig) -> bool {
    side.machine.engine == EngineArg::Kvm
}

/// The configurations of both sides, each given by its name and its options.
fn side_configs(common: &RunConfig, sides: [(&str, &String); 2]) -> anyhow::Result<[RunConfig; 2]> {
    let [a, b] = sides.map(|(name, options)| {
        side_config(common, options).with_context(|| format!("{name} {options:?}"))
    });
    Ok([a?, b?])
}

/// The common configuration with the options of one side over it.
fn side_config(common: &RunConfig, options: &str) -> anyhow::Result<RunConfig> {
    let Some(words) = shlex::split(options) else {
        bail!("a quotation that does not end");
    };
    let words = std::iter::once("hindsight".to_owned()).chain(words);
    let side = SideArgs::try_parse_from(words)
        .map_err(|error| anyhow::Error::msg(one_line(&error).unwrap_or_default()))?;
    if side.config.has_file() {
        bail!("--config is for both sides: give it outside of --a and --b");
    }
    Ok(side.config.apply_to(common.clone()).with_defaults())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_side_override_the_common_ones() {
        let command_line = ["hindsight", "--cpus", "2", "x", "--memory", "64M"];
        let common = SideArgs::try_parse_from(command_line).unwrap();
        let mut common = common.config.load().unwrap();
        common.determinism.deterministic = true;
        let side = side_config(&common, "--cpus 3 --cmdline 'a b' --seed=0x10").unwrap();
        let mut expected = common.with_defaults();
        expected.machine.cpus = 3;
        expected.boot.cmdline = "a b".to_owned();
        expected.determinism.seed = Some(OptionWord(Number(16)));
        assert_eq!(side, expected);
        assert_eq!(side.boot.image.as_deref(), Some(Path::new("x")));
    }

    #[test]
    fn side_in_kvm_has_no_options_of_its_own() {
        for (options, accepted) in [
            ("", true),
            ("--engine kvm", true),
            ("--engine=kvm", true),
            ("--engine kvm --seed 1", false),
            ("--seed=1", false),
        ] {
            let checked = check_kvm_side(("--b", &options.to_owned()));
            assert_eq!(checked.is_ok(), accepted, "{options}");
        }
    }

    #[test]
    fn bad_options_of_a_side_are_one_line() {
        let common = RunConfig::default();
        for options in ["--bogus", "'", "--seed x", "--config x", "--help"] {
            let error = side_config(&common, options).unwrap_err().to_string();
            assert!(!error.is_empty() && !error.contains('\n'), "{error}");
        }
    }
}
