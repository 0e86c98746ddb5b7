//! The outputs of a run: one limit for the bytes of all of them, and the first write that fails.
//!
//! Output that cannot be written ends the run: nothing is lost without an error. A reader that
//! closes its end of a pipe or a socket is no failure, since nobody misses that output.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

use crate::sync::lock;

/// Why an output ended before its run.
#[derive(Clone, Debug, Error)]
pub enum OutputError {
    /// The host refused a write: its disk is full, or the file has reached its greatest size.
    #[error("{output} cannot be written")]
    Write {
        /// The option that names the output.
        output: String,
        /// The error of the system.
        #[source]
        source: Arc<io::Error>,
    },
    /// All outputs together have reached their limit.
    #[error("{output} has reached the limit of --max-output: {limit} bytes are written")]
    Limit {
        /// The option that names the output which was to be written.
        output: String,
        /// The limit, in bytes.
        limit: u64,
    },
}

/// Called once, for the first failure.
type OnFailure = Box<dyn FnOnce(OutputError) + Send>;

#[derive(Default)]
struct Failures {
    first: Option<OutputError>,
    callback: Option<OnFailure>,
}

/// What the outputs of a run share. Clones share it too.
#[derive(Clone)]
pub struct RunOutputs(Arc<SharedOutputs>);

struct SharedOutputs {
    /// Maximum number of bytes of all outputs; `None` is no limit.
    limit: Option<u64>,
    /// Bytes that may still be written, if there is a limit.
    left: AtomicU64,
    failures: Mutex<Failures>,
}

impl Default for RunOutputs {
    fn default() -> Self {
        Self::new(None)
    }
}

impl fmt::Debug for RunOutputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunOutputs")
            .field("limit", &self.0.limit)
            .field("left", &self.0.left)
            .finish_non_exhaustive()
    }
}

impl RunOutputs {
    /// Outputs that may have `limit` bytes together.
    pub fn new(limit: Option<u64>) -> Self {
        Self(Arc::new(SharedOutputs {
            limit,
            left: AtomicU64::new(limit.unwrap_or(u64::MAX)),
            failures: Mutex::default(),
        }))
    }

    /// The output that the user knows as `name`, such as `--btm FILE`.
    pub fn output(&self, name: impl Into<String>) -> Output {
        Output {
            shared: self.clone(),
            name: Arc::from(name.into()),
        }
    }

    /// Calls `callback` for the first failure, at once if there was one.
    ///
    /// The caller may hold any lock: `callback` must not wait for one.
    pub fn on_failure(&self, callback: impl FnOnce(OutputError) + Send + 'static) {
        let mut failures = lock(&self.0.failures);
        match failures.first.clone() {
            Some(error) => callback(error),
            None => failures.callback = Some(Box::new(callback)),
        }
    }

    /// The first failure.
    pub fn failure(&self) -> Option<OutputError> {
        lock(&self.0.failures).first.clone()
    }

    fn fail(&self, error: OutputError) {
        let mut failures = lock(&self.0.failures);
        if failures.first.is_none() {
            failures.first = Some(error.clone());
            if let Some(callback) = failures.callback.take() {
                callback(error);
            }
        }
    }

    /// Takes at most `count` bytes from the limit.
    fn take(&self, count: u64) -> u64 {
        if self.0.limit.is_none() {
            return count;
        }
        let take = |left: u64| Some(left - left.min(count));
        let left = self
            .0
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        left.unwrap_or(0).min(count)
    }

    fn give_back(&self, unused: u64) {
        if self.0.limit.is_some() && unused != 0 {
            self.0.left.fetch_add(unused, Ordering::Relaxed);
        }
    }
}

/// One output of a run.
#[derive(Clone, Debug)]
pub struct Output {
    shared: RunOutputs,
    name: Arc<str>,
}

impl Output {
    /// Writes as much of `bytes` as the limit allows with `write`, and reports a failure.
    ///
    /// # Errors
    ///
    /// That of `write`; [`ErrorKind::QuotaExceeded`] at the limit.
    pub fn write_with(
        &self,
        bytes: &[u8],
        write: impl FnOnce(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let allowed = self.shared.take(bytes.len() as u64);
        let Some(part) = usize::try_from(allowed).ok().filter(|&part| part != 0) else {
            self.shared.fail(OutputError::Limit {
                output: self.name.to_string(),
                limit: self.shared.0.limit.unwrap_or(u64::MAX),
            });
            return Err(ErrorKind::QuotaExceeded.into());
        };
        let written = match write(&bytes[..part]) {
            Ok(0) => Err(ErrorKind::WriteZero.into()),
            written => written,
        };
        let count = written.as_ref().map_or(0, |&count| count as u64);
        self.shared.give_back(allowed - count.min(allowed));
        written.inspect_err(|error| self.report(error))
    }

    /// Reports an error of this output to the run, unless it is none that loses output.
    fn report(&self, error: &io::Error) {
        let harmless = matches!(
            error.kind(),
            ErrorKind::Interrupted
                | ErrorKind::WouldBlock
                | ErrorKind::BrokenPipe
                | ErrorKind::ConnectionReset
        );
        if harmless {
            return;
        }
        let copy = match error.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code),
            None => error.kind().into(),
        };
        self.shared.fail(OutputError::Write {
            output: self.name.to_string(),
            source: Arc::new(copy),
        });
    }

    /// A writer that counts what it writes to `inner`.
    pub const fn writer<W: Write>(self, inner: W) -> OutputWriter<W> {
        OutputWriter {
            output: self,
            inner,
        }
    }
}

/// See [`Output::writer`].
#[derive(Debug)]
pub struct OutputWriter<W> {
    output: Output,
    inner: W,
}

impl<W: Write> Write for OutputWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let inner = &mut self.inner;
        self.output.write_with(bytes, |part| inner.write(part))
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.inner.flush();
        flushed.inspect_err(|error| self.output.report(error))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Takes `self.0` bytes, then fails with an error of this kind.
    struct Disk(usize, ErrorKind);

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.0);
            self.0 -= count;
            if count == 0 {
                return Err(self.1.into());
            }
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn limit_counts_the_bytes_of_all_outputs() {
        let outputs = RunOutputs::new(Some(10));
        let mut serial = outputs.output("--serial stdio").writer(Vec::new());
        let mut btm = outputs.output("--btm FILE").writer(Vec::new());
        serial.write_all(b"1234").unwrap();
        btm.write_all(b"5678").unwrap();
        assert!(outputs.failure().is_none());
        assert!(serial.write_all(b"90123").is_err());
        assert_eq!(serial.inner, b"123490");
        let error = outputs.failure().unwrap().to_string();
        assert!(error.starts_with("--serial stdio has reached"), "{error}");
        assert!(error.contains("10 bytes"), "{error}");
        assert!(btm.write_all(b"x").is_err());
    }

    #[test]
    fn bytes_that_were_not_written_do_not_count() {
        let outputs = RunOutputs::new(Some(4));
        let output = outputs.output("--trace");
        let short = output.write_with(b"1234", |_| Ok(1)).unwrap();
        assert_eq!(short, 1);
        let blocked = output.write_with(b"234", |_| Err(ErrorKind::WouldBlock.into()));
        assert_eq!(blocked.unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(output.write_with(b"234", |part| Ok(part.len())).unwrap(), 3);
        assert!(outputs.failure().is_none());
    }

    #[test]
    fn first_failed_write_is_reported_once() {
        let (sender, receiver) = mpsc::channel();
        let outputs = RunOutputs::default();
        outputs.on_failure(move |error| sender.send(error.to_string()).unwrap());
        let mut disk = outputs
            .output("--trace FILE")
            .writer(Disk(2, ErrorKind::StorageFull));
        assert!(disk.write_all(b"1234").is_err());
        assert!(disk.write_all(b"1234").is_err());
        let reported: Vec<_> = receiver.try_iter().collect();
        assert_eq!(reported, ["--trace FILE cannot be written"]);
        let (sender, receiver) = mpsc::channel();
        outputs.on_failure(move |error| sender.send(error.to_string()).unwrap());
        assert_eq!(receiver.try_iter().count(), 1, "reported at once");
    }

    #[test]
    fn closed_pipe_is_no_failure() {
        let outputs = RunOutputs::default();
        let mut pipe = outputs
            .output("--serial stdio")
            .writer(Disk(0, ErrorKind::BrokenPipe));
        assert!(pipe.write_all(b"x").is_err());
        assert!(outputs.failure().is_none());
    }
}
