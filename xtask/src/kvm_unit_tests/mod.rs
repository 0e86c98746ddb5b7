//! Runs the tests of kvm-unit-tests from checkouts that the user has built, and makes
//! docs/reports/kvm-unit-tests.md of the results.

mod config;
mod page;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::process::{absolute, existing_file, root, say};
use config::{Checkout, Expectations, UnitTest};

/// Runs kvm-unit-tests in the interpreter.
///
/// A checkout is configured and built by the user: one for x86_64, and, for the tests of 32-bit code, one
/// for i386.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Exit status: 0 when every test passes or is one that asks for what the profile lacks, 1 when another one
does not pass, 2 for wrong arguments.")]
pub struct KvmUnitTestsArguments {
    /// Built checkouts.
    #[arg(required = true, value_name = "CHECKOUT")]
    pub checkouts: Vec<PathBuf>,
    /// The hindsight that runs them.
    #[arg(long, value_name = "PATH", default_value = "target/release/hindsight")]
    pub binary: PathBuf,
    /// Only tests whose name contains TEXT; the page is not made.
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Seconds that a test may take at least.
    #[arg(long, value_name = "SECONDS", default_value_t = 1200)]
    pub timeout: u64,
    /// Tests at a time.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub jobs: usize,
    /// Where their output goes.
    #[arg(long, value_name = "DIR", default_value = "target/kvm-unit-tests")]
    pub results: PathBuf,
}

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    Failed,
    Skipped,
    TimedOut,
    /// The guest ended with an exception that it has no handler for.
    Crashed,
    /// The monitor ended with this status.
    Other(i32),
}

/// The result of a test.
#[derive(Clone, Debug)]
pub struct TestResult {
    pub name: String,
    pub architecture: String,
    pub verdict: Verdict,
    /// Lines PASS, FAIL and SKIP of its output.
    pub counts: [usize; 3],
    /// What the failed assertions are called.
    pub failures: Vec<String>,
    pub time: Duration,
}

/// Exit status of hindsight when `--timeout` passed.
const TIMED_OUT: i32 = 124;
/// The suite's exit codes, as hindsight reports them.
const PASSED: i32 = 1;
const FAILED: i32 = 3;
const SKIPPED: i32 = 77;
const UNHANDLED: i32 = 127;

impl Verdict {
    fn of(status: i32) -> Self {
        match status {
            PASSED => Self::Passed,
            FAILED => Self::Failed,
            SKIPPED => Self::Skipped,
            UNHANDLED => Self::Crashed,
            TIMED_OUT => Self::TimedOut,
            other => Self::Other(other),
        }
    }
}

/// Runs the tests and makes the page; returns the exit status.
pub fn run(arguments: &KvmUnitTestsArguments) -> Result<u8> {
    if arguments.jobs == 0 {
        bail!("--jobs must be at least 1");
    }
    let binary = existing_file("--binary", &root().join(&arguments.binary))?;
    let results = root().join(&arguments.results);
    fs::create_dir_all(&results)?;
    let expectations = Expectations::load()?;
    let mut jobs = Vec::new();
    for folder in &arguments.checkouts {
        let checkout = Checkout::open(&absolute(folder)?)?;
        for test in &checkout.tests {
            let named = arguments.filter.as_ref();
            if named.map_or(!test.on_request, |text| test.name.contains(text)) {
                let mut job = Job::new(&checkout, test, &binary, &results, arguments.timeout);
                job.set_environment(expectations.environment(&test.name))?;
                jobs.push(job);
            }
        }
    }
    let ended = run_jobs(&jobs, arguments.jobs)?;
    if arguments.filter.is_none() {
        let page = root().join("docs/reports/kvm-unit-tests.md");
        fs::write(
            &page,
            page::render(&ended, &expectations, arguments.timeout),
        )?;
        say(format!("wrote {}", page.display()));
    }
    let unexplained = |result: &&TestResult| {
        result.verdict != Verdict::Passed && expectations.reason(&result.name).is_none()
    };
    Ok(u8::from(ended.iter().any(|result| unexplained(&result))))
}

/// A test to be run.
struct Job {
    test: UnitTest,
    architecture: String,
    command: Vec<String>,
    image: PathBuf,
    binary: PathBuf,
    log: PathBuf,
}

impl Job {
    fn new(
        checkout: &Checkout,
        test: &UnitTest,
        binary: &Path,
        results: &Path,
        timeout: u64,
    ) -> Self {
        let seconds = test.timeout.unwrap_or(0).max(timeout);
        let mut command = vec![
            "--engine=interp".to_owned(),
            format!("--cpus={}", test.cpus),
            format!("--memory={}M", test.memory),
            format!("--timeout={seconds}"),
        ];
        if !test.arguments.is_empty() {
            command.push(format!("--cmdline={}", test.arguments));
        }
        Self {
            test: test.clone(),
            architecture: checkout.architecture.clone(),
            command,
            image: checkout.folder.join("x86").join(&test.file),
            binary: binary.to_owned(),
            log: results.join(format!("{}-{}.txt", checkout.architecture, test.name)),
        }
    }

    /// Gives the test an initial RAM disk with environment variables.
    fn set_environment(&mut self, variables: Option<&str>) -> Result<()> {
        let Some(variables) = variables else {
            return Ok(());
        };
        let file = self.log.with_extension("env");
        fs::write(&file, format!("{variables}\n"))?;
        self.command.push(format!("--initrd={}", file.display()));
        Ok(())
    }

    fn run(&self) -> Result<TestResult> {
        let start = Instant::now();
        let output = Command::new(&self.binary)
            .arg("run")
            .args(&self.command)
            .arg(&self.image)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", self.binary.display()))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let messages = String::from_utf8_lossy(&output.stderr);
        fs::write(&self.log, format!("{text}{messages}"))?;
        let lines = |word: &str| {
            let lines = text.lines().filter_map(|line| line.strip_prefix(word));
            lines.map(|rest| rest.trim().to_owned()).collect::<Vec<_>>()
        };
        let failures = lines("FAIL: ");
        let result = TestResult {
            name: self.test.name.clone(),
            architecture: self.architecture.clone(),
            verdict: Verdict::of(output.status.code().unwrap_or(-1)),
            counts: [lines("PASS: ").len(), failures.len(), lines("SKIP: ").len()],
            failures,
            time: start.elapsed(),
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

/// Runs all jobs, `threads` at a time; returns the results in the order of the jobs.
fn run_jobs(jobs: &[Job], threads: usize) -> Result<Vec<TestResult>> {
    let next = AtomicUsize::new(0);
    let ended = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(n) = Some(next.fetch_add(1, Ordering::Relaxed))
                    && let Some(job) = jobs.get(n)
                {
                    let result = job.run();
                    if let Ok(mut ended) = ended.lock() {
                        ended.push((n, result));
                    }
                }
            });
        }
    });
    let mut ended = ended.into_inner().unwrap_or_default();
    ended.sort_by_key(|(n, _)| *n);
    ended.into_iter().map(|(_, result)| result).collect()
}
