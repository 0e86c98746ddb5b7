//! The command line: `hindsight run`, `diff`, `doctor`, `test` and `demo`.

mod demo;
mod diff;
mod doctor;
mod exit;
mod gdb;
mod run;
pub mod test;
mod trace;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub use exit::Status;
pub(crate) use run::EngineArg;

/// A virtual machine monitor whose processor has complete Intel debug and monitoring hardware,
/// whatever the host has.
#[derive(Debug, Parser)]
#[command(name = "hindsight", version, about, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot a guest image.
    Run(Box<run::RunArgs>),
    /// Find the first instruction at which two deterministic runs, or the two engines, differ.
    Diff(Box<diff::DiffArgs>),
    /// Measure what this host's KVM really does.
    Doctor(doctor::DoctorArgs),
    /// Run payloads that assert what the processor does, and judge them.
    Test(Box<test::TestArgs>),
    /// Run a built-in guest, and show what it did.
    Demo(demo::DemoArgs),
}

/// The whole command: parses the arguments, does what they say, and gives the exit status.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors, and go to standard output.
            let status = if error.use_stderr() {
                Status::Usage
            } else {
                Status::Success
            };
            match one_line(&error) {
                Some(line) => {
                    let _ = writeln!(std::io::stderr(), "hindsight: {line}");
                }
                None => {
                    let _ = error.print();
                }
            }
            return status.into();
        }
    };
    let result = match cli.command {
        Command::Run(args) => run::run(*args).map(ExitCode::from),
        Command::Diff(args) => diff::run(&args),
        Command::Doctor(args) => doctor::run(args),
        Command::Test(args) => test::run(*args),
        Command::Demo(args) => demo::run(&args).map(ExitCode::from),
    };
    match result {
        Ok(status) => status,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "hindsight: {error:#}");
            Status::Usage.into()
        }
    }
}

/// What is wrong with the arguments, in one line; `None` for help and the like.
fn one_line(error: &clap::Error) -> Option<String> {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ")?;
    let mut parts = text.split("\n\n").map(|part| {
        let words: Vec<_> = part.split_whitespace().collect();
        words.join(" ")
    });
    let what = parts.next()?;
    let mut hint = String::new();
    for part in parts {
        if let Some(tip) = part.strip_prefix("tip: ") {
            hint.push_str("; ");
            hint.push_str(tip);
        } else if let Some(usage) = part.strip_prefix("Usage: ") {
            hint.push_str("; usage: ");
            hint.push_str(usage);
        }
    }
    Some(format!("{what}{hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_arguments_become_one_line() {
        let rows: [(&[&str], &str); 4] = [
            (
                &["run", "x", "--bogus"],
                "unexpected argument '--bogus' found",
            ),
            (&["run"], "were not provided: <IMAGE>; usage: hindsight run"),
            (
                &["run", "x", "--mode", "q"],
                "[possible values: real, protected, long]",
            ),
            (&["run", "x", "--memroy", "1G"], "'--memory'"),
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
}
