//! The command line: `hindsight run`, `doctor`, `test` and `demo`.

mod exit;
mod run;
mod trace;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub use exit::Status;
pub(crate) use run::EngineArg;

use crate::{demo, doctor, harness};

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
    /// Measure what this host's KVM really does.
    Doctor(doctor::DoctorArgs),
    /// Run payloads that assert what the processor does, and judge them.
    Test(Box<harness::TestArgs>),
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
            let _ = error.print();
            return status.into();
        }
    };
    let result = match cli.command {
        Command::Run(args) => run::run(*args).map(ExitCode::from),
        Command::Doctor(args) => doctor::run(args),
        Command::Test(args) => harness::run(*args),
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
