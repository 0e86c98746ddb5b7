//! Reads files that the user names, up to a limit.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Reads the whole file at `path`, of at most `limit` bytes. Errors call it `role` and its path.
///
/// # Errors
///
/// When it cannot be read, is not a file or a pipe, or is larger.
pub fn read(role: &str, path: &Path, limit: u64) -> anyhow::Result<Vec<u8>> {
    read_until(role, path, limit, None)
}

/// As [`read`], but waits for the writers of a pipe no longer than until `deadline`.
///
/// # Errors
///
/// As [`read`]; also when the deadline passes.
pub fn read_until(
    role: &str,
    path: &Path,
    limit: u64,
    deadline: Option<Instant>,
) -> anyhow::Result<Vec<u8>> {
    let name = path.display();
    let mut options = OpenOptions::new();
    // Without blocking: the pipe may not have a writer yet.
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let mut file = file.with_context(|| format!("{role} {name} cannot be opened"))?;
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
    let read = if kind.is_fifo() {
        let pipe = PipeReader { file, deadline };
        pipe.take(limit + 1).read_to_end(&mut bytes)
    } else {
        let limited = Read::by_ref(&mut file).take(limit + 1);
        { limited }.read_to_end(&mut bytes)
    };
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

/// Reads a named pipe that was opened without blocking.
struct PipeReader {
    file: File,
    deadline: Option<Instant>,
}

impl PipeReader {
    /// Waits until there is something to read, or until all writers have closed the pipe.
    fn wait(&self) -> io::Result<()> {
        let left = self.deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec::try_from(left).unwrap_or(Timespec {
                tv_sec: i64::MAX,
                tv_nsec: 0,
            })
        });
        let mut fds = [PollFd::from_borrowed_fd(self.file.as_fd(), PollFlags::IN)];
        match poll(&mut fds, left.as_ref()) {
            Ok(0) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the time limit passed before its writer closed it",
            )),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Read for PipeReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.wait()?;
            match self.file.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }
}

/// The time when a limit that begins now has passed; `None` if there is none, or it is too far.
pub fn deadline(limit: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(limit?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn pipe_is_read_to_its_end_or_to_the_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let soon = deadline(Some(Duration::from_millis(50)));
        let error = read_until("image", &path, 100, soon).unwrap_err();
        assert!(format!("{error:#}").contains("time limit"), "{error:#}");
        let writer = std::thread::spawn({
            let path = path.clone();
            move || {
                let mut pipe = OpenOptions::new().write(true).open(path).unwrap();
                pipe.write_all(b"first").unwrap();
                std::thread::sleep(Duration::from_millis(30));
                pipe.write_all(b" second").unwrap();
            }
        });
        assert_eq!(read("image", &path, 100).unwrap(), b"first second");
        writer.join().unwrap();
    }
}
