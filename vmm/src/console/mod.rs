//! Connects a guest's serial port and debug console to a terminal, a file or a unix socket.
//!
//! A thread writes output from a bounded buffer, so that a guest that writes single bytes does not
//! cost a system call for each. Another thread reads input and passes it to a callback. The
//! terminal is raw only while a [`Console`] reads input from it. It is restored when the console is
//! dropped, by the panic hook, by a signal ([`watch_signals`]), or by [`restore_terminal`] before a
//! call of `exit`.

mod backend;
mod escape;
mod input;
mod listening;
mod output;
mod signals;
mod socket;
mod terminal;

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use thiserror::Error;

pub use backend::{Backend, ParseBackendError};
pub use listening::ListeningSocket;
pub use signals::{CaughtSignals, watch_signals};
pub use terminal::{RawTerminal, restore_terminal};

use crate::output::Output;
use crate::sandbox::{ThreadKind, enter};
use output::{Outbox, WhenFull};
use socket::ConsoleSocket;

/// How long a dropped console waits for its output to be written.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// Why a console cannot be opened or started.
#[derive(Debug, Error)]
pub enum ConsoleError {
    /// The file of `file:PATH` cannot be written.
    #[error("cannot open {path:?} for console output")]
    OpenFile {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The path of `unix:PATH` is in use by another process, or by a file.
    #[error("cannot use {path:?} as a socket: {reason}")]
    PathInUse {
        /// The socket.
        path: PathBuf,
        /// The user of the path: a process or a file.
        reason: &'static str,
    },
    /// The socket cannot be created.
    #[error("cannot listen on socket {path:?}")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// A descriptor, a pipe or a thread cannot be created.
    #[error("cannot set up the console")]
    SetUp(#[source] io::Error),
    /// The terminal cannot be set to raw mode.
    #[error("cannot set the terminal to raw mode")]
    Terminal(#[source] io::Error),
}

/// Passes input to the guest and returns how many bytes it accepted; the rest is offered again.
///
/// It must not wait for a device that may itself wait for output, since the escape key would not
/// work during that time. For a shared serial port it is `serial.try_lock().map_or(0, |mut serial|
/// serial.input(bytes))`.
pub type Deliver = Box<dyn Fn(&[u8]) -> usize + Send>;

/// An open console.
///
/// Dropping it writes out buffered output for at most two seconds, ends its threads, restores the
/// terminal and removes the socket.
#[derive(Debug)]
pub struct Console {
    outbox: Arc<Outbox>,
    input: InputSource,
    writer: Option<JoinHandle<()>>,
    reader: Option<input::InputThread>,
}

/// Where input comes from.
#[derive(Debug)]
enum InputSource {
    None,
    Stdin,
    Socket(Option<ConsoleSocket>),
}

impl Console {
    /// Opens a backend for output. Input and raw mode begin with [`Console::start_input`].
    ///
    /// # Errors
    ///
    /// A file that cannot be written, a socket path that is in use or cannot be bound.
    pub fn open(backend: &Backend) -> Result<Self, ConsoleError> {
        Self::open_counted(backend, None)
    }

    /// As [`Console::open`], with an [`Output`] that counts what goes to a terminal, pipe or file.
    ///
    /// # Errors
    ///
    /// As [`Console::open`].
    pub fn open_counted(backend: &Backend, output: Option<Output>) -> Result<Self, ConsoleError> {
        let (outbox, input) = match backend {
            Backend::None => (Outbox::closed(), InputSource::None),
            Backend::Stdio => {
                let stdout = io::stdout().as_fd().try_clone_to_owned();
                let stdout = stdout.map_err(ConsoleError::SetUp)?;
                (
                    Outbox::new(WhenFull::Wait, Some(stdout), output),
                    InputSource::Stdin,
                )
            }
            Backend::File(path) => {
                let file = open_file(path)?;
                (
                    Outbox::new(WhenFull::Wait, Some(file.into()), output),
                    InputSource::None,
                )
            }
            Backend::Unix(path) => {
                let socket = ConsoleSocket::listen(path)?;
                (
                    Outbox::new(WhenFull::DropOldest, None, None),
                    InputSource::Socket(Some(socket)),
                )
            }
        };
        let outbox = Arc::new(outbox);
        let writer = match backend {
            Backend::None => None,
            _ => Some(spawn(
                "console-output",
                ThreadKind::ConsoleOutput,
                outbox.clone(),
                Outbox::run,
            )?),
        };
        Ok(Self {
            outbox,
            input,
            writer,
            reader: None,
        })
    }

    /// A console without input and output.
    pub fn closed() -> Self {
        Self::without_output(InputSource::None)
    }

    /// Standard input without output, for a keyboard.
    pub fn keyboard() -> Self {
        Self::without_output(InputSource::Stdin)
    }

    fn without_output(input: InputSource) -> Self {
        Self {
            outbox: Arc::new(Outbox::closed()),
            input,
            writer: None,
            reader: None,
        }
    }

    /// A writer for a device, which writes into a buffer of 64 KiB.
    ///
    /// When the buffer is full, the client of a socket loses the oldest bytes, and the device waits
    /// for a terminal, pipe or file until [`Console::release`].
    pub fn output(&self) -> Box<dyn Write + Send> {
        Box::new(self.outbox.handle())
    }

    /// Starts reading input, and sets standard input to raw mode if it is a terminal.
    ///
    /// The reading thread calls `deliver` with the bytes, and `quit` for the escape sequence Ctrl-A
    /// x. Bytes that `deliver` does not accept are offered again; typed bytes beyond 4 KiB of them
    /// are lost. A socket accepts its first client after this call.
    ///
    /// # Errors
    ///
    /// The terminal cannot be made raw, or the thread cannot be started.
    pub fn start_input(
        &mut self,
        deliver: Deliver,
        quit: impl Fn() + Send + 'static,
    ) -> Result<(), ConsoleError> {
        let outbox = Arc::clone(&self.outbox);
        self.reader = match &mut self.input {
            InputSource::None => None,
            InputSource::Stdin => Some(input::read_stdin(outbox, deliver, quit)?),
            InputSource::Socket(socket) => match socket.take() {
                Some(socket) => Some(socket.serve(outbox, deliver)?),
                None => None,
            },
        };
        Ok(())
    }

    /// A handle that calls [`Console::release`] from another thread.
    pub fn releaser(&self) -> Releaser {
        Releaser(Arc::clone(&self.outbox))
    }

    /// Ends all waiting for a full buffer: from now on, output that does not fit is dropped.
    ///
    /// A vCPU thread may be waiting, so this comes before it is joined.
    pub fn release(&self) {
        self.outbox.release();
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.outbox.close();
        let drained = self.outbox.wait_until_drained(DRAIN_TIME_MAX);
        if !drained {
            let limit = DRAIN_TIME_MAX.as_secs();
            tracing::warn!("console output is lost: its reader did not take it within {limit} s");
        }
        // Restores the terminal, or closes the client's connection, after the output.
        self.reader = None;
        // A thread that is blocked in a write ends with the process.
        if let Some(writer) = self.writer.take().filter(|_| drained) {
            let _ = writer.join();
        }
    }
}

/// See [`Console::releaser`].
#[derive(Clone, Debug)]
pub struct Releaser(Arc<Outbox>);

impl Releaser {
    /// As [`Console::release`].
    pub fn release(&self) {
        self.0.release();
    }
}

fn open_file(path: &PathBuf) -> Result<std::fs::File, ConsoleError> {
    // Without blocking: a named pipe without a reader is an error.
    let mut options = OpenOptions::new();
    options
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_NONBLOCK);
    options.open(path).map_err(|source| ConsoleError::OpenFile {
        path: path.clone(),
        source,
    })
}

fn spawn<T: Send + 'static>(
    name: &str,
    kind: ThreadKind,
    argument: T,
    run: impl FnOnce(T) + Send + 'static,
) -> Result<JoinHandle<()>, ConsoleError> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
        enter(kind);
        run(argument);
    });
    thread.map_err(ConsoleError::SetUp)
}

#[cfg(test)]
pub(crate) mod tests;
