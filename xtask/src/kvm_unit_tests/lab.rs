//! Runs the tests in a lab.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use super::TestResult;
use super::job::Job;
use crate::guests::initramfs::GuestFile;
use crate::lab::{self, Lab, LabArguments, NamedCommand};
use crate::process::existing_file;

/// Seconds by which a step's time limit exceeds its test's, which hindsight enforces itself.
const GRACE: u64 = 60;

/// Runs all jobs one after the other in a lab; returns the results in the order of the jobs.
pub fn run_jobs(jobs: &[Job], lab: Lab, binary: Option<&Path>) -> Result<Vec<TestResult>> {
    let mut arguments = LabArguments::new(lab);
    arguments.binary = binary
        .map(|binary| existing_file("--binary", binary))
        .transpose()?;
    let out = lab::folder(&format!("{}-kvm-unit-tests", lab.name()));
    arguments.out = Some(out.clone());
    let limits = jobs.iter().map(|job| job.limit + GRACE);
    arguments.limit = limits.clone().max();
    arguments.timeout = Some(limits.sum::<u64>() + lab.default_timeout());
    for job in jobs {
        let images = [Some(&job.image), job.environment.as_ref()];
        for file in images.into_iter().flatten() {
            arguments.files.push(GuestFile::in_files(file)?);
        }
        let mut words = vec!["hindsight".to_owned()];
        words.extend(job.words(in_files));
        arguments.commands.push(NamedCommand {
            name: step_name(job),
            words,
        });
    }
    lab::run(&arguments)?;
    let steps = fs::read_to_string(out.join("status.txt")).unwrap_or_default();
    jobs.iter().map(|job| judge(job, &steps, &out)).collect()
}

/// Returns the path of a file inside the lab.
fn in_files(file: &Path) -> PathBuf {
    Path::new("/files").join(file.file_name().unwrap_or_default())
}

fn step_name(job: &Job) -> String {
    format!("{}-{}", job.architecture, job.test.name)
}

fn judge(job: &Job, steps: &str, out: &Path) -> Result<TestResult> {
    let name = step_name(job);
    let text = |extension: &str| {
        let file = out.join(format!("{name}.{extension}"));
        fs::read(file).map_or_else(
            |_| String::new(),
            |bytes| String::from_utf8_lossy(&bytes).into_owned(),
        )
    };
    let (status, seconds) = step_end(steps, &name).unwrap_or((-1, 0.0));
    let time = Duration::try_from_secs_f64(seconds)?;
    job.judge(&text("log"), &text("err"), status, time)
}

/// Returns a step's exit status and duration in seconds, from the text of status.txt.
fn step_end(steps: &str, name: &str) -> Option<(i32, f64)> {
    let mut fields = steps.lines().map(|line| line.split('\t'));
    let mut fields = fields.find(|fields| fields.clone().next() == Some(name))?;
    let status = fields.nth(1)?.parse().ok()?;
    Some((status, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_end_reads_status_and_seconds_of_the_named_step() {
        let steps = "x86_64-de\t3\t1.0\nx86_64-debug\t1\t12.5\n";
        assert_eq!(step_end(steps, "x86_64-debug"), Some((1, 12.5)));
        assert_eq!(step_end(steps, "x86_64-msr"), None);
    }
}
