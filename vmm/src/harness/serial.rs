//! Parses a payload's output on the serial line: its report lines, and the last lines of all.
//!
//! The guest is untrusted. A [`Transcript`] accepts any amount of output and keeps a bounded part
//! of it. Kept lines are printable: bytes that are not printable UTF-8 become `\xNN`.

use std::collections::VecDeque;

/// Longest line to keep, in bytes; the rest of the line is dropped.
const LINE_BYTES_MAX: usize = 2048;
/// Maximum number of lines to keep from the end of the output.
const TAIL_LINES_MAX: usize = 40;
/// Maximum number of bytes to keep from the end of the output.
const TAIL_BYTES_MAX: usize = 16 << 10;
/// Maximum number of bytes of report lines to parse; later report lines are ignored.
const REPORT_BYTES_MAX: usize = 16 << 10;

/// A failed assertion: `fail CASE cpl=N FILE:LINE MESSAGE expected=.. found=..`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FailedAssertion {
    /// Source file and line, `FILE:LINE`; empty if the guest did not report it.
    pub location: String,
    /// What was asserted.
    pub message: String,
    /// The expected value.
    pub expected: Option<String>,
    /// The value found.
    pub found: Option<String>,
}

/// The report lines of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestReport {
    /// `ok` lines, as (case, level).
    pub ok: Vec<(String, u8)>,
    /// `fail` lines, as (case, level, assertion).
    pub failed: Vec<(String, u8, FailedAssertion)>,
    /// `skip` lines, as (case, level, reason).
    pub skipped: Vec<(String, u8, String)>,
    /// The number of failures in the `end` line.
    pub end_failed: Option<u64>,
    bytes: usize,
}

/// Collects the output of a child: report lines, and the last lines of all.
#[derive(Debug, Default)]
pub struct Transcript {
    line: Vec<u8>,
    /// Bytes dropped from the line.
    cut: u64,
    tail: VecDeque<String>,
    tail_bytes: usize,
    lines_dropped: u64,
    report: GuestReport,
}

impl Transcript {
    /// Adds the next bytes of the output.
    pub fn push(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            let (text, ends) = match piece.split_last() {
                Some((b'\n', text)) => (text, true),
                _ => (piece, false),
            };
            let capacity = LINE_BYTES_MAX - self.line.len();
            let (fitting, cut) = text.split_at(text.len().min(capacity));
            self.line.extend_from_slice(fitting);
            self.cut += cut.len() as u64;
            if ends {
                self.end_line();
            }
        }
    }

    /// Ends the output. A last line without a newline counts as a line.
    pub fn finish(&mut self) {
        if !self.line.is_empty() {
            self.end_line();
        }
    }

    /// The report lines so far.
    pub fn report(&self) -> &GuestReport {
        &self.report
    }

    /// The last lines, oldest first, each printable.
    pub fn tail(&self) -> Vec<String> {
        let mut lines = Vec::with_capacity(self.tail.len() + 1);
        if self.lines_dropped > 0 {
            lines.push(format!("[{} earlier lines not shown]", self.lines_dropped));
        }
        lines.extend(self.tail.iter().cloned());
        lines
    }

    fn end_line(&mut self) {
        let end = self
            .line
            .iter()
            .rposition(|b| *b != b'\r')
            .map_or(0, |last| last + 1);
        let mut text = escape(&self.line[..end]);
        self.line.clear();
        if self.cut > 0 {
            text.push_str(&format!(" [{} more bytes]", self.cut));
            self.cut = 0;
        }
        self.report.add_line(&text);
        self.tail_bytes += text.len();
        self.tail.push_back(text);
        while self.tail.len() > TAIL_LINES_MAX || self.tail_bytes > TAIL_BYTES_MAX {
            let Some(oldest) = self.tail.pop_front() else {
                break;
            };
            self.tail_bytes -= oldest.len();
            self.lines_dropped += 1;
        }
    }
}

impl GuestReport {
    /// Adds a line if it is a report line.
    fn add_line(&mut self, line: &str) {
        if let Some(counts) = line.strip_prefix("end ") {
            let failed = counts
                .split(' ')
                .find_map(|field| field.strip_prefix("failed="));
            self.end_failed = failed.and_then(|n| n.parse().ok());
            return;
        }
        let Some((word, rest)) = line.split_once(' ') else {
            return;
        };
        let Some((case, cpl, rest)) = parse_subject(rest) else {
            return;
        };
        if self.bytes + line.len() > REPORT_BYTES_MAX {
            return;
        }
        match word {
            "ok" => self.ok.push((case, cpl)),
            "fail" => self.failed.push((case, cpl, parse_assertion(rest))),
            "skip" => self.skipped.push((case, cpl, rest.to_owned())),
            _ => return,
        }
        self.bytes += line.len();
    }
}

/// Parses `CASE cpl=N REST`.
fn parse_subject(text: &str) -> Option<(String, u8, &str)> {
    let (case, rest) = text.split_once(' ')?;
    let (cpl, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    let cpl = cpl.strip_prefix("cpl=")?.parse().ok()?;
    Some((case.to_owned(), cpl, rest.trim()))
}

/// Parses `FILE:LINE MESSAGE expected=.. found=..`. The values may contain spaces.
fn parse_assertion(text: &str) -> FailedAssertion {
    let (location, rest) = match text.split_once(' ') {
        Some((first, rest)) if is_location(first) => (first, rest),
        None if is_location(text) => (text, ""),
        _ => ("", text),
    };
    let (rest, found) = split_value(rest, "found=");
    let (message, expected) = split_value(rest, "expected=");
    FailedAssertion {
        location: location.to_owned(),
        message: message.trim().to_owned(),
        expected: expected.map(str::to_owned),
        found: found.map(str::to_owned),
    }
}

fn is_location(word: &str) -> bool {
    let line = word
        .rsplit_once(':')
        .filter(|(file, _)| !file.is_empty())
        .map(|(_, line)| line);
    line.is_some_and(|line| !line.is_empty() && line.bytes().all(|b| b.is_ascii_digit()))
}

/// Splits `text key=value` at the last `key`.
fn split_value<'a>(text: &'a str, key: &str) -> (&'a str, Option<&'a str>) {
    match text.rfind(key) {
        Some(at) if at == 0 || text.as_bytes()[at - 1] == b' ' => {
            (&text[..at], Some(text[at + key.len()..].trim()))
        }
        _ => (text, None),
    }
}

/// Makes bytes printable: tabs become spaces, other bytes that are not printable UTF-8 `\xNN`.
pub fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\t' => text.push(' '),
                c if is_printable(c) => text.push(c),
                c => {
                    let mut buffer = [0; 4];
                    for byte in c.encode_utf8(&mut buffer).bytes() {
                        text.push_str(&format!("\\x{byte:02x}"));
                    }
                }
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// Whether `c` is neither a control character nor one that reorders or hides text.
fn is_printable(c: char) -> bool {
    let hides_text = matches!(
        c,
        '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
    );
    !c.is_control() && !hides_text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transcript(bytes: &[u8]) -> Transcript {
        let mut transcript = Transcript::default();
        transcript.push(bytes);
        transcript.finish();
        transcript
    }

    #[test]
    fn report_lines_are_parsed_among_other_output() {
        let t = transcript(
            b"payload demo\r\nrun a cpl=0\r\nhello\r\nok a cpl=0\r\nskip b cpl=3 no such thing\r\n\
              end passed=1 failed=0 skipped=1\r\n",
        );
        assert_eq!(t.report().ok, [("a".to_owned(), 0)]);
        assert_eq!(
            t.report().skipped,
            [("b".to_owned(), 3, "no such thing".to_owned())]
        );
        assert_eq!(t.report().end_failed, Some(0));
        assert_eq!(t.tail().len(), 6);
        assert_eq!(t.tail()[2], "hello");
    }

    #[test]
    fn fail_line_is_parsed_into_location_message_and_values() {
        let t = transcript(
            b"fail x/y cpl=3 src/bin/x.rs:42 DR6 after INT3 expected=0xf0 | BS found=Some(0x0 1)",
        );
        let (case, cpl, assertion) = &t.report().failed[0];
        assert_eq!((case.as_str(), *cpl), ("x/y", 3));
        assert_eq!(assertion.location, "src/bin/x.rs:42");
        assert_eq!(assertion.message, "DR6 after INT3");
        assert_eq!(assertion.expected.as_deref(), Some("0xf0 | BS"));
        assert_eq!(assertion.found.as_deref(), Some("Some(0x0 1)"));
    }

    #[test]
    fn fail_line_without_location_or_values_is_a_message() {
        let t = transcript(b"fail a cpl=0 panicked: no place\nfail a cpl=0\nfail a cpl=0 f.rs:1\n");
        let failed = &t.report().failed;
        assert_eq!(failed[0].2.message, "panicked: no place");
        assert_eq!(failed[0].2.expected, None);
        assert_eq!(failed[1].2, FailedAssertion::default());
        assert_eq!(failed[2].2.location, "f.rs:1");
    }

    #[test]
    fn lines_split_between_reads_are_joined() {
        let mut t = Transcript::default();
        for byte in b"ok a cpl=3\nok b cpl=0" {
            t.push(&[*byte]);
        }
        t.finish();
        assert_eq!(t.report().ok, [("a".to_owned(), 3), ("b".to_owned(), 0)]);
    }

    #[test]
    fn transcript_of_endless_output_is_bounded() {
        let mut t = Transcript::default();
        for _ in 0..1000 {
            t.push(&[b'x'; 10_000]);
        }
        assert!(t.line.capacity() <= 2 * LINE_BYTES_MAX);
        for n in 0..100_000 {
            t.push(format!("\nfail a cpl=0 f.rs:1 {n}").as_bytes());
        }
        t.finish();
        assert!((100..1000).contains(&t.report().failed.len()));
        assert_eq!(t.tail().len(), TAIL_LINES_MAX + 1);
        assert_eq!(t.tail()[0], "[99961 earlier lines not shown]");
    }

    #[test]
    fn transcript_of_long_binary_lines_is_bounded() {
        let mut t = Transcript::default();
        for _ in 0..100 {
            t.push(&[0; LINE_BYTES_MAX]);
            t.push(b"\n");
        }
        let bytes: usize = t.tail().iter().map(String::len).sum();
        assert!((1..=TAIL_BYTES_MAX + 100).contains(&bytes), "{bytes}");
    }

    #[test]
    fn truncated_line_ends_with_the_number_of_dropped_bytes() {
        let t = transcript(&[b'y'; LINE_BYTES_MAX + 5]);
        assert!(t.tail()[0].ends_with("y [5 more bytes]"));
    }

    #[test]
    fn binary_output_is_escaped() {
        assert_eq!(
            escape(b"a\x00\x1b[2J\xff\tb \xc3\xa9"),
            "a\\x00\\x1b[2J\\xff b \u{e9}"
        );
        assert_eq!(
            escape("\u{202e}x\u{85}".as_bytes()),
            "\\xe2\\x80\\xaex\\xc2\\x85"
        );
    }
}
