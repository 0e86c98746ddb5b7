//! Makes the page docs/reports/kvm-unit-tests.md of the results.

use std::fmt::Write as _;

use super::config::Expectations;
use super::{TestResult, Verdict};

const HEAD: &str = "\
# kvm-unit-tests

The suite that checks KVM and other monitors, run in the interpreter with the default profile, and
`pmu_pebs` with `icelake-server`. This page is made by

    cargo xtask kvm-unit-tests CHECKOUT...

from checkouts of kvm-unit-tests that are configured and built for x86_64 and, for the tests of 32-bit code, for i386.
The command runs each section of `x86/unittests.cfg` but those of the group `nodefault`, which can be named with
`--filter`; with that option it replaces the rows of the tests that it runs. It keeps their output in
`target/kvm-unit-tests`. `xtask/kvm-unit-tests.toml` lists the tests that ask for what the profile lacks; any other
test that does not pass makes the command fail.

";

/// Maximum number of failed assertions that a row names.
const NAMED: usize = 4;
const PASS: &str = "pass";
const TIME_LIMIT: &str = "time limit";

/// A row of the page's table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PageRow {
    name: String,
    architecture: String,
    verdict: String,
    /// The rest of the row: counts and the reason.
    rest: String,
}

impl PageRow {
    fn of(result: &TestResult, expectations: &Expectations) -> Self {
        let [passed, failed, skipped] = result.counts;
        let reason = reason(result, expectations);
        Self {
            name: result.name.clone(),
            architecture: result.architecture.clone(),
            verdict: verdict_text(result.verdict),
            rest: format!("{passed} | {failed} | {skipped} | {reason} |"),
        }
    }

    /// Parses a line of the page; `None` unless it is a row of a test.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.strip_prefix("| ")?.splitn(4, " | ");
        let mut field = || Some(fields.next()?.to_owned());
        let row = Self {
            name: field()?,
            architecture: field()?,
            verdict: field()?,
            rest: field()?,
        };
        (row.name != "test" && row.name != "---").then_some(row)
    }

    fn is_of(&self, result: &TestResult) -> bool {
        (&self.name, &self.architecture) == (&result.name, &result.architecture)
    }
}

/// Makes the page. The time limit of each test was at least `timeout` seconds.
pub fn render(results: &[TestResult], expectations: &Expectations, timeout: u64) -> String {
    let rows = results.iter().map(|r| PageRow::of(r, expectations));
    render_rows(&rows.collect::<Vec<_>>(), expectations, timeout)
}

/// Replaces the rows of the tests that ran in a page that was made before. Tests without a row are left
/// out. The time limit is named if a test of these has reached it, or none has at all.
pub fn update(
    page: &str,
    results: &[TestResult],
    expectations: &Expectations,
    timeout: u64,
) -> String {
    let mut rows: Vec<_> = page.lines().filter_map(PageRow::parse).collect();
    for row in &mut rows {
        if let Some(result) = results.iter().find(|result| row.is_of(result)) {
            *row = PageRow::of(result, expectations);
        }
    }
    let limited = results.iter().any(|r| r.verdict == Verdict::TimedOut);
    let others = rows.iter().any(|row| row.verdict == TIME_LIMIT);
    let before = page
        .split_once("need more time than ")
        .and_then(|(_, rest)| {
            let (seconds, _) = rest.split_once(" s ")?;
            seconds.parse().ok()
        });
    let timeout = if limited || !others {
        timeout
    } else {
        before.unwrap_or(timeout)
    };
    render_rows(&rows, expectations, timeout)
}

fn render_rows(rows: &[PageRow], expectations: &Expectations, timeout: u64) -> String {
    let passed = rows.iter().filter(|row| row.verdict == PASS);
    let lacking = rows
        .iter()
        .filter(|row| row.verdict != PASS && expectations.reason(&row.name).is_some());
    let (all, passed, lacking) = (rows.len(), passed.count(), lacking.count());
    let mut page = HEAD.to_owned();
    let _ = writeln!(
        page,
        "Of {all} tests {passed} pass, {lacking} ask for what the profile lacks, and {} fail \
         or need more time than {timeout} s on the host that ran them.\n",
        all - passed - lacking
    );
    page.push_str("| test | built for | result | passed | failed | skipped | reason |\n");
    page.push_str("| --- | --- | --- | ---: | ---: | ---: | --- |\n");
    for row in rows {
        let PageRow {
            name,
            architecture,
            verdict,
            rest,
        } = row;
        let _ = writeln!(page, "| {name} | {architecture} | {verdict} | {rest}");
    }
    page
}

fn verdict_text(verdict: Verdict) -> String {
    match verdict {
        Verdict::Passed => PASS.to_owned(),
        Verdict::Failed => "fail".to_owned(),
        Verdict::Skipped => "skip".to_owned(),
        Verdict::TimedOut => TIME_LIMIT.to_owned(),
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
        assert_eq!(update(&page, &[], &expectations, 60), page);
        let again = [
            result("pmu", Verdict::Passed, &[]),
            result("new", Verdict::Passed, &[]),
        ];
        let page = update(&page, &again, &expectations, 900);
        assert!(page.contains("Of 3 tests 2 pass, 1 ask for what the profile lacks, and 0 fail "));
        assert!(
            page.contains("| pmu | x86_64 | pass | 1 | 0 | 0 |  |"),
            "{page}"
        );
        assert!(page.contains("| svm | x86_64 | skip | 1 | 0 | 0 | SVM |"));
        assert!(!page.contains("| new |"), "{page}");
    }

    #[test]
    fn time_limit_of_the_page_is_that_of_the_tests_that_reached_it() {
        let expectations: Expectations =
            toml::from_str("[[lacks]]\ntests = ['svm']\nreason = 'SVM'\n").unwrap();
        let result = |name: &str, verdict| TestResult {
            name: name.to_owned(),
            architecture: "i386".to_owned(),
            verdict,
            counts: [0; 3],
            failures: Vec::new(),
            time: Duration::ZERO,
        };
        let slow = [
            result("a", Verdict::TimedOut),
            result("b", Verdict::TimedOut),
        ];
        let page = render(&slow, &expectations, 60);
        let passed = update(&page, &[result("a", Verdict::Passed)], &expectations, 900);
        assert!(passed.contains("more time than 60 s"), "{passed}");
        let limited = update(&page, &[result("a", Verdict::TimedOut)], &expectations, 900);
        assert!(limited.contains("more time than 900 s"), "{limited}");
    }
}
