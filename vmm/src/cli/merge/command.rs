//! The command `hindsight merge`.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};

use super::merged::MergedReport;
use super::{junit, lcov, stacks, stat};
use crate::cli::read::read;

/// The largest report that is read, in bytes.
const REPORT_MAX: u64 = 1 << 30;
/// Exit status when a shard is missing or a case failed.
const INCOMPLETE: u8 = 1;

/// Join the reports of several runs: JUnit, coverage, counts or profiles.
#[derive(Debug, Args)]
#[command(after_help = "\
All files are of one kind: JUnit reports of `hindsight test --shard`, lcov files, JSON of
`hindsight stat -o`, or folded stacks. Their order does not matter. Of a case that ran twice the failure
counts; a deterministic run that was made twice counts once.

Exit status: 0 complete, 1 a case failed or a shard is missing, 2 a file cannot be merged.

Examples:
  hindsight merge -o report.xml shard-*.xml
  hindsight merge -o all.info coverage-*.info && genhtml all.info")]
pub struct MergeArgs {
    /// Files to join
    #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    files: Vec<PathBuf>,
    /// File to write [default: standard output]
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
}

/// The kinds of reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReportKind {
    Junit,
    Lcov,
    Stat,
    Stacks,
}

impl ReportKind {
    /// The kind of a file, by its begin.
    fn of(text: &str) -> Self {
        let begin = text.trim_start();
        if begin.starts_with('<') {
            Self::Junit
        } else if begin.starts_with('{') {
            Self::Stat
        } else if begin.starts_with("TN:") || begin.starts_with("SF:") {
            Self::Lcov
        } else {
            Self::Stacks
        }
    }
}

/// Joins the reports.
///
/// # Errors
///
/// When a file cannot be read or does not go with the others.
pub fn run(args: &MergeArgs) -> anyhow::Result<ExitCode> {
    let mut texts = Vec::new();
    for path in &args.files {
        let bytes = read("report", path, REPORT_MAX)?;
        let name = path.display().to_string();
        let text = String::from_utf8(bytes).with_context(|| format!("{name} is not text"))?;
        texts.push((name, text));
    }
    let merged = merge(&texts)?;
    match &args.output {
        Some(path) => {
            let write = |mut file: File| file.write_all(merged.text.as_bytes());
            let written = File::create(path).and_then(write);
            written.with_context(|| format!("--output {}", path.display()))?;
        }
        None => io::stdout().write_all(merged.text.as_bytes())?,
    }
    for remark in &merged.remarks {
        writeln!(io::stderr(), "hindsight: {remark}")?;
    }
    Ok(if merged.passed {
        ExitCode::SUCCESS
    } else {
        INCOMPLETE.into()
    })
}

/// Joins files of one kind, each with its name.
///
/// # Errors
///
/// When a file is malformed or does not go with the others.
pub fn merge(texts: &[(String, String)]) -> anyhow::Result<MergedReport> {
    let kind = texts
        .first()
        .map_or(ReportKind::Stacks, |(_, text)| ReportKind::of(text));
    if let Some((name, _)) = texts.iter().find(|(_, text)| ReportKind::of(text) != kind) {
        bail!("{name} is of another kind than {}", texts[0].0);
    }
    match kind {
        ReportKind::Junit => junit::merge(texts),
        ReportKind::Lcov => lcov::merge(texts),
        ReportKind::Stat => stat::merge(texts),
        ReportKind::Stacks => stacks::merge(texts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_not_mixed() {
        let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        let mixed = [
            file("a.info", "TN:\nSF:a.c\n"),
            file("b.xml", "<testsuites/>"),
        ];
        let error = merge(&mixed).unwrap_err().to_string();
        assert_eq!(error, "b.xml is of another kind than a.info");
    }
}
