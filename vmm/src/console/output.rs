//! Console output: a bounded buffer that devices fill, and the thread that empties it.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Bytes that wait for the thread.
pub const BUFFER_MAX: usize = 64 * 1024;

/// What a write into a full buffer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// Waits for room.
    Wait,
    /// Makes room: what is oldest is lost.
    DropOldest,
    /// Loses what does not fit.
    DropNewest,
}

#[derive(Debug)]
struct State {
    buffer: VecDeque<u8>,
    when_full: WhenFull,
    /// Where bytes go; none while a socket has no client.
    target: Option<Arc<OwnedFd>>,
    /// Bytes are being written, outside the lock.
    writing: bool,
    /// No more output is taken; what is buffered is still written.
    closed: bool,
}

/// The buffer; lock order: none of our locks is taken while it is locked.
#[derive(Debug)]
pub struct Outbox {
    state: Mutex<State>,
    /// There is something for the thread to do.
    filled: Condvar,
    /// There is room, or nothing left, or nobody waits any longer.
    emptied: Condvar,
}

impl Outbox {
    /// An empty buffer before `target`.
    pub fn new(when_full: WhenFull, target: Option<OwnedFd>) -> Self {
        let state = State {
            buffer: VecDeque::new(),
            when_full,
            target: target.map(Arc::new),
            writing: false,
            closed: false,
        };
        Self {
            state: Mutex::new(state),
            filled: Condvar::new(),
            emptied: Condvar::new(),
        }
    }

    /// A buffer that takes nothing.
    pub fn closed() -> Self {
        let outbox = Self::new(WhenFull::DropNewest, None);
        outbox.lock().closed = true;
        outbox
    }

    /// A writer into the buffer.
    pub fn handle(self: &Arc<Self>) -> impl Write + Send + use<> {
        Handle(Arc::clone(self))
    }

    /// Puts `bytes` into the buffer, or drops what does not fit, by the rule for a full one.
    pub fn put(&self, bytes: &[u8]) {
        let mut state = self.lock();
        let mut rest = bytes;
        while !rest.is_empty() && !state.closed {
            let room = BUFFER_MAX - state.buffer.len();
            let (now, later) = rest.split_at(room.min(rest.len()));
            state.buffer.extend(now);
            rest = later;
            self.filled.notify_one();
            if rest.is_empty() {
                break;
            }
            match state.when_full {
                WhenFull::Wait => {
                    state = self
                        .emptied
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                WhenFull::DropOldest => {
                    state.buffer.drain(..rest.len().min(BUFFER_MAX));
                }
                WhenFull::DropNewest => break,
            }
        }
    }

    /// Gives the buffer a new place to go to.
    pub fn attach(&self, target: Arc<OwnedFd>) {
        self.lock().target = Some(target);
        self.filled.notify_one();
    }

    /// Takes `target` away, if the buffer still goes there.
    pub fn detach(&self, target: &Arc<OwnedFd>) {
        let mut state = self.lock();
        if state
            .target
            .as_ref()
            .is_some_and(|current| Arc::ptr_eq(current, target))
        {
            state.target = None;
        }
        drop(state);
        self.emptied.notify_all();
    }

    /// Ends all waiting for room.
    pub fn release(&self) {
        let mut state = self.lock();
        if state.when_full == WhenFull::Wait {
            state.when_full = WhenFull::DropNewest;
        }
        drop(state);
        self.emptied.notify_all();
    }

    /// Takes no more output, and ends the thread once what is buffered is written.
    pub fn close(&self) {
        self.lock().closed = true;
        self.filled.notify_all();
        self.emptied.notify_all();
    }

    /// Waits until nothing is left that could be written; answers false if `limit` passes first.
    pub fn wait_until_drained(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut state = self.lock();
        while state.writing || (!state.buffer.is_empty() && state.target.is_some()) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.emptied.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// The thread: writes what comes into the buffer until it is closed.
    pub fn run(this: Arc<Self>) {
        while let Some((bytes, target)) = this.take() {
            let written = write_all(&target, &bytes);
            this.lock().writing = false;
            if let Err(error) = written {
                match error {
                    // The reader of a pipe, or the client of a socket, closed its end.
                    Errno::PIPE | Errno::CONNRESET => {
                        tracing::info!("console output is dropped: its reader closed");
                    }
                    _ => tracing::warn!("console output is dropped: it cannot be written: {error}"),
                }
                this.detach(&target);
            }
            this.emptied.notify_all();
        }
    }

    /// What is to be written next; none when the buffer is closed and empty, or goes nowhere.
    fn take(&self) -> Option<(Vec<u8>, Arc<OwnedFd>)> {
        let mut state = self.lock();
        loop {
            if let Some(target) = state.target.clone().filter(|_| !state.buffer.is_empty()) {
                let bytes = state.buffer.drain(..).collect();
                state.writing = true;
                return Some((bytes, target));
            }
            if state.closed {
                return None;
            }
            if state.target.is_none() && state.when_full != WhenFull::DropOldest {
                // The pipe or file failed for good: nobody shall wait for room in vain.
                state.buffer.clear();
                state.when_full = WhenFull::DropNewest;
                state.closed = true;
                self.emptied.notify_all();
                return None;
            }
            state = self
                .filled
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Handle(Arc<Outbox>);

impl Write for Handle {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.put(bytes);
        Ok(bytes.len())
    }

    /// The thread writes at once what it finds; a flush for each byte would undo the buffer.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes all of `bytes`, whether or not the descriptor blocks: it may be shared with a process
/// that changed that.
fn write_all(target: &OwnedFd, bytes: &[u8]) -> Result<(), Errno> {
    let mut rest = bytes;
    while !rest.is_empty() {
        match rustix::io::write(target, rest) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => rest = &rest[count..],
            Err(Errno::AGAIN) => {
                poll(
                    &mut [PollFd::from_borrowed_fd(target.as_fd(), PollFlags::OUT)],
                    None,
                )?;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
