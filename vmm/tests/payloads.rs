//! The built-in payloads, each case at each level one test: `cargo test --test payloads int3`.
//!
//! Every case runs under KVM and in the interpreter. A case whose needs this host's KVM does not
//! meet is reported as ignored under KVM, with the reason. The interpreter runs every case.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use hindsight_vmm::harness::builtin::{builtin_jobs, run_job};
use hindsight_vmm::harness::needs::{MeasuredHost, kvm_problem};
use hindsight_vmm::harness::report::text::failure_text;
use hindsight_vmm::harness::runner::Runner;
use hindsight_vmm::harness::select::{TestJob, check_needs, mark_unmet};
use hindsight_vmm::harness::verdict::CaseVerdict;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// Guest memory of every case.
const MEMORY: &str = "64M";

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let jobs = match builtin_jobs() {
        Ok(jobs) => jobs,
        Err(error) => {
            eprintln!("cannot prepare the payloads: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let mut trials = Vec::new();
    for engine in ["kvm", "interp"] {
        let runner = Arc::new(Runner::Hindsight {
            program: env!("CARGO_BIN_EXE_hindsight").into(),
            options: vec![format!("--engine={engine}")],
        });
        let jobs = jobs.iter().cloned();
        trials.extend(jobs.map(|job| trial(job, engine, Arc::clone(&runner))));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(job: TestJob, engine: &'static str, runner: Arc<Runner>) -> Trial {
    let name = match &job.case {
        Some(_) => format!("{engine}/{}/cpl{}", job.name(), job.cpl),
        None => format!("{engine}/{}", job.name()),
    };
    Trial::ignorable_test(name, move || run(job, engine, &runner))
}

fn run(job: TestJob, engine: &str, runner: &Runner) -> Result<Completion, Failed> {
    let mut jobs = [job];
    if engine == "kvm" {
        if let Some(problem) = kvm_problem() {
            return Ok(Completion::ignored_with(problem));
        }
        // Measured only when the test runs, so that listing the tests costs nothing.
        check_needs(&jobs, &MeasuredHost)?;
        mark_unmet(&mut jobs, &MeasuredHost);
    }
    let result = run_job(&jobs[0], runner, MEMORY, None, &AtomicBool::new(false))
        .map_err(|error| Failed::from(format!("{error:#}")))?;
    match &result.verdict {
        CaseVerdict::Pass => Ok(Completion::Completed),
        CaseVerdict::Skip(reason) => Ok(Completion::ignored_with(reason)),
        CaseVerdict::Fail(_) => Err(failure_text(&result).into()),
    }
}
