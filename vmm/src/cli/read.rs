//! Reads files that the user names, up to a limit.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use anyhow::{Context, bail};

/// Reads the whole file at `path`, of at most `limit` bytes. Errors call it `role` and its path.
///
/// # Errors
///
/// When it cannot be read, is not a file or a pipe, or is larger.
pub fn read(role: &str, path: &Path, limit: u64) -> anyhow::Result<Vec<u8>> {
    let name = path.display();
    let mut file = File::open(path).with_context(|| format!("{role} {name} cannot be opened"))?;
    let metadata = file
        .metadata()
        .with_context(|| format!("{role} {name} cannot be read"))?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        bail!("{role} {name} is a directory");
    }
    // A pipe ends; a device such as /dev/zero does not.
    if !kind.is_file() && !kind.is_fifo() {
        bail!("{role} {name} is not a file");
    }
    // One byte more than the file has, so that reading finds its end without growing the buffer.
    let expected = usize::try_from(metadata.len().min(limit)).unwrap_or(0);
    let mut bytes = Vec::with_capacity(expected + 1);
    let limited = Read::by_ref(&mut file).take(limit + 1);
    let read = { limited }.read_to_end(&mut bytes);
    read.with_context(|| format!("{role} {name} cannot be read"))?;
    if bytes.len() as u64 > limit {
        bail!("{role} {name} is larger than {limit} bytes, the most that is read");
    }
    Ok(bytes)
}

/// As [`read`], for a file of text.
///
/// # Errors
///
/// As [`read`]; also when the file is not UTF-8.
pub fn read_text(role: &str, path: &Path, limit: u64) -> anyhow::Result<String> {
    let bytes = read(role, path, limit)?;
    let text = String::from_utf8(bytes);
    text.with_context(|| format!("{role} {} is not text (UTF-8)", path.display()))
}
