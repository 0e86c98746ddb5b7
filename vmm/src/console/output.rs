//! Console output: a bounded buffer that devices fill, and the thread that empties it.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::output::Output;

/// Capacity of the buffer, in bytes.
pub const BUFFER_MAX: usize = 64 * 1024;

/// The policy for a write into a full buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// Waits until the thread has written some of it.
    Wait,
    /// Drops the oldest bytes.
    DropOldest,
    /// Drops the new bytes that do not fit.
    DropNewest,
}

#[derive(Debug)]
struct OutboxState {
    buffer: VecDeque<u8>,
    when_full: WhenFull,
    /// The descriptor to write to; `None` while a socket has no client.
    target: Option<Arc<OwnedFd>>,
    /// Whether the thread is writing bytes that it took out of the buffer.
    writing: bool,
    /// Whether new output is refused. Buffered output is still written.
    closed: bool,
}

/// The output buffer of a console. Lock order: last, no other lock is taken while it is locked.
#[derive(Debug)]
pub struct Outbox {
    state: Mutex<OutboxState>,
    /// Signals the thread that there are bytes, a target, or the end.
    filled: Condvar,
    /// Signals writers that the buffer has shrunk, or that they must not wait.
    emptied: Condvar,
    /// Counts the output and reports failures; `None` for the clients of a socket.
    output: Option<Output>,
}

impl Outbox {
    /// An empty buffer for `target`.
    pub fn new(when_full: WhenFull, target: Option<OwnedFd>, output: Option<Output>) -> Self {
        let state = OutboxState {
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
            output,
        }
    }

    /// A buffer that drops all output.
    pub fn closed() -> Self {
        let outbox = Self::new(WhenFull::DropNewest, None, None);
        outbox.lock().closed = true;
        outbox
    }

    /// A writer into the buffer.
    pub fn handle(self: &Arc<Self>) -> impl Write + Send + use<> {
        OutboxWriter(Arc::clone(self))
    }

    /// Puts `bytes` into the buffer. What does not fit is treated by its [`WhenFull`].
    pub fn put(&self, bytes: &[u8]) {
        let mut state = self.lock();
        let mut rest = bytes;
        while !rest.is_empty() && !state.closed {
            let capacity = BUFFER_MAX - state.buffer.len();
            let (now, later) = rest.split_at(capacity.min(rest.len()));
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

    /// Sets the descriptor to write to.
    pub fn attach(&self, target: Arc<OwnedFd>) {
        self.lock().target = Some(target);
        self.filled.notify_one();
    }

    /// Removes the descriptor, if it still is `target`.
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

    /// Ends all waiting: from now on, output that does not fit is dropped.
    pub fn release(&self) {
        let mut state = self.lock();
        if state.when_full == WhenFull::Wait {
            state.when_full = WhenFull::DropNewest;
        }
        drop(state);
        self.emptied.notify_all();
    }

    /// Refuses new output. The thread ends when it has written the buffer.
    pub fn close(&self) {
        self.lock().closed = true;
        self.filled.notify_all();
        self.emptied.notify_all();
    }

    /// Waits until all output that has a target is written. Returns false if `limit` passes first.
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

    /// Body of the output thread: writes the buffer's contents until it is closed.
    pub fn run(this: Arc<Self>) {
        while let Some((bytes, target)) = this.take() {
            let written = write_all(&target, &bytes, this.output.as_ref());
            this.lock().writing = false;
            if let Err(error) = written {
                match error.kind() {
                    // The reader of a pipe, or the client of a socket, closed its end.
                    ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                        tracing::info!("console output is dropped: its reader closed");
                    }
                    _ => tracing::info!("console output is dropped: it cannot be written: {error}"),
                }
                this.detach(&target);
            }
            this.emptied.notify_all();
        }
    }

    /// Waits for bytes to write; `None` when the buffer is closed and empty, or its target failed.
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
                // The pipe or file failed for good: writers must not wait for it.
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

    fn lock(&self) -> MutexGuard<'_, OutboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes into the buffer.
struct OutboxWriter(Arc<Outbox>);

impl Write for OutboxWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.put(bytes);
        Ok(bytes.len())
    }

    /// Does nothing: the thread writes at once, and devices flush after every byte.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes all of `bytes`, also to a descriptor that does not block: another process that shares it
/// may have set that.
fn write_all(target: &OwnedFd, bytes: &[u8], output: Option<&Output>) -> io::Result<()> {
    let write = |part: &[u8]| Ok(rustix::io::write(target, part)?);
    let mut rest = bytes;
    while !rest.is_empty() {
        let written = match output {
            Some(output) => output.write_with(rest, write),
            None => write(rest),
        };
        match written {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                poll(
                    &mut [PollFd::from_borrowed_fd(target.as_fd(), PollFlags::OUT)],
                    None,
                )?;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
