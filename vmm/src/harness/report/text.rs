//! The text report: one line for each case, followed by the details of a failure.

use std::io::{self, Write};

use crate::harness::serial::FailedAssertion;
use crate::harness::verdict::{CaseResult, CaseVerdict};

/// Maximum number of lines of output after a failure.
const OUTPUT_LINES: usize = 20;

/// Writes the lines of one result.
///
/// # Errors
///
/// `out` cannot be written.
pub fn write_result(out: &mut dyn Write, result: &CaseResult) -> io::Result<()> {
    let id = result.job.id();
    let time = result.elapsed.as_millis();
    let failure = match &result.verdict {
        CaseVerdict::Pass => return writeln!(out, "pass {id} ({time} ms)"),
        CaseVerdict::Skip(reason) => return writeln!(out, "skip {id}: {reason}"),
        CaseVerdict::Fail(failure) => failure,
    };
    writeln!(out, "fail {id} ({time} ms): {}", failure.message)?;
    for assertion in &failure.assertions {
        write_assertion(out, assertion)?;
    }
    // After the assertions, the report lines of the guest would only repeat them.
    let has_assertions = !failure.assertions.is_empty();
    let output: Vec<&String> = result
        .output
        .iter()
        .filter(|line| !has_assertions || !is_report_line(line))
        .collect();
    write_lines(out, "the guest's last lines", &output)?;
    let stderr: Vec<&String> = result.stderr.iter().collect();
    write_lines(out, "the VMM's last lines", &stderr)
}

/// Whether a line of the guest belongs to its report.
fn is_report_line(line: &str) -> bool {
    line.is_empty()
        || ["payload ", "run ", "ok ", "fail ", "skip ", "end "]
            .iter()
            .any(|word| line.starts_with(word))
}

fn write_assertion(out: &mut dyn Write, assertion: &FailedAssertion) -> io::Result<()> {
    match assertion.location.as_str() {
        "" => writeln!(out, "    {}", assertion.message)?,
        location => writeln!(out, "    {location}: {}", assertion.message)?,
    }
    if let Some(expected) = &assertion.expected {
        writeln!(out, "        expected {expected}")?;
    }
    if let Some(found) = &assertion.found {
        writeln!(out, "        found    {found}")?;
    }
    Ok(())
}

fn write_lines(out: &mut dyn Write, title: &str, lines: &[&String]) -> io::Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(out, "    {title}:")?;
    for line in &lines[lines.len().saturating_sub(OUTPUT_LINES)..] {
        writeln!(out, "    | {line}")?;
    }
    Ok(())
}

/// The text of a result, for `cargo test` and JUnit.
pub fn failure_text(result: &CaseResult) -> String {
    let mut text = Vec::new();
    // Writing to a vector does not fail.
    let _ = write_result(&mut text, result);
    String::from_utf8_lossy(&text).into_owned()
}

/// A progress line on a terminal, which is overwritten at each update.
#[derive(Debug)]
pub struct ProgressLine {
    columns: usize,
    visible: bool,
}

impl ProgressLine {
    /// A progress line of at most `columns` columns.
    pub fn new(columns: usize) -> Self {
        Self {
            columns,
            visible: false,
        }
    }

    /// Shows how many of `total` jobs have ended, and which are running.
    ///
    /// # Errors
    ///
    /// `out` cannot be written.
    pub fn show(
        &mut self,
        out: &mut dyn Write,
        ended: usize,
        total: usize,
        running: &[String],
    ) -> io::Result<()> {
        let line = format!("[{ended}/{total}] {}", running.join(", "));
        let end = line
            .char_indices()
            .nth(self.columns)
            .map_or(line.len(), |(at, _)| at);
        write!(out, "\r\x1b[K{}", &line[..end])?;
        self.visible = true;
        out.flush()
    }

    /// Clears the line, so that other lines can be printed.
    ///
    /// # Errors
    ///
    /// `out` cannot be written.
    pub fn clear(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if self.visible {
            write!(out, "\r\x1b[K")?;
            self.visible = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::report::tests::three_results;

    #[test]
    fn result_line_has_verdict_case_level_and_time() {
        let [pass, fail, skip] = three_results().try_into().unwrap();
        assert_eq!(failure_text(&pass), "pass exc/int3 cpl=0 (12 ms)\n");
        assert_eq!(failure_text(&skip), "skip exc/ud cpl=0: this KVM: gd: no\n");
        let expected = "\
fail exc/int3 cpl=3 (12 ms): 1 assertion failed
    src/exc.rs:7: saved RIP # \"next\"
        expected 0x11
        found    0x10 <&
    the guest's last lines:
    | note rip=5
";
        assert_eq!(failure_text(&fail), expected);
    }

    #[test]
    fn failure_shows_only_the_last_lines_of_output() {
        let mut fail = three_results().remove(1);
        fail.output = (0..50).map(|n| format!("line {n}")).collect();
        let text = failure_text(&fail);
        assert!(!text.contains("line 29\n"));
        assert!(text.contains("| line 30\n"));
    }

    #[test]
    fn progress_line_fits_the_terminal_and_is_cleared_once() {
        let mut out = Vec::new();
        let mut progress = ProgressLine::new(12);
        progress
            .show(
                &mut out,
                3,
                40,
                &["\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}".to_owned()],
            )
            .unwrap();
        progress.clear(&mut out).unwrap();
        progress.clear(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "\r\x1b[K[3/40] \u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\r\x1b[K"
        );
    }
}
