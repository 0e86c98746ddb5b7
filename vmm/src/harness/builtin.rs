//! The payloads that are built into this program, and the run of one job.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};

use super::BUILTIN_PAYLOADS;
use super::child::supervise;
use super::image::TestImage;
use super::runner::{GRACE, Runner};
use super::select::{self, TestJob};
use super::verdict::CaseResult;

/// The payloads that are built into this program.
///
/// # Errors
///
/// When the host cannot create memory files.
pub fn builtin_images() -> Result<Vec<Arc<TestImage>>> {
    BUILTIN_PAYLOADS
        .iter()
        .map(|(name, bytes)| Ok(Arc::new(TestImage::builtin(name, bytes)?)))
        .collect()
}

/// Every case of the built-in payloads, at every privilege level.
///
/// # Errors
///
/// As [`builtin_images`].
pub fn builtin_jobs() -> Result<Vec<TestJob>> {
    Ok(select::jobs(&builtin_images()?))
}

/// Runs one job to its verdict, within `timeout` or else the job's own limit.
///
/// # Errors
///
/// When the host cannot start the child.
pub fn run_job(
    job: &TestJob,
    runner: &Runner,
    memory: &str,
    timeout: Option<Duration>,
    interrupt: &AtomicBool,
) -> Result<CaseResult> {
    if let Some(reason) = &job.skip {
        return Ok(CaseResult::skipped(job.clone(), reason.clone()));
    }
    let limit = timeout.unwrap_or(job.timeout());
    let command = runner.command(job, memory, limit);
    let program = command.get_program().to_owned();
    let finished = supervise(command, limit + GRACE, interrupt)
        .with_context(|| format!("cannot run {}", program.display()))?;
    Ok(CaseResult::judged(job.clone(), limit, &finished))
}
