//! The `hindsight` command and its subcommands.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{CommandFactory, Parser, Subcommand};
use signal_hook::consts::SIGXFSZ;

use super::completions::CompletionsArgs;
use super::cpu::CpuArgs;
use super::demo::DemoArgs;
use super::diff::DiffArgs;
use super::doctor::DoctorArgs;
use super::dump::DumpArgs;
use super::exec::ExecArgs;
use super::export::ExportArgs;
use super::man::ManArgs;
use super::merge::MergeArgs;
use super::report::ReportArgs;
use super::run::RunArgs;
use super::stat::StatArgs;
use super::test::TestArgs;
use super::trace::TraceArgs;
use super::usage::one_line;
use super::{
    Status, completions, cpu, demo, diff, doctor, dump, exec, export, man, merge, report, run,
    stat, test, trace,
};

/// A virtual machine monitor whose processor has complete Intel debug and monitoring hardware,
/// whatever the host has.
#[derive(Debug, Parser)]
#[command(
    name = "hindsight",
    version,
    about,
    propagate_version = true,
    after_help = "\
Environment:
  HINDSIGHT_LOG  What the monitor logs, as for `hindsight run --log` [default: warn]

Examples:
  hindsight demo                 Run a built-in guest and draw what it did
  hindsight doctor               Measure what this host's KVM does
  hindsight test                 Run the built-in payloads
  hindsight run kernel.elf       Boot an image
  hindsight exec -- uname -a     Run a command of this machine in a guest
  hindsight run --help           All options of `run`, with examples"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot a guest image
    Run(Box<RunArgs>),
    /// Run a command of this machine in a guest that sees this machine's files
    Exec(Box<ExecArgs>),
    /// Run a guest, and write what its processors do to a trace file
    Trace(Box<TraceArgs>),
    /// Write one page about a trace
    Report(ReportArgs),
    /// Count exactly what a guest does, and compare it with an earlier run
    Stat(Box<StatArgs>),
    /// Write a trace in the format of another tool
    Export(ExportArgs),
    /// Join the reports of several runs: JUnit, coverage, counts or profiles
    Merge(MergeArgs),
    /// Write a guest that runs with --gdb as an ELF core file
    Dump(DumpArgs),
    /// Find the first instruction at which two deterministic runs, or the two engines, differ
    Diff(Box<DiffArgs>),
    /// List, show and compare the processor models of --cpu
    Cpu(CpuArgs),
    /// Measure what this host's KVM does
    Doctor(DoctorArgs),
    /// Run payloads that assert what the processor does, and judge them
    Test(Box<TestArgs>),
    /// Run a built-in guest and draw what it did
    Demo(DemoArgs),
    /// Print a script that completes hindsight's options in a shell
    Completions(CompletionsArgs),
    /// Write the man pages
    #[command(hide = true)]
    Man(ManArgs),
}

impl Command {
    /// Whether the command does nothing but print, so that a reader which has read enough, such as
    /// head(1), is no error.
    const fn only_prints(&self) -> bool {
        match self {
            Self::Cpu(_) | Self::Completions(_) => true,
            Self::Test(args) => args.list,
            _ => false,
        }
    }

    fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Run(args) => run::run(&args).map(ExitCode::from),
            Self::Exec(args) => exec::run(&args),
            Self::Trace(args) => trace::run(&args).map(ExitCode::from),
            Self::Report(args) => report::run(&args).map(ExitCode::from),
            Self::Stat(args) => stat::run(&args),
            Self::Export(args) => export::run(&args).map(ExitCode::from),
            Self::Merge(args) => merge::run(&args),
            Self::Dump(args) => dump::run(&args).map(ExitCode::from),
            Self::Diff(args) => diff::run(&args),
            Self::Cpu(args) => cpu::run(&args).map(ExitCode::from),
            Self::Doctor(args) => doctor::run(args),
            Self::Test(args) => test::run(*args),
            Self::Demo(args) => demo::run(&args).map(ExitCode::from),
            Self::Completions(args) => completions::run(&args, &mut Cli::command()),
            Self::Man(args) => man::run(&args, Cli::command()),
        }
    }
}

/// Runs the command that the arguments name, and returns the exit status of the process.
pub fn main() -> ExitCode {
    fail_writes_at_size_limit();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let only_prints = cli.command.only_prints();
    match cli.command.run() {
        Ok(status) => status,
        Err(error) if only_prints && is_closed_pipe(&error) => Status::Success.into(),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "hindsight: {error:#}");
            Status::Usage.into()
        }
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
}

/// Makes a write beyond the greatest size of a file fail, instead of ending the process by SIGXFSZ.
fn fail_writes_at_size_limit() {
    // A process that cannot install a handler has the default one.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

/// Prints what is wrong with the arguments, or the help that was requested.
fn usage(error: &clap::Error) -> ExitCode {
    // Help and version are no errors, and go to standard output.
    let status = if error.use_stderr() {
        Status::Usage
    } else {
        Status::Success
    };
    match one_line(error) {
        Some(line) => {
            let _ = writeln!(std::io::stderr(), "hindsight: {line}");
        }
        None => {
            if let Err(failed) = error.print()
                && failed.kind() != ErrorKind::BrokenPipe
            {
                let _ = writeln!(std::io::stderr(), "hindsight: {failed}");
                return Status::Usage.into();
            }
        }
    }
    status.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_arguments_become_one_line() {
        let rows: [(&[&str], &str); 8] = [
            (
                &["run", "x", "--bogus"],
                "unexpected argument '--bogus' found",
            ),
            (
                &["completions"],
                "were not provided: <SHELL>; usage: hindsight completions",
            ),
            (
                &["run", "x", "--mode", "q"],
                "[possible values: real, protected, long]",
            ),
            (&["run", "x", "--memroy", "1G"], "'--memory'"),
            (&["run", "x", "--smp", "4"], "is --cpus"),
            (&["run", "x", "--append", "quiet"], "is --cmdline"),
            (&["run", "x", "-s"], "--gdb :1234"),
            (&["run", "x", "--drive", "file=y"], "is --disk FILE"),
        ];
        for (args, expected) in rows {
            let args = ["hindsight"].iter().chain(args);
            let line = one_line(&Cli::try_parse_from(args).unwrap_err()).unwrap();
            assert!(line.contains(expected), "{line}");
            assert!(!line.contains('\n'), "{line}");
        }
        let help = Cli::try_parse_from(["hindsight", "--help"]).unwrap_err();
        assert_eq!(one_line(&help), None);
    }

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
