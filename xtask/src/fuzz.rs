//! Runs the fuzz targets under AddressSanitizer, with overflow checks and debug assertions.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use xshell::{Shell, cmd};

use crate::nightly::{TARGET, nightly, require_nightly};
use crate::process::{root, say, shell};

/// Seconds of one target in `ci/test`.
const SHORT_SECONDS: u32 = 7;

/// What the compiler adds for libFuzzer and AddressSanitizer.
const FLAGS: &str = "--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

/// `cargo xtask fuzz`.
#[derive(Debug, Args)]
pub struct FuzzArguments {
    /// Seconds for each target
    #[arg(long, value_name = "N", default_value_t = SHORT_SECONDS)]
    seconds: u32,
    /// Targets; all by default
    targets: Vec<String>,
}

/// The step of `ci/test`: each target for a few seconds.
pub fn short() -> Result<()> {
    run(&FuzzArguments {
        seconds: SHORT_SECONDS,
        targets: Vec::new(),
    })
}

/// Builds the targets and runs each from its corpora: the inputs in `fuzz/seeds`, and those that earlier
/// runs on this machine found.
pub fn run(arguments: &FuzzArguments) -> Result<()> {
    let all = targets()?;
    let chosen = if arguments.targets.is_empty() {
        all.clone()
    } else {
        arguments.targets.clone()
    };
    for target in &chosen {
        ensure!(all.contains(target), "there is no fuzz target {target}");
    }
    let shell = shell()?;
    require_nightly(&shell, &[])?;
    build(&shell, &chosen)?;
    let mut failed = Vec::new();
    for target in &chosen {
        let start = Instant::now();
        let executions = run_target(&shell, target, arguments.seconds)?;
        let seconds = start.elapsed().as_secs();
        match executions {
            Some(executions) => println!("fuzz: {target}: {executions} executions in {seconds} s"),
            None => failed.push(target.as_str()),
        }
    }
    if !failed.is_empty() {
        let failed = failed.join(", ");
        bail!("fuzz: {failed}: a failing input is in fuzz/artifacts");
    }
    Ok(())
}

/// The names of the targets.
fn targets() -> Result<Vec<String>> {
    let folder = root().join("fuzz/fuzz_targets");
    let entries = fs::read_dir(&folder).context("fuzz/fuzz_targets")?;
    let names = entries.flatten().filter_map(|entry| {
        let path = entry.path();
        let name = path.file_stem()?.to_str()?.to_owned();
        (path.extension()? == "rs").then_some(name)
    });
    let mut names: Vec<_> = names.collect();
    names.sort();
    Ok(names)
}

fn build(shell: &Shell, targets: &[String]) -> Result<()> {
    let bins = targets.iter().flat_map(|target| ["--bin", target]);
    nightly(shell)
        .args(["build", "--quiet", "--release", "--target", TARGET])
        .args(["--manifest-path", "fuzz/Cargo.toml"])
        .args(["--target-dir", "target/fuzz-asan"])
        .args(bins)
        .env("RUSTFLAGS", FLAGS)
        .env("HINDSIGHT_WITHOUT_PAYLOADS", "1")
        .run()?;
    Ok(())
}

/// Runs a target. Returns the number of executions, or `None` if one failed.
fn run_target(shell: &Shell, target: &str, seconds: u32) -> Result<Option<u64>> {
    let program = root().join(format!("target/fuzz-asan/{TARGET}/release/{target}"));
    let folder = |name: &str| -> PathBuf { root().join("fuzz").join(name).join(target) };
    let (corpus, seeds, artifacts) = (folder("corpus"), folder("seeds"), folder("artifacts"));
    for path in [&corpus, &artifacts] {
        fs::create_dir_all(path)?;
    }
    let artifacts = format!("{}/", artifacts.display());
    let seeds: &[&Path] = if seeds.is_dir() { &[&seeds] } else { &[] };
    let output = cmd!(shell, "{program}")
        .arg(&corpus)
        .args(seeds)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={artifacts}"))
        .args(["-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"])
        .quiet()
        .ignore_status()
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        say(format!("fuzz: {target} failed:"));
        let lines: Vec<_> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(60)..];
        eprintln!("{}", last.join("\n"));
        return Ok(None);
    }
    Ok(Some(executions(&text)))
}

/// The number of executions in the statistics of libFuzzer.
fn executions(text: &str) -> u64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    line.and_then(|number| number.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executions_are_read_from_the_final_statistics() {
        let text =
            "Done 17 runs in 2 second(s)\nstat::number_of_executed_units: 17\nstat::peak: 9\n";
        assert_eq!(executions(text), 17);
        assert_eq!(executions(""), 0);
    }

    #[test]
    fn every_target_is_a_program_of_the_fuzz_workspace() {
        let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).unwrap();
        let document = fs::read_to_string(root().join("docs/internals/fuzzing.md")).unwrap();
        for target in targets().unwrap() {
            assert!(
                manifest.contains(&format!("name = \"{target}\"\n")),
                "{target}"
            );
            assert!(document.contains(&format!("| `{target}` | ")), "{target}");
        }
    }
}
