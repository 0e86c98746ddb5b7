//! Runs the tests of kvm-unit-tests from checkouts that the user has built, and makes
//! docs/reports/kvm-unit-tests.md of the results.

mod config;
mod job;
mod lab;
mod page;

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;

use crate::conformance::TestEngine;
use crate::lab::Lab;
use crate::process::{absolute, existing_file, root, say};
use config::{Checkout, Expectations};
use job::Job;

/// Runs kvm-unit-tests, in the interpreter unless another engine is named.
///
/// The user configures and builds each checkout: one for x86_64 and, for the tests of 32-bit code,
/// one for i386.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Exit status: 0 when every test passes or is one that asks for what the profile lacks, 1 when another one
does not pass, 2 for wrong arguments.")]
pub struct KvmUnitTestsArguments {
    /// Built checkouts.
    #[arg(required = true, value_name = "CHECKOUT")]
    pub checkouts: Vec<PathBuf>,
    /// The hindsight that runs them [default: target/release/hindsight; for a lab, builds one].
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,
    /// Only tests whose name contains TEXT; their rows of the page are replaced.
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// The engine; the page is made only for the interpreter.
    #[arg(long, value_name = "ENGINE", default_value = "interp")]
    pub engine: TestEngine,
    /// Runs the tests in this lab, where hindsight is linked statically; the page is not made.
    #[arg(long, value_name = "LAB")]
    pub lab: Option<Lab>,
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
    /// Numbers of lines PASS, FAIL and SKIP in its output.
    pub counts: [usize; 3],
    /// The names of the failed assertions.
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
    let results = root().join(&arguments.results);
    fs::create_dir_all(&results)?;
    let expectations = Expectations::load()?;
    let mut jobs = Vec::new();
    for folder in &arguments.checkouts {
        let checkout = Checkout::open(&absolute(folder)?)?;
        for test in &checkout.tests {
            let named = arguments.filter.as_ref();
            if named.map_or(!test.on_request, |text| test.name.contains(text)) {
                let mut job = Job::new(&checkout, test, arguments, &results);
                job.set_profile(expectations.profile(&test.name));
                job.set_environment(expectations.environment(&test.name))?;
                jobs.push(job);
            }
        }
    }
    let binary = arguments.binary.as_deref();
    let ended = if let Some(lab) = arguments.lab {
        lab::run_jobs(&jobs, lab, binary)?
    } else {
        let default = root().join("target/release/hindsight");
        let binary = existing_file("--binary", binary.unwrap_or(&default))?;
        run_jobs(&jobs, arguments.jobs, |job| job.run(&binary))?
    };
    if arguments.lab.is_none() && arguments.engine == TestEngine::Interp {
        let page = root().join("docs/reports/kvm-unit-tests.md");
        let text = if arguments.filter.is_some() {
            let before = fs::read_to_string(&page)?;
            page::update(&before, &ended, &expectations, arguments.timeout)
        } else {
            page::render(&ended, &expectations, arguments.timeout)
        };
        fs::write(&page, text)?;
        say(format!("wrote {}", page.display()));
    }
    let unexplained = |result: &&TestResult| {
        result.verdict != Verdict::Passed && expectations.reason(&result.name).is_none()
    };
    Ok(u8::from(ended.iter().any(|result| unexplained(&result))))
}

/// Runs all jobs, `threads` at a time; returns the results in the order of the jobs.
fn run_jobs(
    jobs: &[Job],
    threads: usize,
    run: impl Fn(&Job) -> Result<TestResult> + Sync,
) -> Result<Vec<TestResult>> {
    let next = AtomicUsize::new(0);
    let ended = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(n) = Some(next.fetch_add(1, Ordering::Relaxed))
                    && let Some(job) = jobs.get(n)
                {
                    let result = run(job);
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
