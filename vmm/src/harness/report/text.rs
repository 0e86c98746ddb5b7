//! The report for people: one line a case, with the reasons under those that failed.

use std::io::{self, Write};

use crate::harness::serial::Assertion;
use crate::harness::verdict::{CaseResult, Verdict};

/// Lines of output shown under a failure.
const OUTPUT_LINES: usize = 20;

/// Writes the lines of one result.
///
/// # Errors
///
/// When `out` cannot be written.
pub fn write_result(out: &mut dyn Write, result: &CaseResult) -> io::Result<()> {
    let id = result.job.id();
    let time = result.elapsed.as_millis();
    let failure = match &result.verdict {
        Verdict::Pass => return writeln!(out, "pass {id} ({time} ms)"),
        Verdict::Skip(reason) => return writeln!(out, "skip {id}: {reason}"),
        Verdict::Fail(failure) => failure,
    };
    writeln!(out, "fail {id} ({time} ms): {}", failure.message)?;
    for assertion in &failure.assertions {
        write_assertion(out, assertion)?;
    }
    // With the assertions told, their lines and those around them say nothing new.
    let told = !failure.assertions.is_empty();
    let output: Vec<&String> = result
        .output
        .iter()
        .filter(|line| !told || !is_report_line(line))
        .collect();
    write_lines(out, "the guest's last lines", &output)?;
    let stderr: Vec<&String> = result.stderr.iter().collect();
    write_lines(out, "the VMM says", &stderr)
}

/// Whether a line of the guest belongs to the reporting of its cases.
fn is_report_line(line: &str) -> bool {
    line.is_empty()
        || ["payload ", "run ", "ok ", "fail ", "skip ", "end "]
            .iter()
            .any(|word| line.starts_with(word))
}

fn write_assertion(out: &mut dyn Write, assertion: &Assertion) -> io::Result<()> {
    match assertion.place.as_str() {
        "" => writeln!(out, "    {}", assertion.message)?,
        place => writeln!(out, "    {place}: {}", assertion.message)?,
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

/// The text of a failure as one string, for `cargo test` and JUnit.
pub fn failure_text(result: &CaseResult) -> String {
    let mut text = Vec::new();
    // Writing to a vector does not fail.
    let _ = write_result(&mut text, result);
    String::from_utf8_lossy(&text).into_owned()
}

/// One line that is overwritten again and again on a terminal.
#[derive(Debug)]
pub struct Progress {
    columns: usize,
    shown: bool,
}

impl Progress {
    /// A progress line of at most `columns` columns.
    pub fn new(columns: usize) -> Self {
        Self {
            columns,
            shown: false,
        }
    }

    /// Shows how many of `total` have ended, and which run.
    ///
    /// # Errors
    ///
    /// When `out` cannot be written.
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
        self.shown = true;
        out.flush()
    }

    /// Takes the line away, so that others can be printed.
    ///
    /// # Errors
    ///
    /// When `out` cannot be written.
    pub fn clear(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if self.shown {
            write!(out, "\r\x1b[K")?;
            self.shown = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::report::tests::three_results;

    #[test]
    fn result_lines_name_verdict_case_level_and_time() {
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
    fn only_the_last_lines_of_output_are_shown() {
        let mut fail = three_results().remove(1);
        fail.output = (0..50).map(|n| format!("line {n}")).collect();
        let text = failure_text(&fail);
        assert!(!text.contains("line 29\n"));
        assert!(text.contains("| line 30\n"));
    }

    #[test]
    fn progress_line_fits_and_is_cleared_once() {
        let mut out = Vec::new();
        let mut progress = Progress::new(12);
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
