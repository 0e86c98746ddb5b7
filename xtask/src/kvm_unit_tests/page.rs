//! Makes the page docs/reports/kvm-unit-tests.md of the results.

use std::fmt::Write as _;

use super::config::Expectations;
use super::{TestResult, Verdict};

const HEAD: &str = "\
# kvm-unit-tests

The suite that checks KVM and other monitors, run in the interpreter with the default profile. This page is made by

    cargo xtask kvm-unit-tests CHECKOUT...

from checkouts of kvm-unit-tests that are configured and built for x86_64 and, for the tests of 32-bit code, for i386.
The command runs each section of `x86/unittests.cfg` but those of the group `nodefault`, which can be named with
`--filter`. It keeps their output in `target/kvm-unit-tests`. `xtask/kvm-unit-tests.toml` lists the tests that ask for
what the profile lacks; any other test that does not pass makes the command fail.

";

/// Maximum number of failed assertions that a row names.
const NAMED: usize = 4;

/// Makes the page. The time limit of each test was at least `timeout` seconds.
pub fn render(results: &[TestResult], expectations: &Expectations, timeout: u64) -> String {
    let passed = results.iter().filter(|r| r.verdict == Verdict::Passed);
    let lacking = results
        .iter()
        .filter(|r| r.verdict != Verdict::Passed && expectations.reason(&r.name).is_some());
    let (all, passed, lacking) = (results.len(), passed.count(), lacking.count());
    let mut page = HEAD.to_owned();
    let _ = writeln!(
        page,
        "Of {all} tests {passed} pass, {lacking} ask for what the profile lacks, and {} fail \
         or need more time than {timeout} s on the host that ran them.\n",
        all - passed - lacking
    );
    page.push_str("| test | built for | result | passed | failed | skipped | reason |\n");
    page.push_str("| --- | --- | --- | ---: | ---: | ---: | --- |\n");
    for result in results {
        let [passed, failed, skipped] = result.counts;
        let _ = writeln!(
            page,
            "| {} | {} | {} | {passed} | {failed} | {skipped} | {} |",
            result.name,
            result.architecture,
            verdict_text(result.verdict),
            reason(result, expectations),
        );
    }
    page
}

fn verdict_text(verdict: Verdict) -> String {
    match verdict {
        Verdict::Passed => "pass".to_owned(),
        Verdict::Failed => "fail".to_owned(),
        Verdict::Skipped => "skip".to_owned(),
        Verdict::TimedOut => "time limit".to_owned(),
        Verdict::Crashed => "exception".to_owned(),
        Verdict::Other(status) => format!("status {status}"),
    }
}

fn reason(result: &TestResult, expectations: &Expectations) -> String {
    if result.verdict == Verdict::Passed {
        return String::new();
    }
    if let Some(reason) = expectations.reason(&result.name) {
        return reason.to_owned();
    }
    let named = result.failures.iter().take(NAMED);
    let mut text = named.map(|name| name.replace('|', "/")).collect::<Vec<_>>();
    if result.failures.len() > NAMED {
        text.push(format!("and {} more", result.failures.len() - NAMED));
    }
    text.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn page_counts_and_explains_what_does_not_pass() {
        let expectations: Expectations =
            toml::from_str("[[lacks]]\ntests = ['svm']\nreason = 'SVM'\n").unwrap();
        let result = |name: &str, verdict, failures: &[&str]| TestResult {
            name: name.to_owned(),
            architecture: "x86_64".to_owned(),
            verdict,
            counts: [1, failures.len(), 0],
            failures: failures.iter().map(ToString::to_string).collect(),
            time: Duration::ZERO,
        };
        let results = [
            result("tsc", Verdict::Passed, &[]),
            result("svm", Verdict::Skipped, &[]),
            result("pmu", Verdict::Failed, &["a | b"]),
        ];
        let page = render(&results, &expectations, 60);
        assert!(page.contains("Of 3 tests 1 pass, 1 ask for what the profile lacks, and 1 fail "));
        assert!(page.contains("| svm | x86_64 | skip | 1 | 0 | 0 | SVM |"));
        assert!(page.contains("| pmu | x86_64 | fail | 1 | 1 | 0 | a / b |"));
    }
}
