//! From the end of a child to a verdict.
//!
//! A guest writes a code to the debug exit port, and the VMM ends with status `(code << 1) | 1`: a
//! pass is status 1, other odd statuses are the guest's own failures, even ones the VMM's.

use std::time::Duration;

use crate::harness::child::{End, Finished};
use crate::harness::select::Job;
use crate::harness::serial::{Assertion, Report, Transcript};

/// Status of the VMM when the guest wrote code 0.
const STATUS_PASS: i32 = 1;
/// Status of the VMM when it does not take the command line or the image.
const STATUS_USAGE: i32 = 2;
/// Status of the VMM when the guest crashed, as by a triple fault.
const STATUS_GUEST_CRASH: i32 = 4;
/// Status of the VMM when the guest asked for a reset.
const STATUS_RESET: i32 = 8;
/// Status of the VMM when `--timeout` ended the guest.
const STATUS_TIMEOUT: i32 = 124;
/// Status of a Rust program that panicked, which also is what a guest's code 50 looks like.
const STATUS_PANIC: i32 = 101;

/// What became of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It passed.
    Pass,
    /// It was not run, or the guest itself skipped it.
    Skip(String),
    /// It failed.
    Fail(Failure),
}

/// Why a case failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Kind of the failure.
    pub kind: FailureKind,
    /// One line for people.
    pub message: String,
    /// The assertions that failed.
    pub assertions: Vec<Assertion>,
}

/// Kinds of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// Assertions failed, or the guest wrote another code than 0.
    Guest,
    /// The guest crashed or reset its machine.
    Crash,
    /// The guest passed without a word on the case.
    NoReport,
    /// Time was over.
    Timeout,
    /// The VMM refused the image, crashed, or gave no verdict.
    Vmm,
}

impl FailureKind {
    /// A word for machine-readable reports.
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

/// One case that is done.
#[derive(Clone, Debug)]
pub struct CaseResult {
    /// The job.
    pub job: Job,
    /// The verdict.
    pub verdict: Verdict,
    /// How long it ran.
    pub elapsed: Duration,
    /// The last lines of a guest that failed, printable.
    pub output: Vec<String>,
    /// The last lines of its VMM, printable.
    pub stderr: Vec<String>,
}

impl CaseResult {
    /// The result of a job that does not run on this host.
    pub fn skipped(job: Job, reason: String) -> Self {
        let verdict = Verdict::Skip(reason);
        Self {
            job,
            verdict,
            elapsed: Duration::ZERO,
            output: Vec::new(),
            stderr: Vec::new(),
        }
    }

    /// The result of a child that has ended.
    pub fn judged(job: Job, limit: Duration, finished: &Finished) -> Self {
        let verdict = judge(&job, limit, finished);
        // Nobody asks what a guest said that passed.
        let failed = matches!(verdict, Verdict::Fail(_));
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

fn judge(job: &Job, limit: Duration, finished: &Finished) -> Verdict {
    let report = finished.output.report();
    let assertions: Vec<Assertion> = mine(job, &report.failed, |f| (&f.0, f.1))
        .map(|f| f.2.clone())
        .collect();
    let fail = |kind, message: String| {
        Verdict::Fail(Failure {
            kind,
            message,
            assertions: assertions.clone(),
        })
    };
    // The VMM's own first words tell more than its status.
    let why = |what: &str| match vmm_words(finished) {
        Some(words) => format!("{what}: {words}"),
        None => what.to_owned(),
    };
    match finished.end {
        End::Status(STATUS_PASS) if job.case.is_none() => Verdict::Pass,
        End::Status(STATUS_PASS) => judge_passed(job, report, fail),
        End::Status(STATUS_USAGE) => fail(
            FailureKind::Vmm,
            why("the VMM refused the image or its options"),
        ),
        End::Status(STATUS_GUEST_CRASH) => fail(FailureKind::Crash, why("the guest crashed")),
        End::Status(STATUS_RESET) => fail(FailureKind::Crash, why("the guest asked for a reset")),
        End::Status(STATUS_TIMEOUT) => fail(FailureKind::Timeout, timed_out(limit)),
        End::Status(STATUS_PANIC) if panicked(finished) => {
            fail(FailureKind::Vmm, "the VMM panicked".to_owned())
        }
        End::Status(status) if status & 1 == 1 => {
            let message = match assertions.len() {
                0 => format!("the guest wrote code {} to the exit port", status >> 1),
                1 => "1 assertion failed".to_owned(),
                count => format!("{count} assertions failed"),
            };
            fail(FailureKind::Guest, message)
        }
        End::Status(status) => fail(
            FailureKind::Vmm,
            why(&format!(
                "the VMM ended with status {status} and no verdict"
            )),
        ),
        End::Signal(signal) => fail(FailureKind::Vmm, format!("the VMM died of signal {signal}")),
        End::Overdue => {
            let message = format!("{}; the VMM did not end by itself", timed_out(limit));
            fail(FailureKind::Timeout, message)
        }
        End::Interrupted => fail(FailureKind::Vmm, "interrupted".to_owned()),
    }
}

/// Code 0 alone is not enough for a declared case: the guest must have said that it ran it.
fn judge_passed(
    job: &Job,
    report: &Report,
    fail: impl Fn(FailureKind, String) -> Verdict,
) -> Verdict {
    let failed = mine(job, &report.failed, |f| (&f.0, f.1)).count();
    if failed > 0 || report.end_failed.is_some_and(|count| count > 0) {
        let message = "the guest reports failures but wrote code 0".to_owned();
        return fail(FailureKind::Guest, message);
    }
    if let Some((_, _, reason)) = mine(job, &report.skipped, |s| (&s.0, s.1)).next() {
        return Verdict::Skip(format!("guest: {reason}"));
    }
    if mine(job, &report.ok, |o| (&o.0, o.1)).next().is_some() {
        return Verdict::Pass;
    }
    fail(
        FailureKind::NoReport,
        "the guest wrote code 0 but does not report the case".to_owned(),
    )
}

/// The report lines that speak of the case and level of `job`.
fn mine<'a, T>(
    job: &'a Job,
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

/// What the VMM says of the end: the first line with its name.
fn vmm_words(finished: &Finished) -> Option<String> {
    let lines = finished.stderr.tail();
    lines
        .iter()
        .find_map(|line| line.strip_prefix("hindsight: "))
        .map(str::to_owned)
}

fn panicked(finished: &Finished) -> bool {
    finished
        .stderr
        .tail()
        .iter()
        .any(|line| line.contains("panicked at"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::image::Image;
    use crate::harness::select::jobs;
    use crate::harness::select::tests::jobs_of;
    use std::sync::Arc;

    fn transcript(text: &str) -> Transcript {
        let mut transcript = Transcript::default();
        transcript.push(text.as_bytes());
        transcript.finish();
        transcript
    }

    fn finished(end: End, output: &str, stderr: &str) -> Finished {
        Finished {
            end,
            output: transcript(output),
            stderr: transcript(stderr),
            elapsed: Duration::from_millis(3),
        }
    }

    /// One word for the verdict and its message.
    fn verdict(job: &Job, end: End, output: &str, stderr: &str) -> (&'static str, String) {
        match judge(job, Duration::from_secs(2), &finished(end, output, stderr)) {
            Verdict::Pass => ("pass", String::new()),
            Verdict::Skip(reason) => ("skip", reason),
            Verdict::Fail(failure) => (failure.kind.as_str(), failure.message),
        }
    }

    #[test]
    fn end_and_report_give_the_verdict() {
        let job = &jobs_of("exc", "case int3 cpl=3\n")[0];
        let failed = "fail int3 cpl=3 a.rs:1 x expected=1 found=2\n";
        let rows: [(End, &str, &str, &str); 20] = [
            (End::Status(1), "ok int3 cpl=3\n", "pass", ""),
            (
                End::Status(1),
                "ok int3 cpl=3\nend passed=1 failed=0 skipped=0",
                "pass",
                "",
            ),
            (End::Status(1), "", "no-report", "does not report"),
            (
                End::Status(1),
                "ok int3 cpl=0\n",
                "no-report",
                "does not report",
            ),
            (
                End::Status(1),
                "ok int4 cpl=3\n",
                "no-report",
                "does not report",
            ),
            (
                End::Status(1),
                "ok int3 cpl=3\nend passed=1 failed=1",
                "guest",
                "wrote code 0",
            ),
            (End::Status(1), failed, "guest", "wrote code 0"),
            (
                End::Status(1),
                "skip int3 cpl=3 no TSD\n",
                "skip",
                "guest: no TSD",
            ),
            (End::Status(3), failed, "guest", "1 assertion failed"),
            (End::Status(7), "", "guest", "code 3"),
            (End::Status(3), "ok int3 cpl=3\n", "guest", "code 1"),
            (End::Status(2), "", "vmm", "refused"),
            (
                End::Status(124),
                "ok int3 cpl=3\n",
                "timeout",
                "timed out after 2 s",
            ),
            (
                End::Status(4),
                "ok int3 cpl=3\n",
                "crash",
                "the guest crashed",
            ),
            (End::Status(6), "", "vmm", "status 6"),
            (End::Status(8), "", "crash", "reset"),
            (End::Status(0), "ok int3 cpl=3\n", "vmm", "status 0"),
            (End::Signal(11), "ok int3 cpl=3\n", "vmm", "signal 11"),
            (
                End::Overdue,
                "ok int3 cpl=3\n",
                "timeout",
                "did not end by itself",
            ),
            (End::Interrupted, "", "vmm", "interrupted"),
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
        assert_eq!(verdict(job, End::Status(101), "", stderr).0, "vmm");
        assert!(verdict(job, End::Status(101), "", "").1.contains("code 50"));
    }

    #[test]
    fn words_of_the_vmm_are_in_the_message() {
        let job = &jobs_of("exc", "case int3 cpl=3\n")[0];
        let stderr = "warning\nhindsight: cpu 0: triple fault\n  rax=0\n";
        let found = verdict(job, End::Status(4), "", stderr);
        assert_eq!(
            found,
            ("crash", "the guest crashed: cpu 0: triple fault".to_owned())
        );
    }

    #[test]
    fn image_without_cases_passes_by_its_code_alone() {
        let image = Arc::new(Image::builtin("flat", b"x").unwrap());
        let job = &jobs(&[image])[0];
        assert_eq!(verdict(job, End::Status(1), "whatever", "").0, "pass");
        assert_eq!(
            verdict(job, End::Status(3), "fail a cpl=0 f.rs:1 no", "").0,
            "guest"
        );
    }
}
