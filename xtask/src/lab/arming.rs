//! Compares `--engine auto` with the interpreter on random sequences of arming and disarming.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};

use super::{Lab, LabArguments, folder, require_success};
use crate::artifacts::{build_payloads, build_static_binary};
use crate::guests::initramfs::GuestFile;
use crate::process::{existing_file, say};

/// The payload that runs the sequences.
const PAYLOAD: &str = "arming";
/// The exit status of hindsight when the payload ends with 0.
const PASSED: i32 = 1;

/// A machine that runs the sequences with `--engine auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ArmingMachine {
    /// This machine.
    Host,
    /// The lab with kvm_amd.
    Amd,
    /// The lab with kvm_intel.
    Intel,
}

/// Runs random sequences of arming and disarming (breakpoints, TF, BTF, LBR, counters, at CPL 0 and
/// 3) in the interpreter here and with `--engine auto` on each machine, and compares their logs.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Exit status: 0 when the logs are the same, 1 when one differs or a machine gave none, 2 for wrong
arguments. The payload's option events=1 prints the events of a sequence that differs:
  cargo xtask payloads
  hindsight run --engine interp --cmdline 'first=17 sequences=1 events=1' guest-tests/target/payloads/arming")]
pub struct ArmingArguments {
    /// The machines.
    #[arg(long, value_delimiter = ',', default_values = ["host", "amd", "intel"], value_name = "LIST")]
    pub machines: Vec<ArmingMachine>,
    /// How many sequences.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub sequences: u64,
    /// The number of the first sequence, which determines it.
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub first: u64,
    /// A statically linked hindsight [default: builds one in target/lab/build].
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,
}

/// Runs the sequences on all machines; returns the exit status.
pub fn compare(arguments: &ArmingArguments) -> Result<u8> {
    let binary = match &arguments.binary {
        Some(binary) => existing_file("--binary", binary)?,
        None => build_static_binary()?,
    };
    // A folder of its own: the suites of both labs do this at the same time.
    let payloads = tempfile::tempdir()?;
    build_payloads(payloads.path())?;
    let runs = SequenceRuns {
        binary,
        payload: payloads.path().join(PAYLOAD),
        options: format!(
            "first={} sequences={}",
            arguments.first, arguments.sequences
        ),
    };
    let expected = runs.on_host("interp")?;
    let lines = u64::try_from(expected.lines().count())?;
    ensure!(
        lines == arguments.sequences,
        "the interpreter ran {lines} of {} sequences",
        arguments.sequences
    );
    let mut status = 0;
    for machine in &arguments.machines {
        let (name, log) = match machine {
            ArmingMachine::Host => ("host", runs.on_host("auto")?),
            ArmingMachine::Amd => ("amd", runs.in_lab(Lab::Amd)?),
            ArmingMachine::Intel => ("intel", runs.in_lab(Lab::Intel)?),
        };
        let different = first_difference(&expected, &log);
        match &different {
            None => say(format!(
                "{name} auto: {lines} sequences as in the interpreter"
            )),
            Some((expected, found)) => {
                say(format!(
                    "{name} auto: expected '{expected}', found '{found}'"
                ));
            }
        }
        status |= u8::from(different.is_some());
    }
    Ok(status)
}

struct SequenceRuns {
    binary: PathBuf,
    payload: PathBuf,
    /// The payload's command line.
    options: String,
}

impl SequenceRuns {
    fn words(&self, engine: &str, payload: &Path) -> Vec<String> {
        vec![
            "run".to_owned(),
            format!("--engine={engine}"),
            format!("--cmdline={}", self.options),
            payload.display().to_string(),
        ]
    }

    /// Runs the payload on this machine, and returns its log.
    fn on_host(&self, engine: &str) -> Result<String> {
        let output = Command::new(&self.binary)
            .args(self.words(engine, &self.payload))
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot run {}", self.binary.display()))?;
        ensure!(
            output.status.code() == Some(PASSED),
            "{PAYLOAD} ended with {}",
            output.status
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs the payload in a lab with `--engine auto`, and returns its log.
    fn in_lab(&self, lab: Lab) -> Result<String> {
        let mut arguments = LabArguments::new(lab);
        let out = folder(&format!("{}-{PAYLOAD}", lab.name()));
        arguments.binary = Some(self.binary.clone());
        arguments.out = Some(out.clone());
        arguments.quiet = true;
        (arguments.limit, arguments.timeout) = (Some(3600), Some(3900));
        arguments.files = vec![GuestFile::in_files(&self.payload)?];
        let script = "hindsight \"$@\" >/out/log.txt; [ $? -eq 1 ]";
        arguments.command = ["sh", "-c", script, "sh"].map(str::to_owned).to_vec();
        arguments
            .command
            .extend(self.words("auto", &Path::new("/files").join(PAYLOAD)));
        let log = out.join("log.txt");
        fs::remove_file(&log).ok();
        require_success(lab.name(), super::run(&arguments)?)?;
        Ok(fs::read_to_string(log)?)
    }
}

/// Returns the first line that differs, of each log; empty for a log that ends before it.
fn first_difference<'a>(expected: &'a str, found: &'a str) -> Option<(&'a str, &'a str)> {
    let count = expected.lines().count().max(found.lines().count());
    let lines = |text: &'a str| text.lines().chain(std::iter::repeat(""));
    let mut pairs = lines(expected).zip(lines(found)).take(count);
    pairs.find(|(expected, found)| expected != found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_difference_finds_changed_and_missing_lines() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), Some(("b", "c")));
        assert_eq!(first_difference("a\nb\n", "a\n"), Some(("b", "")));
        assert_eq!(first_difference("a\n", "a\nb\n"), Some(("", "b")));
    }
}
