//! Where a guest's serial port and debug console go: the terminal, a file, a unix socket, nowhere.
//!
//! Output passes through a bounded buffer and a thread of its own, so that a guest that writes byte
//! by byte costs no system call a byte. Input is read by a thread and handed to a callback. The
//! terminal is raw only while a [`Console`] reads input from it, and is restored however that ends:
//! by drop, by the hook of a panic, by a signal ([`watch_signals`]), or by [`restore_terminal`]
//! before a call of `exit`.

mod backend;
mod escape;
mod input;
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
pub use signals::watch_signals;
pub use terminal::restore_terminal;

use output::{Outbox, WhenFull};
use socket::Socket;

/// How long the end of a console waits for output to be taken.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// Why a console cannot be opened or started.
#[derive(Debug, Error)]
pub enum ConsoleError {
    /// The file of `file:PATH` cannot be written.
    #[error("cannot open {path:?} for console output")]
    OpenFile {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Someone listens on the path of `unix:PATH`, or it is no socket.
    #[error("cannot use {path:?} as console socket: {reason}")]
    PathInUse {
        /// The socket.
        path: PathBuf,
        /// What is there.
        reason: &'static str,
    },
    /// The socket cannot be made.
    #[error("cannot listen on console socket {path:?}")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Standard output or a file of our own cannot be duplicated.
    #[error("cannot set up the console")]
    SetUp(#[source] io::Error),
    /// The terminal refuses to become raw.
    #[error("cannot set the terminal to raw mode")]
    Terminal(#[source] io::Error),
}

/// What takes the guest's input: it answers how many bytes it accepted; the rest is offered again.
///
/// It must not wait for a device that may be waiting for output: for a shared serial port, that is
/// `serial.try_lock().map_or(0, |mut serial| serial.input(bytes))`. Or else a terminal that takes no
/// output would keep the escape key from working.
pub type Deliver = Box<dyn Fn(&[u8]) -> usize + Send>;

/// An open console. Dropping it ends its threads, writes out what is buffered (for at most two
/// seconds), restores the terminal and removes the socket.
#[derive(Debug)]
pub struct Console {
    outbox: Arc<Outbox>,
    source: Source,
    writer: Option<JoinHandle<()>>,
    reader: Option<input::Reader>,
}

/// Where input comes from.
#[derive(Debug)]
enum Source {
    Nothing,
    Stdin,
    Socket(Option<Socket>),
}

impl Console {
    /// Opens a backend for output. Nothing is read, and the terminal stays as it is, until
    /// [`Console::start_input`].
    ///
    /// # Errors
    /// A file that cannot be written, a socket path that is in use or cannot be bound.
    pub fn open(backend: &Backend) -> Result<Self, ConsoleError> {
        let (outbox, source) = match backend {
            Backend::None => (Outbox::closed(), Source::Nothing),
            Backend::Stdio => {
                let stdout = io::stdout().as_fd().try_clone_to_owned();
                let stdout = stdout.map_err(ConsoleError::SetUp)?;
                (Outbox::new(WhenFull::Wait, Some(stdout)), Source::Stdin)
            }
            Backend::File(path) => {
                let file = open_file(path)?;
                (
                    Outbox::new(WhenFull::Wait, Some(file.into())),
                    Source::Nothing,
                )
            }
            Backend::Unix(path) => {
                let socket = Socket::listen(path)?;
                (
                    Outbox::new(WhenFull::DropOldest, None),
                    Source::Socket(Some(socket)),
                )
            }
        };
        let outbox = Arc::new(outbox);
        let writer = match backend {
            Backend::None => None,
            _ => Some(spawn("console-output", outbox.clone(), Outbox::run)?),
        };
        Ok(Self {
            outbox,
            source,
            writer,
            reader: None,
        })
    }

    /// A writer for a device. Writes return at once unless the buffer of 64 KiB is full: then a
    /// client of a socket loses the oldest bytes, while a terminal, pipe or file is waited for
    /// until [`Console::release`].
    pub fn output(&self) -> Box<dyn Write + Send> {
        Box::new(self.outbox.handle())
    }

    /// Starts reading input, with the terminal raw if standard input is one: `deliver` gets the
    /// bytes, `quit` is called for the escape sequence Ctrl-A x. Both run on the reading thread.
    ///
    /// Bytes that `deliver` does not accept are offered again until it does; but what is typed at a
    /// terminal beyond 4 KiB of such bytes is lost. A socket has no client before this call, also
    /// where the guest has no use for input.
    ///
    /// # Errors
    /// The terminal cannot be made raw, or the thread cannot be started.
    pub fn start_input(
        &mut self,
        deliver: Deliver,
        quit: impl Fn() + Send + 'static,
    ) -> Result<(), ConsoleError> {
        let outbox = Arc::clone(&self.outbox);
        self.reader = match &mut self.source {
            Source::Nothing => None,
            Source::Stdin => Some(input::read_stdin(outbox, deliver, quit)?),
            Source::Socket(socket) => match socket.take() {
                Some(socket) => Some(socket.serve(outbox, deliver)?),
                None => None,
            },
        };
        Ok(())
    }

    /// A handle that ends all waiting for room in the buffer; from then on output that does not
    /// fit is dropped.
    pub fn releaser(&self) -> Releaser {
        Releaser(Arc::clone(&self.outbox))
    }

    /// Ends all waiting for room in the buffer. Must come before a vCPU thread that may be writing
    /// is joined.
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
        // Restores the terminal, or hangs up on the client, and that after its output.
        self.reader = None;
        // A thread that is stuck in a write is left to the end of the process.
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
    // Not blocking: a named pipe that nobody reads is an error instead of a wait.
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
    argument: T,
    run: impl FnOnce(T) + Send + 'static,
) -> Result<JoinHandle<()>, ConsoleError> {
    let thread = thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || run(argument));
    thread.map_err(ConsoleError::SetUp)
}

#[cfg(test)]
mod tests;
