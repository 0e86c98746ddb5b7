//! Joins JUnit reports of shards.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, bail};
use quick_junit::{Report, TestCase, TestCaseStatus, TestSuite};

use super::merged::MergedReport;
use crate::harness::report::junit::SHARD;

/// Cases that ran more than once with different results that are named.
const NAMED_MAX: usize = 10;

/// How bad a result is. A case that ran twice has the worse one.
const fn severity(case: &TestCase) -> u8 {
    match &case.status {
        TestCaseStatus::NonSuccess { .. } => 2,
        TestCaseStatus::Success { .. } => 1,
        TestCaseStatus::Skipped { .. } => 0,
    }
}

/// Orders the results of a case: the greatest one counts, whatever the order of the files.
fn compare(a: &TestCase, b: &TestCase) -> Ordering {
    let rank = |case: &TestCase| (severity(case), Reverse(case.time));
    let contents = |case: &TestCase| format!("{case:?}");
    rank(a)
        .cmp(&rank(b))
        .then_with(|| contents(a).cmp(&contents(b)))
}

/// The sum of durations, which a report may choose freely.
fn sum(times: impl Iterator<Item = Duration>) -> Duration {
    times.fold(Duration::ZERO, Duration::saturating_add)
}

/// The results of a suite in all shards.
#[derive(Debug, Default)]
struct SuiteResults {
    properties: BTreeSet<(String, String)>,
    cases: BTreeMap<String, TestCase>,
}

/// The results of all shards.
#[derive(Debug, Default)]
struct Results {
    /// Suites by name.
    suites: BTreeMap<String, SuiteResults>,
    shards: BTreeSet<usize>,
    /// Number of shards, if the reports are of shards.
    count: Option<usize>,
    /// Cases whose results differ.
    unstable: BTreeSet<String>,
    repeated: usize,
}

impl Results {
    fn add(&mut self, file: &str, report: Report) -> anyhow::Result<()> {
        for suite in report.test_suites {
            let shards = suite.properties.iter().filter(|p| p.name.as_str() == SHARD);
            for shard in shards.map(|property| property.value.to_string()) {
                self.add_shard(file, &shard)?;
            }
            let name = suite.name.to_string();
            let SuiteResults {
                properties,
                cases: own,
            } = self.suites.entry(name).or_default();
            let others = suite.properties.into_iter();
            let others = others.filter(|p| p.name.as_str() != SHARD);
            properties.extend(others.map(|p| (p.name.to_string(), p.value.to_string())));
            for case in suite.test_cases {
                let name = case.name.to_string();
                let Some(old) = own.get(&name) else {
                    own.insert(name, case);
                    continue;
                };
                self.repeated += 1;
                if severity(old) != severity(&case) {
                    self.unstable.insert(name.clone());
                }
                if compare(&case, old).is_gt() {
                    own.insert(name, case);
                }
            }
        }
        Ok(())
    }

    fn add_shard(&mut self, file: &str, shard: &str) -> anyhow::Result<()> {
        let parsed = shard.split_once('/');
        let parsed = parsed.and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        let Some((index, count)) = parsed.filter(|(i, n)| (1..=*n).contains(i)) else {
            bail!("{file}: {shard:?} is not a shard");
        };
        if self.count.is_some_and(|own: usize| own != count) {
            bail!("{file} is shard {shard}, but other files are of another number of shards");
        }
        self.count = Some(count);
        self.shards.insert(index);
        Ok(())
    }

    fn missing(&self) -> Vec<String> {
        let all = 1..=self.count.unwrap_or(0);
        let missing = all.filter(|index| !self.shards.contains(index));
        missing.take(1000).map(|index| index.to_string()).collect()
    }

    fn into_report(self) -> Report {
        let mut report = Report::new("hindsight");
        for (name, SuiteResults { properties, cases }) in self.suites {
            let mut suite = TestSuite::new(name);
            suite.add_properties(properties.iter().map(|(name, value)| (&**name, &**value)));
            suite.set_time(sum(cases.values().filter_map(|case| case.time)));
            suite.add_test_cases(cases.into_values());
            report.add_test_suite(suite);
        }
        let times = report.test_suites.iter().filter_map(|suite| suite.time);
        let total = sum(times);
        report.set_time(total);
        report
    }
}

/// Joins reports, each with the name of its file.
pub(super) fn merge(files: &[(String, String)]) -> anyhow::Result<MergedReport> {
    let mut results = Results::default();
    for (name, text) in files {
        let report = Report::deserialize_from_str(text);
        results.add(
            name,
            report.with_context(|| format!("{name} is not a JUnit report"))?,
        )?;
    }
    let mut remarks = Vec::new();
    let missing = results.missing();
    if let (false, Some(count)) = (missing.is_empty(), results.count) {
        remarks.push(format!("missing shards of {count}: {}", missing.join(", ")));
    }
    if results.repeated != 0 {
        remarks.push(format!(
            "{} results are of cases that ran before",
            results.repeated
        ));
    }
    for name in results.unstable.iter().take(NAMED_MAX) {
        remarks.push(format!("{name}: its results differ; the worse one counts"));
    }
    let report = results.into_report();
    let cases = report
        .test_suites
        .iter()
        .flat_map(|suite| &suite.test_cases);
    let mut counts = [0_usize; 3];
    for case in cases {
        counts[usize::from(severity(case))] += 1;
    }
    let [skipped, passed, failed] = counts;
    remarks.push(format!(
        "{passed} passed, {failed} failed, {skipped} skipped"
    ));
    Ok(MergedReport {
        text: report.to_string()?,
        remarks,
        passed: missing.is_empty() && failed == 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(shard: &str, cases: &[(&str, &str)]) -> (String, String) {
        let cases: String = cases
            .iter()
            .map(|(name, inner)| {
                format!("<testcase name=\"{name}\" time=\"0.5\">{inner}</testcase>")
            })
            .collect();
        let (failures, count) = (
            cases.matches("<failure").count(),
            cases.matches("<testcase").count(),
        );
        let text = format!(
            "<?xml version=\"1.0\"?><testsuites name=\"hindsight\" tests=\"{count}\" failures=\"{failures}\" \
             errors=\"0\"><testsuite name=\"p\" tests=\"{count}\" errors=\"0\" \
             failures=\"{failures}\"><properties><property name=\"shard\" value=\"{shard}\"/>\
             </properties>{cases}</testsuite></testsuites>"
        );
        (format!("{shard}.xml"), text)
    }

    const FAILURE: &str = "<failure message=\"m\" type=\"guest\"/>";

    #[test]
    fn order_of_files_does_not_matter() {
        let mut files = [
            shard("1/3", &[("a", ""), ("d", FAILURE)]),
            shard("2/3", &[("b", "")]),
            shard("3/3", &[("c", "")]),
            shard("2/3", &[("b", "")]),
        ];
        let first = merge(&files).unwrap();
        files.reverse();
        let second = merge(&files).unwrap();
        assert_eq!(first.text, second.text);
        assert_eq!(first.remarks, second.remarks);
        assert_eq!(
            first.remarks.last().unwrap(),
            "3 passed, 1 failed, 0 skipped"
        );
        assert!(!first.passed && !first.text.contains("shard"));
    }

    #[test]
    fn results_of_equal_severity_do_not_depend_on_the_order_of_files() {
        let failure = |message: &str| format!("<failure message=\"{message}\" type=\"guest\"/>");
        let (one, two) = (failure("one"), failure("two"));
        let mut files = [
            shard("1/2", &[("a", &one)]),
            shard("1/2", &[("a", &two)]),
            shard("2/2", &[("b", "")]),
        ];
        for (file, engine) in files.iter_mut().zip(["interp", "kvm", "interp"]) {
            let property = format!("<properties><property name=\"e\" value=\"{engine}\"/>");
            file.1 = file.1.replace("<properties>", &property);
        }
        let first = merge(&files).unwrap();
        files.reverse();
        assert_eq!(first.text, merge(&files).unwrap().text);
        assert!(first.text.contains("value=\"kvm\"") && first.text.contains("\"two\""));
    }

    #[test]
    fn times_that_overflow_are_the_longest_time() {
        let mut file = shard("1/1", &[("a", ""), ("b", "")]);
        file.1 = file.1.replace("time=\"0.5\"", "time=\"1e19\"");
        assert!(merge(&[file]).unwrap().passed);
    }

    #[test]
    fn missing_shards_are_named() {
        let merged = merge(&[shard("2/4", &[("b", "")]), shard("3/4", &[])]).unwrap();
        assert_eq!(merged.remarks[0], "missing shards of 4: 1, 4");
        assert!(!merged.passed);
        let whole = merge(&[shard("1/1", &[("b", "")])]).unwrap();
        assert!(whole.passed);
    }

    #[test]
    fn failure_of_a_repeated_case_counts() {
        let files = [shard("1/1", &[("a", "")]), shard("1/1", &[("a", FAILURE)])];
        let merged = merge(&files).unwrap();
        assert!(!merged.passed);
        assert!(
            merged
                .remarks
                .iter()
                .any(|text| text.starts_with("a: its results differ"))
        );
    }

    #[test]
    fn impossible_shards_are_refused() {
        for name in ["0/2", "3/2", "x", "1/"] {
            assert!(merge(&[shard(name, &[])]).is_err(), "{name}");
        }
        assert!(merge(&[shard("1/2", &[]), shard("1/3", &[])]).is_err());
        assert!(merge(&[("a".to_owned(), "<testsuites".to_owned())]).is_err());
    }
}
