//! Console input: the thread that reads standard input, and the base of all reading threads.

use std::collections::VecDeque;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::console::escape::{EscapeCommand, EscapeFilter, HELP};
use crate::console::output::Outbox;
use crate::console::terminal::RawTerminal;
use crate::console::{ConsoleError, Deliver, spawn};
use crate::log_limit::LogLimit;
use crate::sandbox::ThreadKind;

/// The time after which bytes that the guest did not accept are offered again.
const RETRY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

/// Maximum number of typed bytes that wait for the guest to accept them.
const TYPED_MAX: usize = 4096;

/// A thread that reads input. Dropping it ends and joins the thread.
#[derive(Debug)]
pub struct InputThread {
    /// Closing it wakes the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl InputThread {
    /// Starts `run` on a thread. It must return when [`StopPipe::wait`] returns `None`.
    pub fn start(run: impl FnOnce(StopPipe) + Send + 'static) -> Result<Self, ConsoleError> {
        let (stopped, stop) = io::pipe().map_err(ConsoleError::SetUp)?;
        let thread = spawn(
            "console-input",
            ThreadKind::ConsoleInput,
            StopPipe(stopped),
            run,
        )?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for InputThread {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            // A callback on the thread itself may drop this.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// The thread's end of the pipe that stops it.
#[derive(Debug)]
pub struct StopPipe(PipeReader);

impl StopPipe {
    /// Waits until `fd` has one of `events`, an error or a hang-up, and returns what it has.
    ///
    /// Returns no events after `limit`, and `None` when the thread must end.
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

/// Offers `bytes` to the guest until it has accepted all.
///
/// Returns false if the thread must end, or `source` hung up.
pub fn feed(stop: &StopPipe, source: BorrowedFd<'_>, deliver: &Deliver, bytes: &[u8]) -> bool {
    let mut rest = bytes;
    loop {
        let accepted = deliver(rest).min(rest.len());
        rest = &rest[accepted..];
        if rest.is_empty() {
            return true;
        }
        // Only a hang-up of a socket ends this: a pipe hangs up when its writer ends, and what was
        // written before must reach the guest.
        match stop.wait(source, PollFlags::empty(), Some(&RETRY)) {
            None => return false,
            Some(events) if events.contains(PollFlags::HUP) && is_socket(source) => return false,
            Some(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
        }
    }
}

fn is_socket(fd: BorrowedFd<'_>) -> bool {
    let kind = rustix::fs::fstat(fd).map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode));
    kind.is_ok_and(|kind| kind == rustix::fs::FileType::Socket)
}

/// Reads the bytes that are available; `None` at the end of the file or after an error.
pub fn read_some(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> Option<usize> {
    loop {
        match rustix::io::read(fd, &mut *buffer) {
            Ok(0) => return None,
            Ok(count) => return Some(count),
            Err(Errno::INTR) => {}
            // Another process read first from a descriptor that does not block.
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
) -> Result<InputThread, ConsoleError> {
    let stdin = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(ConsoleError::SetUp)?;
    read_terminal_or_pipe(stdin, outbox, deliver, quit)
}

/// Starts reading `stdin`. A terminal becomes raw and has escape keys.
pub fn read_terminal_or_pipe(
    stdin: OwnedFd,
    outbox: Arc<Outbox>,
    deliver: Deliver,
    quit: impl Fn() + Send + 'static,
) -> Result<InputThread, ConsoleError> {
    if !rustix::termios::isatty(&stdin) {
        return InputThread::start(move |stop| read_pipe(&stop, &stdin, &deliver));
    }
    if !in_foreground(&stdin) {
        // The kernel would stop a background process that reads the terminal or changes its modes.
        tracing::info!("no console input: not in the foreground of the terminal");
        return InputThread::start(|_| {});
    }
    let raw = RawTerminal::enter(&stdin).map_err(ConsoleError::Terminal)?;
    InputThread::start(move |stop| {
        read_terminal(&stop, &stdin, &outbox, &deliver, &quit);
        drop(raw);
    })
}

/// Whether this process group may read the terminal; one that is not our controlling terminal
/// always may be read.
fn in_foreground(terminal: &OwnedFd) -> bool {
    match rustix::termios::tcgetpgrp(terminal) {
        Ok(group) => group == rustix::process::getpgrp(),
        Err(_) => true,
    }
}

fn read_pipe(stop: &StopPipe, stdin: &OwnedFd, deliver: &Deliver) {
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
    stop: &StopPipe,
    stdin: &OwnedFd,
    outbox: &Outbox,
    deliver: &Deliver,
    quit: &impl Fn(),
) {
    let mut escape = EscapeFilter::default();
    let mut buffer = [0; 1024];
    let mut waiting = VecDeque::new();
    loop {
        let limit = (!waiting.is_empty()).then_some(&RETRY);
        let Some(events) = stop.wait(stdin.as_fd(), PollFlags::IN, limit) else {
            return;
        };
        if !events.is_empty() {
            let Some(count) = read_some(stdin.as_fd(), &mut buffer) else {
                return;
            };
            let (guest, commands) = escape.filter(&buffer[..count]);
            // Before input is offered: the escape key must work while the guest hangs.
            commands
                .into_iter()
                .for_each(|command| execute(command, outbox, quit));
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

fn execute(command: EscapeCommand, outbox: &Outbox, quit: &impl Fn()) {
    match command {
        EscapeCommand::Help => outbox.put(HELP),
        EscapeCommand::Quit => {
            outbox.release();
            quit();
        }
    }
}
