//! Console input: the thread that reads standard input, and what all such threads share.

use std::collections::VecDeque;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::console::escape::{Command, Escape, HELP};
use crate::console::output::Outbox;
use crate::console::terminal::RawTerminal;
use crate::console::{ConsoleError, Deliver, spawn};
use crate::log_limit::LogLimit;

/// How long the guest is given before bytes that it did not take are offered again.
const RETRY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

/// Typed bytes that wait for the guest to take them.
const TYPED_MAX: usize = 4096;

/// A thread that reads input; dropping it ends and joins the thread.
#[derive(Debug)]
pub struct Reader {
    /// Closing it wakes the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    /// Starts `run` on a thread; it must return when its [`Stop`] says so.
    pub fn start(run: impl FnOnce(Stop) + Send + 'static) -> Result<Self, ConsoleError> {
        let (stopped, stop) = io::pipe().map_err(ConsoleError::SetUp)?;
        let thread = spawn("console-input", Stop(stopped), run)?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            // A callback of the thread may be what drops us.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// The reading thread's end of the pipe that stops it.
#[derive(Debug)]
pub struct Stop(PipeReader);

impl Stop {
    /// Waits until `fd` shows one of `events`, an error or a hang-up, and answers what it showed:
    /// none when time ran out, `None` when the thread must end.
    pub fn wait(
        &self,
        fd: BorrowedFd<'_>,
        events: PollFlags,
        limit: Option<&Timespec>,
    ) -> Option<PollFlags> {
        let mut fds = [
            PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(fd, events),
        ];
        loop {
            match poll(&mut fds, limit) {
                Ok(_) if !fds[0].revents().is_empty() => return None,
                Ok(_) => return Some(fds[1].revents()),
                Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }
}

/// Delivers all of `bytes`, again and again until the guest takes them; answers false when the
/// thread must end or `source` hung up.
pub fn feed(stop: &Stop, source: BorrowedFd<'_>, deliver: &Deliver, bytes: &[u8]) -> bool {
    let mut rest = bytes;
    loop {
        let accepted = deliver(rest).min(rest.len());
        rest = &rest[accepted..];
        if rest.is_empty() {
            return true;
        }
        // A pipe hangs up when its writer ends, which must not lose what it wrote: so the source
        // is asked for nothing here, and only a socket reports its hang-up.
        match stop.wait(source, PollFlags::empty(), Some(&RETRY)) {
            None => return false,
            Some(shown) if shown.contains(PollFlags::HUP) && is_socket(source) => return false,
            Some(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
        }
    }
}

fn is_socket(fd: BorrowedFd<'_>) -> bool {
    let kind = rustix::fs::fstat(fd).map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode));
    kind.is_ok_and(|kind| kind == rustix::fs::FileType::Socket)
}

/// Reads what is there; none at the end of the file or on an error.
pub fn read_some(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> Option<usize> {
    loop {
        match rustix::io::read(fd, &mut *buffer) {
            Ok(0) => return None,
            Ok(count) => return Some(count),
            Err(Errno::INTR) => {}
            // Someone else read first from a descriptor that does not block.
            Err(Errno::AGAIN) => return Some(0),
            Err(_) => return None,
        }
    }
}

/// Starts reading standard input.
pub fn read_stdin(
    outbox: Arc<Outbox>,
    deliver: Deliver,
    quit: impl Fn() + Send + 'static,
) -> Result<Reader, ConsoleError> {
    let stdin = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(ConsoleError::SetUp)?;
    read_terminal_or_pipe(stdin, outbox, deliver, quit)
}

/// Starts reading `stdin`: raw and with escape keys if it is a terminal, else as it is.
pub fn read_terminal_or_pipe(
    stdin: OwnedFd,
    outbox: Arc<Outbox>,
    deliver: Deliver,
    quit: impl Fn() + Send + 'static,
) -> Result<Reader, ConsoleError> {
    if !rustix::termios::isatty(&stdin) {
        return Reader::start(move |stop| read_pipe(&stop, &stdin, &deliver));
    }
    if !in_foreground(&stdin) {
        // Touching the terminal from the background would stop the process.
        tracing::info!("no console input: not in the foreground of the terminal");
        return Reader::start(|_| {});
    }
    let raw = RawTerminal::enter(&stdin).map_err(ConsoleError::Terminal)?;
    Reader::start(move |stop| {
        read_terminal(&stop, &stdin, &outbox, &deliver, &quit);
        drop(raw);
    })
}

/// Whether our process group is the one the terminal reads for; a terminal that does not control
/// us stops nobody.
fn in_foreground(terminal: &OwnedFd) -> bool {
    match rustix::termios::tcgetpgrp(terminal) {
        Ok(group) => group == rustix::process::getpgrp(),
        Err(_) => true,
    }
}

fn read_pipe(stop: &Stop, stdin: &OwnedFd, deliver: &Deliver) {
    let mut buffer = [0; 1024];
    while stop.wait(stdin.as_fd(), PollFlags::IN, None).is_some() {
        let Some(count) = read_some(stdin.as_fd(), &mut buffer) else {
            return;
        };
        if !feed(stop, stdin.as_fd(), deliver, &buffer[..count]) {
            return;
        }
    }
}

fn read_terminal(
    stop: &Stop,
    stdin: &OwnedFd,
    outbox: &Outbox,
    deliver: &Deliver,
    quit: &impl Fn(),
) {
    let mut escape = Escape::default();
    let mut buffer = [0; 1024];
    let mut waiting = VecDeque::new();
    loop {
        let limit = (!waiting.is_empty()).then_some(&RETRY);
        let Some(shown) = stop.wait(stdin.as_fd(), PollFlags::IN, limit) else {
            return;
        };
        if !shown.is_empty() {
            let Some(count) = read_some(stdin.as_fd(), &mut buffer) else {
                return;
            };
            let (guest, commands) = escape.filter(&buffer[..count]);
            // Before anything that may take long: the escape key must work when the guest hangs.
            commands
                .into_iter()
                .for_each(|command| obey(command, outbox, quit));
            waiting.extend(guest);
            if waiting.len() > TYPED_MAX {
                static LIMIT: LogLimit = LogLimit::new();
                let lost = waiting.len() - TYPED_MAX;
                if let Some(suppressed) = LIMIT.admit() {
                    tracing::warn!(
                        "{lost} typed bytes are lost: the guest does not read its serial port{suppressed}"
                    );
                }
            }
            waiting.truncate(TYPED_MAX);
        }
        let accepted = deliver(waiting.make_contiguous()).min(waiting.len());
        waiting.drain(..accepted);
    }
}

fn obey(command: Command, outbox: &Outbox, quit: &impl Fn()) {
    match command {
        Command::Help => outbox.put(HELP),
        Command::Quit => {
            outbox.release();
            quit();
        }
    }
}
