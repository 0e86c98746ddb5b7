//! The command that runs one case: `hindsight run`, or a template for another VMM.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use thiserror::Error;

use crate::harness::select::TestJob;

/// How much longer than its own time limit a child may run before it is killed.
pub const GRACE: Duration = Duration::from_secs(5);

/// Why a runner template is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TemplateError {
    /// The quotes are unbalanced.
    #[error("--runner: the command has unbalanced quotes")]
    Quotes,
    /// There is no command.
    #[error("--runner: the command is empty")]
    Empty,
    /// The command does not use the image.
    #[error("--runner: the command has no {{image}}, the image's path")]
    NoImage,
}

/// The program that runs the cases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Runner {
    /// `hindsight run` of this program.
    Hindsight {
        /// The program.
        program: PathBuf,
        /// Additional options of `run`.
        options: Vec<String>,
    },
    /// A command whose words contain placeholders.
    Template(Vec<String>),
}

impl Runner {
    /// Parses a command template. It is split into words as in a shell, but not run by a shell.
    ///
    /// The placeholders are `{image}`, `{cmdline}`, `{cpus}`, `{memory}` and `{timeout}`.
    ///
    /// # Errors
    ///
    /// The template cannot be split into words, or has no `{image}`.
    pub fn template(text: &str) -> Result<Self, TemplateError> {
        let words = shlex::split(text).ok_or(TemplateError::Quotes)?;
        if words.is_empty() {
            return Err(TemplateError::Empty);
        }
        if !words.iter().any(|word| word.contains("{image}")) {
            return Err(TemplateError::NoImage);
        }
        Ok(Self::Template(words))
    }

    /// The command that runs `job` for at most `limit`. `memory` is the value of `--memory`.
    pub fn command(&self, job: &TestJob, memory: &str, limit: Duration) -> Command {
        let cmdline = job
            .case
            .as_ref()
            .map(|case| format!("case={} cpl={}", case.name, job.cpl));
        match self {
            Self::Hindsight { program, options } => {
                let mut command = Command::new(program);
                let protocol = if job.case.is_some() { "pvh" } else { "auto" };
                // The guest does not outlive a harness that is killed.
                let harness = std::process::id().to_string();
                command.args(["run", "--end-with", &harness, "--protocol", protocol]);
                command.args(["--cpus", &job.vcpus().to_string(), "--memory", memory]);
                command.args([
                    "--serial",
                    "stdio",
                    "--timeout",
                    &limit.as_secs_f64().to_string(),
                ]);
                if let Some(cpu) = job.case.as_ref().and_then(|case| case.cpu) {
                    command.args(["--cpu", &cpu.to_string()]);
                }
                if job.case.as_ref().is_some_and(|case| case.virtual_clock) {
                    command.arg("--deterministic");
                }
                if let Some(cmdline) = &cmdline {
                    command.args(["--cmdline", cmdline]);
                }
                command.args(options).arg("--").arg(&job.image.path);
                command
            }
            Self::Template(words) => {
                // Rounded up to whole seconds, because other VMMs may not accept fractions.
                let seconds = limit.as_secs() + u64::from(limit.subsec_nanos() > 0);
                let values = [
                    ("{image}", job.image.path.as_os_str()),
                    ("{cmdline}", OsStr::new(cmdline.as_deref().unwrap_or(""))),
                    ("{cpus}", OsStr::new(&job.vcpus().to_string())),
                    ("{memory}", OsStr::new(memory)),
                    ("{timeout}", OsStr::new(&seconds.to_string())),
                ]
                .map(|(name, value)| (name, value.as_bytes().to_vec()));
                let mut words = words
                    .iter()
                    .map(|word| std::ffi::OsString::from_vec(fill(word.as_bytes(), &values)));
                let mut command = Command::new(words.next().unwrap_or_default());
                command.args(words);
                command
            }
        }
    }
}

/// Replaces names by their values. Names in values are not replaced.
fn fill(word: &[u8], values: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut filled = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some(first) = rest.first() {
        match values
            .iter()
            .find(|(name, _)| rest.starts_with(name.as_bytes()))
        {
            Some((name, value)) => {
                filled.extend_from_slice(value);
                rest = &rest[name.len()..];
            }
            None => {
                filled.push(*first);
                rest = &rest[1..];
            }
        }
    }
    filled
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::image::TestImage;
    use crate::harness::select::jobs;
    use crate::harness::select::tests::jobs_of;
    use std::sync::Arc;

    fn words(command: &Command) -> Vec<String> {
        std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|word| word.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn hindsight_command_has_case_vcpus_and_timeout() {
        let runner = Runner::Hindsight {
            program: "/bin/h".into(),
            options: vec!["--engine=kvm".into()],
        };
        let job = &jobs_of("exc", "case int3 cpl=3 vcpus=2\n")[0];
        let command = runner.command(job, "64M", Duration::from_millis(1500));
        let image = job.image.path.to_string_lossy();
        let expected = format!(
            "/bin/h run --end-with {} --protocol pvh --cpus 2 --memory 64M --serial stdio --timeout 1.5 \
             --cmdline|case=int3 cpl=3|--engine=kvm -- {image}",
            std::process::id()
        );
        assert_eq!(words(&command).join(" "), expected.replace('|', " "));
        assert!(words(&command).contains(&"case=int3 cpl=3".to_owned()));
    }

    #[test]
    fn virtual_clock_adds_the_deterministic_option() {
        let runner = Runner::Hindsight {
            program: "/bin/h".into(),
            options: Vec::new(),
        };
        for (record, expected) in [("case a clock=virtual\n", true), ("case a\n", false)] {
            let job = &jobs_of("exc", record)[0];
            let command = runner.command(job, "64M", Duration::from_secs(1));
            let found = words(&command).contains(&"--deterministic".to_owned());
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn image_without_cases_has_no_kernel_command_line() {
        let runner = Runner::Hindsight {
            program: "/bin/h".into(),
            options: Vec::new(),
        };
        let image = Arc::new(TestImage::builtin("flat", b"x").unwrap());
        let command = runner.command(&jobs(&[image])[0], "64M", Duration::from_secs(1));
        assert!(!words(&command).contains(&"--cmdline".to_owned()));
        assert!(words(&command).contains(&"auto".to_owned()));
    }

    #[test]
    fn template_placeholders_are_replaced() {
        let text = "qemu -m {memory} -smp {cpus} -append 'x {cmdline}' -kernel {image} {other}";
        let runner = Runner::template(text).unwrap();
        let job = &jobs_of("exc", "case int3 cpl=3\n")[0];
        let words = words(&runner.command(job, "64M", Duration::from_secs(1)));
        assert_eq!(words[..5], ["qemu", "-m", "64M", "-smp", "1"]);
        assert_eq!(words[6], "x case=int3 cpl=3");
        assert_eq!(words[8], job.image.path.to_string_lossy());
        assert_eq!(words[9], "{other}");
    }

    #[test]
    fn malformed_template_is_refused() {
        assert_eq!(Runner::template("a 'b {image}"), Err(TemplateError::Quotes));
        assert_eq!(Runner::template("  "), Err(TemplateError::Empty));
        assert_eq!(Runner::template("qemu"), Err(TemplateError::NoImage));
    }
}
