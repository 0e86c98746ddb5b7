//! Connects the guest's command with this process, through the ports of a virtio console.
//!
//! The ports carry input, output, signals and the report of the command's end.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use hindsight_devices::virtio::console::{ConsolePort, PortInput, VirtioConsole};
use rustix::termios::tcgetwinsize;
use signal_hook::consts::SIGWINCH;
use signal_hook::iterator::Signals;

use crate::sandbox::{ThreadKind, enter};
use crate::sync::lock;
use crate::vcpu::board::Board;
use crate::vcpu::run_control::Outcome;

/// Maximum length of a line of the guest's report.
const LINE_MAX: usize = 256;
/// Bytes of the kernel's log that are kept for a message about a failure.
const LOG_MAX: usize = 16 << 10;
/// Time after which a message reports that the guest is still starting.
const PROGRESS_AFTER: Duration = Duration::from_secs(1);

/// How the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommandEnd {
    /// The command ended by itself, with this status.
    Exit(u8),
    /// A signal ended the command.
    Signal(u8),
    /// The command could not be started.
    NotStarted,
}

/// The guest's report about the command.
#[derive(Debug, Default)]
struct Report {
    started: bool,
    end: Option<CommandEnd>,
}

/// The connection between the command and this process.
#[derive(Clone, Debug)]
pub(super) struct Session {
    report: Arc<Mutex<Report>>,
    log: Arc<Mutex<VecDeque<u8>>>,
    board: Arc<OnceLock<Arc<Board>>>,
    input: PortInput,
    signals: PortInput,
    terminal: bool,
}

impl Session {
    /// Makes a session with this process's standard input and output.
    ///
    /// `terminal` says that both are a terminal.
    pub(super) fn new(terminal: bool) -> Self {
        Self {
            report: Arc::default(),
            log: Arc::default(),
            board: Arc::default(),
            input: PortInput::default(),
            signals: PortInput::default(),
            terminal,
        }
    }

    /// The console device of the guest.
    ///
    /// # Errors
    ///
    /// Standard output or standard error is closed.
    pub(super) fn console(&self) -> anyhow::Result<VirtioConsole> {
        let port = |name: &str, output: Box<dyn Write + Send>, input: &PortInput| ConsolePort {
            name: name.to_owned(),
            is_console: false,
            output,
            input: input.clone(),
        };
        let unused = PortInput::default();
        let sink = || -> Box<dyn Write + Send> { Box::new(io::sink()) };
        let report = Box::new(ReportSink {
            session: self.clone(),
            line: Vec::new(),
        });
        let mut ports = vec![
            port("report", report, &unused),
            port("signals", sink(), &self.signals),
        ];
        if self.terminal {
            ports.push(ConsolePort {
                is_console: true,
                ..port("terminal", duplicate(io::stdout().as_fd())?, &self.input)
            });
        } else {
            let output = duplicate(io::stdout().as_fd())?;
            let errors = duplicate(io::stderr().as_fd())?;
            ports.push(port("stdin", sink(), &self.input));
            ports.push(port("stdout", output, &unused));
            ports.push(port("stderr", errors, &unused));
        }
        Ok(VirtioConsole::new(ports))
    }

    /// Returns the receiver of the kernel's log. With `show`, it copies the log to standard error.
    pub(super) fn log_sink(&self, show: bool) -> Box<dyn Write + Send> {
        Box::new(LogSink {
            log: self.log.clone(),
            show,
        })
    }

    /// Whether the command was started.
    pub(super) fn started(&self) -> bool {
        lock(&self.report).started
    }

    /// How the command ended.
    pub(super) fn end(&self) -> Option<CommandEnd> {
        lock(&self.report).end
    }

    /// The last part of the kernel's log.
    pub(super) fn log(&self) -> String {
        let log: Vec<u8> = lock(&self.log).iter().copied().collect();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Starts to pass standard input and the terminal's size to the console, the device `index`.
    ///
    /// In a deterministic run `input` is false, and the command's standard input is empty.
    ///
    /// # Errors
    ///
    /// A thread or a signal handler cannot be made.
    pub(super) fn start(
        &self,
        board: &Arc<Board>,
        index: usize,
        input: bool,
    ) -> anyhow::Result<()> {
        let _ = self.board.set(board.clone());
        if !input {
            self.input.close();
            return Ok(());
        }
        let serve = {
            let board = board.clone();
            move || board.buses.serve_device(index)
        };
        if self.terminal {
            self.follow_terminal_size(serve.clone())?;
        }
        let port = self.input.clone();
        let thread = thread::Builder::new().name("input".to_owned());
        thread
            .spawn(move || {
                enter(ThreadKind::ConsoleInput);
                pass_input(&port, &serve);
            })
            .context("the thread for standard input cannot be started")?;
        Ok(())
    }

    fn follow_terminal_size(&self, serve: impl Fn() + Send + 'static) -> anyhow::Result<()> {
        let mut changes = Signals::new([SIGWINCH]).context("SIGWINCH cannot be handled")?;
        let port = self.input.clone();
        let update = move || {
            if let Ok(size) = tcgetwinsize(io::stdout()) {
                port.set_size(size.ws_row, size.ws_col);
                serve();
            }
        };
        update();
        let thread = thread::Builder::new().name("terminal size".to_owned());
        thread
            .spawn(move || {
                enter(ThreadKind::Signals);
                changes.forever().for_each(|_| update());
            })
            .context("the thread for the terminal's size cannot be started")?;
        Ok(())
    }

    /// Passes a signal to the command.
    pub(super) fn signal(&self, signal: i32, index: usize) {
        if let (Ok(signal), Some(board)) = (u8::try_from(signal), self.board.get()) {
            self.signals.push(&[signal]);
            board.buses.serve_device(index);
        }
    }

    /// Shows `text` on standard error if the guest is still starting after [`PROGRESS_AFTER`].
    pub(super) fn show_progress(&self, text: String) {
        let session = self.clone();
        let thread = thread::Builder::new().name("progress".to_owned());
        // If the thread cannot be started, only this message is missing.
        let _ = thread.spawn(move || {
            enter(ThreadKind::Timer);
            thread::sleep(PROGRESS_AFTER);
            if !session.started() && session.end().is_none() {
                eprintln!("hindsight: {text}");
            }
        });
    }

    fn take_line(&self, line: &str) {
        let (word, number) = line.split_once(' ').unwrap_or((line, ""));
        let number = number.trim().parse().unwrap_or(0);
        let end = match word {
            "started" => {
                lock(&self.report).started = true;
                return;
            }
            "exit" => CommandEnd::Exit(number),
            "signal" => CommandEnd::Signal(number),
            _ => CommandEnd::NotStarted,
        };
        lock(&self.report).end.get_or_insert(end);
        if let Some(board) = self.board.get() {
            board.run.finish(Outcome::Quit);
        }
    }
}

/// Duplicates a descriptor of this process. Writes to the copy are not buffered.
fn duplicate(file: impl AsFd) -> anyhow::Result<Box<dyn Write + Send>> {
    let file = file.as_fd().try_clone_to_owned();
    Ok(Box::new(File::from(
        file.context("standard output is closed")?,
    )))
}

/// Passes standard input to the guest until the input ends.
fn pass_input(port: &PortInput, serve: &impl Fn()) {
    let mut buffer = [0; 4096];
    let mut stdin = io::stdin().lock();
    loop {
        let count = match stdin.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        let mut bytes = &buffer[..count];
        while !bytes.is_empty() {
            bytes = &bytes[port.push(bytes)..];
            serve();
            if !bytes.is_empty() {
                port.wait(Duration::from_millis(100));
            }
        }
    }
    port.close();
    serve();
}

/// Receives the guest's report, line by line.
struct ReportSink {
    session: Session,
    line: Vec<u8>,
}

impl Write for ReportSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for &byte in bytes {
            if byte == b'\n' {
                let line = std::mem::take(&mut self.line);
                self.session.take_line(&String::from_utf8_lossy(&line));
            } else if self.line.len() < LINE_MAX {
                self.line.push(byte);
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps the last [`LOG_MAX`] bytes of the kernel's log.
struct LogSink {
    log: Arc<Mutex<VecDeque<u8>>>,
    show: bool,
}

impl Write for LogSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.show {
            // A log that cannot be shown must not stop the guest.
            let _ = io::stderr().write_all(bytes);
        }
        let mut log = lock(&self.log);
        log.extend(bytes);
        let excess = log.len().saturating_sub(LOG_MAX);
        log.drain(..excess);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Formats the time that has passed since `start`.
pub(super) fn seconds_since(start: Instant) -> String {
    format!("{:.1} s", start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_read_line_by_line() {
        let session = Session::new(false);
        let mut sink = ReportSink {
            session: session.clone(),
            line: Vec::new(),
        };
        sink.write_all(b"star").unwrap();
        assert!(!session.started());
        sink.write_all(b"ted\nexit 4").unwrap();
        assert_eq!((session.started(), session.end()), (true, None));
        sink.write_all(b"2\nsignal 9\n").unwrap();
        assert_eq!(session.end(), Some(CommandEnd::Exit(42)));
    }

    #[test]
    fn report_of_a_hostile_guest_is_bounded() {
        let session = Session::new(false);
        let mut sink = ReportSink {
            session: session.clone(),
            line: Vec::new(),
        };
        sink.write_all(&[b'x'; 100_000]).unwrap();
        assert!(sink.line.len() <= LINE_MAX);
        sink.write_all(b"\n").unwrap();
        assert_eq!(session.end(), Some(CommandEnd::NotStarted));
        let mut log = session.log_sink(false);
        log.write_all(&[b'y'; 100_000]).unwrap();
        assert_eq!(session.log().len(), LOG_MAX);
    }
}
