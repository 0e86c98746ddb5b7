//! TAP, version 14 (testanything.org, "TAP 14 specification").

use std::io::{self, Write};

use crate::harness::verdict::{CaseFailure, CaseResult, CaseVerdict};

/// Writes the version and the plan.
///
/// # Errors
///
/// `out` cannot be written.
pub fn write_plan(out: &mut dyn Write, count: usize) -> io::Result<()> {
    writeln!(out, "TAP version 14\n1..{count}")
}

/// Writes test point `number`, counted from 1.
///
/// # Errors
///
/// `out` cannot be written.
pub fn write_result(out: &mut dyn Write, number: usize, result: &CaseResult) -> io::Result<()> {
    let id = escape(&result.job.id());
    match &result.verdict {
        CaseVerdict::Pass => {
            writeln!(out, "ok {number} - {id}\n  ---")?;
            writeln!(out, "  duration_ms: {}\n  ...", result.elapsed.as_millis())
        }
        CaseVerdict::Skip(reason) => writeln!(out, "ok {number} - {id} # SKIP {}", escape(reason)),
        CaseVerdict::Fail(failure) => {
            writeln!(out, "not ok {number} - {id}")?;
            write_diagnostics(out, result, failure)
        }
    }
}

/// Writes that the run ended early.
///
/// # Errors
///
/// `out` cannot be written.
pub fn write_bail_out(out: &mut dyn Write, reason: &str) -> io::Result<()> {
    writeln!(out, "Bail out! {}", escape(reason))
}

fn write_diagnostics(
    out: &mut dyn Write,
    result: &CaseResult,
    failure: &CaseFailure,
) -> io::Result<()> {
    writeln!(out, "  ---\n  message: {}", quote(&failure.message))?;
    writeln!(out, "  kind: {}", failure.kind.as_str())?;
    writeln!(out, "  duration_ms: {}", result.elapsed.as_millis())?;
    if !failure.assertions.is_empty() {
        writeln!(out, "  assertions:")?;
    }
    for assertion in &failure.assertions {
        writeln!(out, "    - message: {}", quote(&assertion.message))?;
        let fields = [
            (
                "at",
                Some(&assertion.location).filter(|location| !location.is_empty()),
            ),
            ("expected", assertion.expected.as_ref()),
            ("found", assertion.found.as_ref()),
        ];
        for (key, value) in fields {
            if let Some(value) = value {
                writeln!(out, "      {key}: {}", quote(value))?;
            }
        }
    }
    for (key, lines) in [("output", &result.output), ("stderr", &result.stderr)] {
        if !lines.is_empty() {
            writeln!(out, "  {key}:")?;
        }
        for line in lines {
            writeln!(out, "    - {}", quote(line))?;
        }
    }
    writeln!(out, "  ...")
}

/// Escapes the characters that have a meaning in TAP descriptions and reasons.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('#', "\\#")
}

/// A YAML double-quoted scalar of one printable line.
fn quote(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::report::tests::three_results;

    #[test]
    fn tap_report_has_plan_results_and_diagnostics() {
        let mut out = Vec::new();
        let results = three_results();
        write_plan(&mut out, results.len()).unwrap();
        for (index, result) in results.iter().enumerate() {
            write_result(&mut out, index + 1, result).unwrap();
        }
        write_bail_out(&mut out, "interrupted").unwrap();
        let expected = r#"TAP version 14
1..3
ok 1 - exc/int3 cpl=0
  ---
  duration_ms: 12
  ...
not ok 2 - exc/int3 cpl=3
  ---
  message: "1 assertion failed"
  kind: guest
  duration_ms: 12
  assertions:
    - message: "saved RIP # \"next\""
      at: "src/exc.rs:7"
      expected: "0x11"
      found: "0x10 <&"
  output:
    - "run int3 cpl=3"
    - "note rip=5"
  ...
ok 3 - exc/ud cpl=0 # SKIP this KVM: gd: no
Bail out! interrupted
"#;
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn tap_escapes_backslashes_hashes_and_quotes() {
        assert_eq!(escape(r"a # SKIP \x00"), r"a \# SKIP \\x00");
        assert_eq!(quote(r#"\x00 "q""#), r#""\\x00 \"q\"""#);
    }
}
