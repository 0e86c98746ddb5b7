//! Line coverage of the unit tests, by cargo-llvm-cov.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;
use xshell::{Shell, cmd};

use crate::process::{root, say, shell};

/// A crate that is measured: its package, its folder, and the percentage of lines it must reach.
const CRATES: &[(&str, &str, Option<f64>)] = &[
    ("hindsight-regs", "cpu/regs", None),
    ("hindsight-cpu", "cpu", Some(90.0)),
    ("hindsight-devices", "devices", Some(90.0)),
    ("hindsight-interp", "interp", None),
];

/// The lines of one crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Lines {
    covered: u64,
    total: u64,
}

impl Lines {
    // Numbers of lines are far below 2^52.
    #[expect(
        clippy::cast_precision_loss,
        reason = "numbers of lines are far below 2^52"
    )]
    fn percent(self) -> f64 {
        if self.total == 0 {
            0.0
        } else {
            100.0 * self.covered as f64 / self.total as f64
        }
    }
}

/// Measures all crates; prints a table and writes target/ci/coverage.{txt,json}.
pub fn run(results: &Path) -> Result<()> {
    let shell = shell()?;
    require_tools(&shell)?;
    let mut cargo = cmd!(shell, "cargo llvm-cov --json --summary-only --quiet");
    for (package, _, _) in CRATES {
        cargo = cargo.args(["--package", package]);
    }
    let report: Value = serde_json::from_str(&cargo.args(["--lib", "--tests"]).read()?)
        .context("cargo llvm-cov printed no JSON")?;
    let lines = lines_by_crate(&report)?;
    let table = table(&lines);
    print!("{table}");
    fs::write(results.join("coverage.txt"), &table)?;
    fs::write(
        results.join("coverage.json"),
        serde_json::to_string_pretty(&lines)?,
    )?;
    let low: Vec<String> = CRATES
        .iter()
        .filter_map(|(_, folder, limit)| {
            let (found, limit) = (lines.get(*folder)?.percent(), (*limit)?);
            (found < limit).then(|| format!("{folder}: {found:.1} % of the lines, below {limit} %"))
        })
        .collect();
    if !low.is_empty() {
        bail!("{}", low.join("; "));
    }
    Ok(())
}

/// The lines of each crate's folder; a file of a nested crate counts there only.
fn lines_by_crate(report: &Value) -> Result<BTreeMap<&'static str, Lines>> {
    let files = report["data"][0]["files"]
        .as_array()
        .context("the report lists no files")?;
    let mut lines = BTreeMap::new();
    for file in files {
        let name = Path::new(file["filename"].as_str().unwrap_or_default());
        let Ok(name) = name.strip_prefix(root()) else {
            continue;
        };
        let inside = |folder: &&str| name.starts_with(Path::new(folder).join("src"));
        let Some((_, folder, _)) = CRATES.iter().find(|(_, folder, _)| inside(folder)) else {
            continue;
        };
        let sum: &mut Lines = lines.entry(*folder).or_default();
        sum.covered += file["summary"]["lines"]["covered"].as_u64().unwrap_or(0);
        sum.total += file["summary"]["lines"]["count"].as_u64().unwrap_or(0);
    }
    Ok(lines)
}

fn table(lines: &BTreeMap<&'static str, Lines>) -> String {
    let mut text = format!(
        "{:<12} {:>8} {:>8} {:>8}\n",
        "crate", "lines", "covered", "percent"
    );
    for (folder, lines) in lines {
        let (total, covered, percent) = (lines.total, lines.covered, lines.percent());
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{folder:<12} {total:>8} {covered:>8} {percent:>7.1}%");
    }
    text
}

/// Installs cargo-llvm-cov and the tools of LLVM that it runs, if they are missing.
fn require_tools(shell: &Shell) -> Result<()> {
    let how = "rustup component add llvm-tools && cargo install --locked cargo-llvm-cov";
    let components = cmd!(shell, "rustup component list --installed")
        .quiet()
        .read();
    if !components
        .unwrap_or_default()
        .lines()
        .any(|line| line.starts_with("llvm-tools"))
    {
        cmd!(shell, "rustup component add llvm-tools")
            .quiet()
            .run()
            .with_context(|| format!("LLVM's tools are missing: {how}"))?;
    }
    if cmd!(shell, "cargo llvm-cov --version")
        .quiet()
        .ignore_stderr()
        .read()
        .is_err()
    {
        say("installing cargo-llvm-cov");
        cmd!(shell, "cargo install --quiet --locked cargo-llvm-cov")
            .quiet()
            .run()
            .with_context(|| format!("cargo-llvm-cov is missing: {how}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_crate_counts_by_itself() {
        let file = |name: &str, covered: u64| {
            let filename = root().join(name);
            serde_json::json!({"filename": filename, "summary": {"lines": {"count": 10, "covered": covered}}})
        };
        let files = [file("cpu/src/lib.rs", 9), file("cpu/regs/src/lib.rs", 5)];
        let report = serde_json::json!({"data": [{"files": files}]});
        let lines = lines_by_crate(&report).unwrap();
        assert_eq!(
            lines["cpu"],
            Lines {
                covered: 9,
                total: 10
            }
        );
        assert_eq!(
            lines["cpu/regs"],
            Lines {
                covered: 5,
                total: 10
            }
        );
    }
}
