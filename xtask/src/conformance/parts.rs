//! Runs all payloads in a lab, in parts. An emulator that dies loses the results of one part.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::{Conformance, TestEngine, is_report};
use crate::lab::{self, Lab, LabArguments, NamedCommand};
use crate::process::say;

/// Number of parts into which the cases are divided.
const PARTS: usize = 24;

/// How often a part is run if the lab dies while it runs.
const TRIES: usize = 2;

/// The file beside the reports that identifies the program and arguments that ran.
const RUN_KEY: &str = "run.txt";

impl Conformance<'_> {
    /// Runs the parts with each engine, in a lab for each. Restarts a lab that dies meanwhile.
    pub(super) fn run_lab(&self, lab: Lab) -> Result<()> {
        for engine in &self.arguments.engines {
            self.run_lab_engine(lab, *engine)?;
        }
        Ok(())
    }

    /// Returns the path of each part's report for one lab and engine.
    pub(super) fn lab_reports(&self, lab: Lab, engine: &str) -> Vec<PathBuf> {
        let folder = self.lab_folder(lab, engine);
        (1..=PARTS)
            .map(|part| folder.join(format!("part-{part}.xml")))
            .collect()
    }

    fn lab_folder(&self, lab: Lab, engine: &str) -> PathBuf {
        self.results.join(format!("{}.{engine}", lab.name()))
    }

    fn run_lab_engine(&self, lab: Lab, engine: TestEngine) -> Result<()> {
        let out = self.lab_folder(lab, engine.name());
        let column = format!("{} {}", lab.name(), engine.name());
        let key = self.run_key()?;
        let same = fs::read_to_string(out.join(RUN_KEY)).is_ok_and(|earlier| earlier == key);
        if out.exists() && !(self.arguments.continued && same) {
            fs::remove_dir_all(&out)?;
        }
        fs::create_dir_all(&out)?;
        fs::write(out.join(RUN_KEY), key)?;
        let reports = self.lab_reports(lab, engine.name());
        let mut tries = [0; PARTS];
        loop {
            let pending = pending_parts(&reports, &tries);
            let Some(first) = pending.first() else {
                break;
            };
            tries[first - 1] += 1;
            say(format!(
                "{column}: {} of {PARTS} parts to run",
                pending.len()
            ));
            lab::run(&self.lab_arguments(lab, engine, &pending))?;
        }
        let missing = reports.iter().filter(|report| !is_report(report)).count();
        if missing > 0 {
            let console = out.join("console.txt");
            say(format!(
                "{column}: no report of {missing} parts, see {}",
                console.display()
            ));
        }
        Ok(())
    }

    /// Returns the hash of the program, and the additional arguments of `hindsight test`.
    fn run_key(&self) -> Result<String> {
        let mut hash = Sha256::new();
        let mut program = File::open(&self.binary).context("cannot read the program")?;
        io::copy(&mut program, &mut hash)?;
        let words = lab::quote(&self.arguments.test_arguments);
        Ok(format!("{:x} {words}\n", hash.finalize()))
    }

    fn lab_arguments(&self, lab: Lab, engine: TestEngine, parts: &[usize]) -> LabArguments {
        let mut arguments = LabArguments::new(lab);
        arguments.binary = Some(self.binary.clone());
        arguments.out = Some(self.lab_folder(lab, engine.name()));
        arguments.quiet = true;
        // The limits of the cases are meant for real processors.
        (arguments.limit, arguments.timeout) = (Some(3600), Some(7800));
        arguments.commands = parts
            .iter()
            .map(|part| NamedCommand {
                name: format!("part-{part}"),
                words: self.part_command(lab, engine, *part),
            })
            .collect();
        arguments
    }

    fn part_command(&self, lab: Lab, engine: TestEngine, part: usize) -> Vec<String> {
        let shard = format!("{part}/{PARTS}");
        // A report that is not complete must not be taken for one.
        let report = format!("/tmp/part-{part}.xml");
        let script = "report=$1; shift; hindsight test --timeout 300 --junit $report \"$@\"; \
                      status=$?; mv $report /out/; exit $status";
        let mut words: Vec<String> = ["sh", "-c", script, "sh", &report, "--shard", &shard]
            .map(str::to_owned)
            .to_vec();
        words.extend(["--engine", engine.name()].map(str::to_owned));
        words.extend(lacking(lab, engine));
        words.extend(self.arguments.test_arguments.iter().cloned());
        words
    }
}

/// Returns the numbers of the parts that have no report and were run less than [`TRIES`] times.
fn pending_parts(reports: &[impl AsRef<Path>], tries: &[usize]) -> Vec<usize> {
    let parts = reports.iter().zip(tries).zip(1..);
    parts
        .filter(|((report, tries), _)| !is_report(report.as_ref()) && **tries < TRIES)
        .map(|(_, part)| part)
        .collect()
}

/// Returns the `--lacking` options that leave out cases which crash the lab's emulator.
///
/// Armed debug registers crash the emulator of `amd` (docs/internals/labs.md).
fn lacking(lab: Lab, engine: TestEngine) -> Vec<String> {
    let needs: &[&str] = match (lab, engine) {
        (Lab::Amd, TestEngine::Kvm) => &[
            "gd",
            "guestbp-data",
            "guestbp-disabled",
            "guestbp-exec-cpl0",
            "guestbp-exec-cpl3",
            "shadow-int3-cpl3",
        ],
        _ => &[],
    };
    let reason = "armed debug registers crash the emulator";
    needs
        .iter()
        .flat_map(|need| ["--lacking".to_owned(), format!("{need}={reason}")])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_is_pending_until_it_has_a_report_or_was_tried_twice() {
        let folder = tempfile::tempdir().unwrap();
        let reports = [1, 2, 3].map(|part| folder.path().join(format!("part-{part}.xml")));
        fs::write(&reports[0], "<testsuites/>").unwrap();
        fs::write(&reports[1], "").unwrap();
        assert_eq!(pending_parts(&reports, &[1, 1, 0]), [2, 3]);
        assert_eq!(pending_parts(&reports, &[1, 2, 1]), [3]);
    }
}
