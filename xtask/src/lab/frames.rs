//! Decodes the frames in which a lab sends the files of /out to the host.
//!
//! ci/guest/lab-init writes them to the kernel's log:
//!
//! ```text
//! hindsight-lab-frame LENGTH SHA256
//! hindsight-lab-data BASE64
//! hindsight-lab-frame-end
//! ```
//!
//! The result is the last frame that is complete and whose hash is correct.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

/// The line that the lab's init prints last.
pub const DONE: &str = "hindsight-lab-done";

/// Returns the contents of the last complete frame: a compressed tar archive.
pub fn last_frame(result: &[u8]) -> Option<Vec<u8>> {
    let text: String = String::from_utf8_lossy(result)
        .chars()
        .filter(|c| *c != '\r' && *c != '\0')
        .collect();
    let lines: Vec<&str> = text.lines().filter_map(frame_line).collect();
    let begins = lines
        .iter()
        .enumerate()
        .filter(|(_, line)| line.starts_with("frame "));
    let begins: Vec<usize> = begins.map(|(number, _)| number).collect();
    begins
        .iter()
        .rev()
        .find_map(|begin| decode(&lines[*begin..]))
}

/// Returns the part of a line after "hindsight-lab-", which may follow the kernel's time stamp.
fn frame_line(line: &str) -> Option<&str> {
    let line = match line.strip_prefix('[') {
        Some(rest) => rest.split_once("] ")?.1,
        None => line,
    };
    line.strip_prefix("hindsight-lab-")
}

/// Decodes the frame that begins with the first of `lines`; `None` if it is damaged.
fn decode(lines: &[&str]) -> Option<Vec<u8>> {
    let mut head = lines.first()?.split_whitespace().skip(1);
    let length: usize = head.next()?.parse().ok()?;
    let hash = head.next()?;
    let mut encoded = String::new();
    for line in &lines[1..] {
        if line.starts_with("frame-end") {
            let data = STANDARD.decode(encoded).ok()?;
            let found: String = Sha256::digest(&data)
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            return (data.len() == length && found == hash).then_some(data);
        }
        encoded.push_str(line.strip_prefix("data ")?);
    }
    None
}

/// Returns the output of the kernel, then of the console, as plain text without frames.
pub fn plain_console(result: &[u8], console: &[u8]) -> String {
    let result = String::from_utf8_lossy(result).into_owned();
    let kernel = result
        .lines()
        .filter(|line| !line.contains("hindsight-lab-"));
    let text: String = kernel.map(|line| format!("{line}\n")).collect();
    without_sequences(&(text + &String::from_utf8_lossy(console)))
}

/// Returns the text without carriage returns, NULs and the escape sequences of terminals.
fn without_sequences(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' && chars.peek() == Some(&'[') {
            chars.next();
            while chars.next_if(|c| c.is_ascii_digit() || *c == ';').is_some() {}
            chars.next_if(char::is_ascii_alphabetic);
        } else if c != '\r' && c != '\0' {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(data: &[u8], hash: &[u8]) -> String {
        let hash: String = Sha256::digest(hash)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        let encoded = STANDARD.encode(data);
        let (first, second) = encoded.split_at(4);
        format!(
            "[    1.5] hindsight-lab-frame {} {hash}\r\n[ 2.0] hindsight-lab-data {first}\r\n\
             [ 2.0] noise\r\nhindsight-lab-data {second}\r\nhindsight-lab-frame-end\r\n",
            data.len()
        )
    }

    #[test]
    fn last_frame_is_decoded() {
        let text = frame(b"first", b"first") + &frame(b"second", b"second");
        assert_eq!(last_frame(text.as_bytes()).unwrap(), b"second");
    }

    #[test]
    fn damaged_frame_is_passed_over() {
        let text = frame(b"first", b"first") + &frame(b"second", b"other");
        assert_eq!(last_frame(text.as_bytes()).unwrap(), b"first");
    }

    #[test]
    fn frame_without_end_is_passed_over() {
        let text = frame(b"first", b"first");
        let text = text.trim_end().trim_end_matches("hindsight-lab-frame-end");
        assert_eq!(last_frame(text.as_bytes()), None);
    }

    #[test]
    fn console_follows_kernel_without_sequences() {
        let console = plain_console(
            b"kernel\r\nhindsight-lab-data x\n",
            b"\x1b[1;31mlab\x1b[0m\r\n",
        );
        assert_eq!(console, "kernel\nlab\n");
    }
}
