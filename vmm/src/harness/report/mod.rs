//! The reports of the harness: text, TAP and JUnit.

pub mod junit;
pub mod tap;
pub mod text;

use std::fmt;

use crate::harness::verdict::{CaseResult, CaseVerdict};

/// How many cases passed, failed and were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Cases that passed.
    pub passed: usize,
    /// Cases that failed.
    pub failed: usize,
    /// Cases that were skipped.
    pub skipped: usize,
}

impl Summary {
    /// Counts a result.
    pub fn count(&mut self, result: &CaseResult) {
        match result.verdict {
            CaseVerdict::Pass => self.passed += 1,
            CaseVerdict::Fail(_) => self.failed += 1,
            CaseVerdict::Skip(_) => self.skipped += 1,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::harness::select::tests::jobs_of;
    use crate::harness::serial::FailedAssertion;
    use crate::harness::verdict::{CaseFailure, CaseResult, CaseVerdict, FailureKind};
    use std::time::Duration;

    /// A pass, a failure with an assertion, and a skip.
    pub(crate) fn three_results() -> Vec<CaseResult> {
        let jobs = jobs_of("exc", "case int3 cpl=0,3 rules=EXC-01 about=#BP\ncase ud\n");
        let failure = CaseFailure {
            kind: FailureKind::Guest,
            message: "1 assertion failed".to_owned(),
            assertions: vec![FailedAssertion {
                location: "src/exc.rs:7".to_owned(),
                message: "saved RIP # \"next\"".to_owned(),
                expected: Some("0x11".to_owned()),
                found: Some("0x10 <&".to_owned()),
            }],
        };
        let verdicts = [
            CaseVerdict::Pass,
            CaseVerdict::Fail(failure),
            CaseVerdict::Skip("this KVM: gd: no".to_owned()),
        ];
        jobs.into_iter()
            .zip(verdicts)
            .map(|(job, verdict)| CaseResult {
                job,
                verdict,
                elapsed: Duration::from_micros(12_345),
                output: vec!["run int3 cpl=3".to_owned(), "note rip=5".to_owned()],
                stderr: Vec::new(),
            })
            .collect()
    }

    #[test]
    fn summary_counts_each_verdict() {
        let mut summary = super::Summary::default();
        three_results()
            .iter()
            .for_each(|result| summary.count(result));
        assert_eq!(summary.to_string(), "1 passed, 1 failed, 1 skipped");
    }
}
