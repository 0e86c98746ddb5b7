//! Runs the cases of a group under KVM in child processes.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

use super::groups::{harm, hypervisor_signature, jobs_of};
use crate::harness::builtin::{builtin_jobs, run_job};
use crate::harness::pool::{PoolEvent, run_in_order};
use crate::harness::runner::Runner;
use crate::harness::select::TestJob;
use crate::harness::verdict::{CaseResult, CaseVerdict};
use crate::kvm::exactness::{Exactness, FacilityGroup, GroupVerdict, Visibility};

/// The longest time that one case may take.
const CASE_LIMIT: Duration = Duration::from_secs(10);
/// Guest memory of a case.
const MEMORY: &str = "64M";

/// How a machine runs while it is measured. Saved verdicts are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MeasureMode {
    /// Under KVM, which handles debug registers and single-stepping by itself.
    Alone,
    /// Under KVM until the monitor sees that the guest has armed a facility.
    Moving,
}

impl MeasureMode {
    const fn word(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Moving => "moving",
        }
    }
}

/// Which cases are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A few, for a first start.
    Short,
    /// All.
    All,
}

/// Measures groups on this host.
#[derive(Debug)]
pub struct Measurement {
    program: PathBuf,
    jobs: Vec<TestJob>,
    scope: Scope,
    interrupt: AtomicBool,
}

impl Measurement {
    /// Prepares to measure with the built-in payloads.
    ///
    /// # Errors
    ///
    /// This program's file cannot be found, or the host cannot create memory files.
    pub fn new(scope: Scope) -> Result<Self> {
        Ok(Self {
            program: std::env::current_exe().context("cannot find this program's own file")?,
            jobs: builtin_jobs()?,
            scope,
            interrupt: AtomicBool::new(false),
        })
    }

    /// The verdict on `group`. `on_case` is called for each case that has run.
    pub fn measure(
        &self,
        group: FacilityGroup,
        on_case: &mut dyn FnMut(&CaseResult),
    ) -> GroupVerdict {
        let mut verdict = GroupVerdict::default();
        let visibility = group.visibility();
        if visibility != Visibility::Unseen {
            verdict.moving = self.run(group, MeasureMode::Moving, on_case);
        }
        if visibility != Visibility::ByMsr {
            // The short set cannot show more than that the group may be exact.
            let may_move =
                verdict.moving == Exactness::Unmeasured && visibility == Visibility::ByDebugExit;
            if !may_move {
                verdict.alone = self.run(group, MeasureMode::Alone, on_case);
            }
        }
        verdict
    }

    /// Runs the group's cases until one fails twice.
    ///
    /// Cases that would harm the host are not run and count as failed.
    fn run(
        &self,
        group: FacilityGroup,
        mode: MeasureMode,
        on_case: &mut dyn FnMut(&CaseResult),
    ) -> Exactness {
        let mut jobs = jobs_of(group, &self.jobs, self.scope == Scope::Short);
        let signature = hypervisor_signature();
        let harmed = jobs.iter().find_map(|job| harm(job, &signature));
        jobs.retain(|job| harm(job, &signature).is_none());
        let runner = self.runner(&format!("--measure={}", mode.word()));
        let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let stop = AtomicBool::new(false);
        let mut failed = None;
        let delivered = run_in_order(
            jobs.len(),
            cores,
            &stop,
            |index| self.judge(&jobs[index], &runner),
            |event| -> Result<()> {
                let PoolEvent::Done((result, failure)) = event else {
                    return Ok(());
                };
                on_case(&result);
                if failed.is_none() && failure.is_some() {
                    failed = failure;
                    stop.store(true, Ordering::Relaxed);
                }
                Ok(())
            },
        );
        match (failed.or(harmed.map(str::to_owned)), delivered) {
            (Some(reason), _) => Exactness::Inexact(reason),
            (None, Ok(count)) if count == jobs.len() && self.scope == Scope::All => {
                Exactness::Exact
            }
            (None, Ok(_)) => Exactness::Unmeasured,
            (None, Err(error)) => Exactness::Inexact(format!("{error:#}")),
        }
    }

    /// Runs a case. Returns its result and, unless it counts as passed, the reason.
    fn judge(&self, job: &TestJob, runner: &Runner) -> Result<(CaseResult, Option<String>)> {
        let first = self.run_case(job, runner)?;
        match first.verdict {
            CaseVerdict::Pass => Ok((first, None)),
            // The default processor may lack something. Then the case skips itself in the
            // interpreter too.
            CaseVerdict::Skip(_) => {
                let interpreter = self.runner("--engine=interp");
                let interpreted = self.run_case(job, &interpreter)?;
                let failure = match interpreted.verdict {
                    CaseVerdict::Skip(_) => None,
                    _ => failure(&first),
                };
                Ok((first, failure))
            }
            // A host under load may have stolen the time of the first run.
            CaseVerdict::Fail(_) => {
                let second = self.run_case(job, runner)?;
                let failure = failure(&second);
                Ok((second, failure))
            }
        }
    }

    fn runner(&self, option: &str) -> Runner {
        Runner::Hindsight {
            program: self.program.clone(),
            options: vec![option.to_owned(), "--log=off".to_owned()],
        }
    }

    fn run_case(&self, job: &TestJob, runner: &Runner) -> Result<CaseResult> {
        // The limits of the cases are meant for hosts that are not busy. A first start must not
        // wait long.
        let limit = match self.scope {
            Scope::Short => job.timeout().min(CASE_LIMIT),
            Scope::All => CASE_LIMIT,
        };
        run_job(job, runner, MEMORY, Some(limit), &self.interrupt)
    }
}

/// Why a case did not pass; `None` if it did.
fn failure(result: &CaseResult) -> Option<String> {
    let reason = match &result.verdict {
        CaseVerdict::Pass => return None,
        CaseVerdict::Skip(reason) => reason.clone(),
        CaseVerdict::Fail(failure) => failure
            .assertions
            .first()
            .map_or_else(|| failure.message.clone(), |failed| failed.message.clone()),
    };
    Some(format!("{}: {reason}", result.job.id()))
}
