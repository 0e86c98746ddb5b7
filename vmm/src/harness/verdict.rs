//! Judges a case by the status and the report of its child.
//!
//! A guest writes a code to the debug exit port, and the VMM exits with status `(code << 1) | 1`.
//! So status 1 is a pass, other odd statuses are failures of the guest, and even ones are those of
//! the VMM.

use std::time::Duration;

use crate::harness::child::{ChildEnd, FinishedChild};
use crate::harness::select::TestJob;
use crate::harness::serial::{FailedAssertion, GuestReport, Transcript};

/// Status of the VMM if the guest wrote code 0.
const STATUS_PASS: i32 = 1;
/// Status of the VMM if it refuses the command line or the image.
const STATUS_USAGE: i32 = 2;
/// Status of the VMM if the guest crashed, for example by a triple fault.
const STATUS_GUEST_CRASH: i32 = 4;
/// Status of the VMM if the guest requested a reset.
const STATUS_RESET: i32 = 8;
/// Status of the VMM if `--timeout` ended the guest.
const STATUS_TIMEOUT: i32 = 124;
/// Status of a Rust program that panicked, and of a VMM whose guest wrote code 50.
const STATUS_PANIC: i32 = 101;

/// The verdict on a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CaseVerdict {
    /// The case passed.
    Pass,
    /// The harness or the guest skipped the case, for this reason.
    Skip(String),
    /// The case failed.
    Fail(CaseFailure),
}

/// Why a case failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaseFailure {
    /// The kind of failure.
    pub kind: FailureKind,
    /// One line that describes the failure.
    pub message: String,
    /// The failed assertions.
    pub assertions: Vec<FailedAssertion>,
}

/// Kinds of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// Assertions failed, or the guest wrote a code other than 0.
    Guest,
    /// The guest crashed or reset its machine.
    Crash,
    /// The guest wrote code 0 without a report of the case.
    NoReport,
    /// The case exceeded its time limit.
    Timeout,
    /// The VMM refused the image, crashed, or exited without a code of the guest.
    Vmm,
}

impl FailureKind {
    /// The name in machine-readable reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Guest => "guest",
            Self::Crash => "crash",
            Self::NoReport => "no-report",
            Self::Timeout => "timeout",
            Self::Vmm => "vmm",
        }
    }
}

/// The result of one job.
#[derive(Clone, Debug)]
pub struct CaseResult {
    /// The job.
    pub job: TestJob,
    /// The verdict.
    pub verdict: CaseVerdict,
    /// How long it ran.
    pub elapsed: Duration,
    /// After a failure: the last lines of the guest, printable.
    pub output: Vec<String>,
    /// After a failure: the last lines of the VMM, printable.
    pub stderr: Vec<String>,
}

impl CaseResult {
    /// The result of a job that is skipped on this host.
    pub fn skipped(job: TestJob, reason: String) -> Self {
        let verdict = CaseVerdict::Skip(reason);
        Self {
            job,
            verdict,
            elapsed: Duration::ZERO,
            output: Vec::new(),
            stderr: Vec::new(),
        }
    }

    /// The result of a job whose child has ended.
    pub fn judged(job: TestJob, limit: Duration, finished: &FinishedChild) -> Self {
        let verdict = judge(&job, limit, finished);
        let failed = matches!(verdict, CaseVerdict::Fail(_));
        let tail = |transcript: &Transcript| {
            if failed {
                transcript.tail()
            } else {
                Vec::new()
            }
        };
        Self {
            output: tail(&finished.output),
            stderr: tail(&finished.stderr),
            elapsed: finished.elapsed,
            verdict,
            job,
        }
    }
}

fn judge(job: &TestJob, limit: Duration, finished: &FinishedChild) -> CaseVerdict {
    let report = finished.output.report();
    let assertions: Vec<FailedAssertion> = lines_of(job, &report.failed, |f| (&f.0, f.1))
        .map(|f| f.2.clone())
        .collect();
    let fail = |kind, message: String| {
        CaseVerdict::Fail(CaseFailure {
            kind,
            message,
            assertions: assertions.clone(),
        })
    };
    // The VMM's own message says more than its status.
    let explain = |message: &str| match vmm_message(finished) {
        Some(reason) => format!("{message}: {reason}"),
        None => message.to_owned(),
    };
    match finished.end {
        ChildEnd::Status(STATUS_PASS) if job.case.is_none() => CaseVerdict::Pass,
        ChildEnd::Status(STATUS_PASS) => judge_passed(job, report, fail),
        ChildEnd::Status(STATUS_USAGE) => fail(
            FailureKind::Vmm,
            explain("the VMM refused the image or its options"),
        ),
        ChildEnd::Status(STATUS_GUEST_CRASH) => {
            fail(FailureKind::Crash, explain("the guest crashed"))
        }
        ChildEnd::Status(STATUS_RESET) => {
            fail(FailureKind::Crash, explain("the guest requested a reset"))
        }
        ChildEnd::Status(STATUS_TIMEOUT) => fail(FailureKind::Timeout, timed_out(limit)),
        ChildEnd::Status(STATUS_PANIC) if panicked(finished) => {
            fail(FailureKind::Vmm, "the VMM panicked".to_owned())
        }
        ChildEnd::Status(status) if status & 1 == 1 => {
            let message = match assertions.len() {
                0 => format!("the guest wrote code {} to the exit port", status >> 1),
                1 => "1 assertion failed".to_owned(),
                count => format!("{count} assertions failed"),
            };
            fail(FailureKind::Guest, message)
        }
        ChildEnd::Status(status) => fail(
            FailureKind::Vmm,
            explain(&format!(
                "the VMM exited with status {status} and without a verdict"
            )),
        ),
        ChildEnd::Signal(signal) => fail(
            FailureKind::Vmm,
            format!("signal {signal} terminated the VMM"),
        ),
        ChildEnd::Overdue => {
            let message = format!("{}; the VMM did not end by itself", timed_out(limit));
            fail(FailureKind::Timeout, message)
        }
        ChildEnd::Interrupted => fail(FailureKind::Vmm, "interrupted".to_owned()),
    }
}

/// Judges a declared case whose guest wrote code 0. The guest must also have reported the case.
fn judge_passed(
    job: &TestJob,
    report: &GuestReport,
    fail: impl Fn(FailureKind, String) -> CaseVerdict,
) -> CaseVerdict {
    let failed = lines_of(job, &report.failed, |f| (&f.0, f.1)).count();
    if failed > 0 || report.end_failed.is_some_and(|count| count > 0) {
        let message = "the guest reports failures but wrote code 0".to_owned();
        return fail(FailureKind::Guest, message);
    }
    if let Some((_, _, reason)) = lines_of(job, &report.skipped, |s| (&s.0, s.1)).next() {
        return CaseVerdict::Skip(format!("guest: {reason}"));
    }
    if lines_of(job, &report.ok, |o| (&o.0, o.1)).next().is_some() {
        return CaseVerdict::Pass;
    }
    fail(
        FailureKind::NoReport,
        "the guest wrote code 0 but did not report the case".to_owned(),
    )
}

/// The report lines about the case and level of `job`.
fn lines_of<'a, T>(
    job: &'a TestJob,
    lines: &'a [T],
    subject: impl Fn(&T) -> (&String, u8) + 'a,
) -> impl Iterator<Item = &'a T> {
    let name = job.case.as_ref().map(|case| &case.name);
    lines
        .iter()
        .filter(move |line| name.is_none_or(|name| subject(line) == (name, job.cpl)))
}

fn timed_out(limit: Duration) -> String {
    format!("timed out after {} s", limit.as_secs_f64())
}

/// The VMM's message: its first line that starts with `hindsight: `.
fn vmm_message(finished: &FinishedChild) -> Option<String> {
    let lines = finished.stderr.tail();
    lines
        .iter()
        .find_map(|line| line.strip_prefix("hindsight: "))
        .map(str::to_owned)
}

fn panicked(finished: &FinishedChild) -> bool {
    finished
        .stderr
        .tail()
        .iter()
        .any(|line| line.contains("panicked at"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::image::TestImage;
    use crate::harness::select::jobs;
    use crate::harness::select::tests::jobs_of;
    use std::sync::Arc;

    fn transcript(text: &str) -> Transcript {
        let mut transcript = Transcript::default();
        transcript.push(text.as_bytes());
        transcript.finish();
        transcript
    }

    fn finished(end: ChildEnd, output: &str, stderr: &str) -> FinishedChild {
        FinishedChild {
            end,
            output: transcript(output),
            stderr: transcript(stderr),
            elapsed: Duration::from_millis(3),
        }
    }

    /// The verdict in one word, and its message.
    fn verdict(job: &TestJob, end: ChildEnd, output: &str, stderr: &str) -> (&'static str, String) {
        match judge(job, Duration::from_secs(2), &finished(end, output, stderr)) {
            CaseVerdict::Pass => ("pass", String::new()),
            CaseVerdict::Skip(reason) => ("skip", reason),
            CaseVerdict::Fail(failure) => (failure.kind.as_str(), failure.message),
        }
    }

    #[test]
    fn verdict_follows_from_end_and_report() {
        use ChildEnd::{Interrupted, Overdue, Signal, Status};
        const OK: &str = "ok int3 cpl=3\n";
        let job = &jobs_of("exc", "case int3 cpl=3\n")[0];
        let failed = "fail int3 cpl=3 a.rs:1 x expected=1 found=2\n";
        let rows: [(ChildEnd, &str, &str, &str); 20] = [
            (Status(1), OK, "pass", ""),
            (
                Status(1),
                "ok int3 cpl=3\nend passed=1 failed=0 skipped=0",
                "pass",
                "",
            ),
            (Status(1), "", "no-report", "did not report"),
            (Status(1), "ok int3 cpl=0\n", "no-report", "did not report"),
            (Status(1), "ok int4 cpl=3\n", "no-report", "did not report"),
            (
                Status(1),
                "ok int3 cpl=3\nend passed=1 failed=1",
                "guest",
                "wrote code 0",
            ),
            (Status(1), failed, "guest", "wrote code 0"),
            (
                Status(1),
                "skip int3 cpl=3 no TSD\n",
                "skip",
                "guest: no TSD",
            ),
            (Status(3), failed, "guest", "1 assertion failed"),
            (Status(7), "", "guest", "code 3"),
            (Status(3), OK, "guest", "code 1"),
            (Status(2), "", "vmm", "refused"),
            (Status(124), OK, "timeout", "timed out after 2 s"),
            (Status(4), OK, "crash", "the guest crashed"),
            (Status(6), "", "vmm", "status 6"),
            (Status(8), "", "crash", "reset"),
            (Status(0), OK, "vmm", "status 0"),
            (Signal(11), OK, "vmm", "signal 11"),
            (Overdue, OK, "timeout", "did not end by itself"),
            (Interrupted, "", "vmm", "interrupted"),
        ];
        for (end, output, word, message) in rows {
            let found = verdict(job, end, output, "");
            assert_eq!(found.0, word, "row {end:?} {output:?}");
            assert!(
                found.1.contains(message),
                "row {end:?} {output:?}: {}",
                found.1
            );
        }
    }

    #[test]
    fn status_101_is_a_panic_only_with_its_message() {
        let job = &jobs_of("exc", "case int3 cpl=3\n")[0];
        let stderr = "thread 'main' panicked at src/x.rs:1:1:";
        assert_eq!(verdict(job, ChildEnd::Status(101), "", stderr).0, "vmm");
        assert!(
            verdict(job, ChildEnd::Status(101), "", "")
                .1
                .contains("code 50")
        );
    }

    #[test]
    fn message_contains_the_message_of_the_vmm() {
        let job = &jobs_of("exc", "case int3 cpl=3\n")[0];
        let stderr = "warning\nhindsight: cpu 0: triple fault\n  rax=0\n";
        let found = verdict(job, ChildEnd::Status(4), "", stderr);
        assert_eq!(
            found,
            ("crash", "the guest crashed: cpu 0: triple fault".to_owned())
        );
    }

    #[test]
    fn image_without_cases_passes_with_code_0_alone() {
        let image = Arc::new(TestImage::builtin("flat", b"x").unwrap());
        let job = &jobs(&[image])[0];
        assert_eq!(verdict(job, ChildEnd::Status(1), "whatever", "").0, "pass");
        assert_eq!(
            verdict(job, ChildEnd::Status(3), "fail a cpl=0 f.rs:1 no", "").0,
            "guest"
        );
    }
}
