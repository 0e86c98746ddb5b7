//! Runs one test, and derives its result from its output.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::config::{Checkout, UnitTest};
use super::{KvmUnitTestsArguments, TestResult, Verdict};
use crate::process::say;

/// A test to be run.
pub struct Job {
    pub test: UnitTest,
    pub architecture: String,
    pub image: PathBuf,
    /// An initial RAM disk with environment variables.
    pub environment: Option<PathBuf>,
    pub log: PathBuf,
    /// Seconds after which the test is ended.
    pub limit: u64,
    options: Vec<String>,
}

impl Job {
    pub fn new(
        checkout: &Checkout,
        test: &UnitTest,
        arguments: &KvmUnitTestsArguments,
        results: &Path,
    ) -> Self {
        let limit = test.timeout.unwrap_or(0).max(arguments.timeout);
        let mut options = vec![
            format!("--engine={}", arguments.engine.name()),
            format!("--cpus={}", test.cpus),
            format!("--memory={}M", test.memory),
            format!("--timeout={limit}"),
        ];
        if !test.arguments.is_empty() {
            options.push(format!("--cmdline={}", test.arguments));
        }
        Self {
            test: test.clone(),
            architecture: checkout.architecture.clone(),
            image: checkout.folder.join("x86").join(&test.file),
            environment: None,
            log: results.join(format!("{}-{}.txt", checkout.architecture, test.name)),
            limit,
            options,
        }
    }

    /// Sets the processor profile, unless it is the default one.
    pub fn set_profile(&mut self, cpu: Option<&str>) {
        self.options.extend(cpu.map(|cpu| format!("--cpu={cpu}")));
    }

    /// Makes the initial RAM disk that passes environment variables to the test.
    pub fn set_environment(&mut self, variables: Option<&str>) -> Result<()> {
        let Some(variables) = variables else {
            return Ok(());
        };
        let file = self.log.with_extension("env");
        fs::write(&file, format!("{variables}\n"))?;
        self.environment = Some(file);
        Ok(())
    }

    /// Returns hindsight's arguments. `path_of` maps a path here to the path where hindsight runs.
    pub fn words(&self, path_of: impl Fn(&Path) -> PathBuf) -> Vec<String> {
        let mut words = vec!["run".to_owned()];
        words.extend(self.options.iter().cloned());
        if let Some(file) = &self.environment {
            words.push(format!("--initrd={}", path_of(file).display()));
        }
        words.push(path_of(&self.image).display().to_string());
        words
    }

    /// Runs the test on this machine.
    pub fn run(&self, binary: &Path) -> Result<TestResult> {
        let start = Instant::now();
        let output = Command::new(binary)
            .args(self.words(Path::to_path_buf))
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", binary.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let messages = String::from_utf8_lossy(&output.stderr);
        let status = output.status.code().unwrap_or(-1);
        self.judge(&text, &messages, status, start.elapsed())
    }

    /// Saves the output of the test; prints and returns its result.
    pub fn judge(
        &self,
        text: &str,
        messages: &str,
        status: i32,
        time: Duration,
    ) -> Result<TestResult> {
        fs::write(&self.log, format!("{text}{messages}"))?;
        let lines = |word: &str| {
            let lines = text.lines().filter_map(|line| line.strip_prefix(word));
            lines.map(|rest| rest.trim().to_owned()).collect::<Vec<_>>()
        };
        let failures = lines("FAIL: ");
        let result = TestResult {
            name: self.test.name.clone(),
            architecture: self.architecture.clone(),
            verdict: Verdict::of(status),
            counts: [lines("PASS: ").len(), failures.len(), lines("SKIP: ").len()],
            failures,
            time,
        };
        let [passed, failed, skipped] = result.counts;
        say(format!(
            "{} ({}): {:?}, {passed} passed, {failed} failed, {skipped} skipped, {:.1} s",
            result.name,
            result.architecture,
            result.verdict,
            result.time.as_secs_f32()
        ));
        Ok(result)
    }
}
