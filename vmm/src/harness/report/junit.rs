//! JUnit XML: a suite for each payload, and a test case for each case and level.
//!
//! The rules that a case asserts are in its property `rules`. The runner of the cases is in the
//! property `runner` of each suite.

use std::time::Duration;

use quick_junit::{NonSuccessKind, Property, Report, SerializeError, TestCase, TestCaseStatus};
use quick_junit::{TestSuite, XmlString};

use crate::harness::report::text::failure_text;
use crate::harness::select::Shard;
use crate::harness::verdict::{CaseResult, CaseVerdict};

/// The property of a suite that names the shard, such as `3/8`.
pub const SHARD: &str = "shard";

/// The report of all results, as XML. With `shard` they are those of a shard.
///
/// # Errors
///
/// The XML cannot be written.
pub fn to_xml(
    results: &[CaseResult],
    (runner, shard): (&str, Option<Shard>),
    elapsed: Duration,
) -> Result<String, SerializeError> {
    let mut report = Report::new("hindsight");
    report.set_time(elapsed);
    for payload in results.chunk_by(|a, b| a.job.image.name == b.job.image.name) {
        let mut suite = TestSuite::new(payload[0].job.image.name.as_str());
        suite.add_property(Property::new("runner", runner));
        suite.add_properties(shard.map(shard_property));
        suite.set_time(payload.iter().map(|result| result.elapsed).sum());
        suite.add_test_cases(payload.iter().map(test_case));
        report.add_test_suite(suite);
    }
    if let (true, Some(shard)) = (results.is_empty(), shard) {
        // A shard without cases is not missing.
        let mut suite = TestSuite::new("hindsight");
        suite.add_property(shard_property(shard));
        report.add_test_suite(suite);
    }
    report.to_string()
}

fn shard_property(shard: Shard) -> Property {
    Property::new(SHARD, shard.to_string())
}

fn test_case(result: &CaseResult) -> TestCase {
    let status = match &result.verdict {
        CaseVerdict::Pass => TestCaseStatus::success(),
        CaseVerdict::Skip(reason) => {
            let mut status = TestCaseStatus::skipped();
            status.set_message(reason.as_str());
            status
        }
        CaseVerdict::Fail(failure) => {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
            status.set_message(failure.message.as_str());
            status.set_type(failure.kind.as_str());
            status.set_description(failure_text(result));
            status
        }
    };
    let mut case = TestCase::new(result.job.id(), status);
    case.set_classname(result.job.image.name.as_str());
    case.set_time(result.elapsed);
    if !result.job.rules().is_empty() {
        case.add_property(Property::new("rules", result.job.rules().join(",")));
    }
    if matches!(result.verdict, CaseVerdict::Fail(_)) {
        case.set_system_out(lines(&result.output));
        case.set_system_err(lines(&result.stderr));
    }
    case
}

fn lines(lines: &[String]) -> XmlString {
    XmlString::new(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::report::tests::three_results;

    #[test]
    fn junit_report_has_suite_cases_and_properties() {
        let xml = to_xml(
            &three_results(),
            ("kvm", "2/3".parse().ok()),
            Duration::from_secs(1),
        )
        .unwrap();
        for part in [
            r#"<testsuites name="hindsight" tests="3" skipped="1" failures="1" errors="0""#,
            r#"<testsuite name="exc" tests="3" skipped="1" errors="0" failures="1""#,
            r#"<property name="runner" value="kvm"/>"#,
            r#"<property name="shard" value="2/3"/>"#,
            r#"<testcase name="exc/int3 cpl=0" classname="exc" time="0.012">"#,
            r#"<property name="rules" value="EXC-01"/>"#,
            r#"<failure message="1 assertion failed" type="guest">"#,
            "found    0x10 &lt;&amp;",
            r#"<skipped message="this KVM: gd: no"/>"#,
            "<system-out>run int3 cpl=3\nnote rip=5</system-out>",
        ] {
            assert!(xml.contains(part), "{part} is not in {xml}");
        }
    }
}
