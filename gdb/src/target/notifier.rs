//! A file descriptor by which one thread wakes another one.

use std::io;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// An eventfd: readable from [`Notifier::notify`] to [`Notifier::clear`].
///
/// For the implementer of [`super::DebugTarget::stop_event`]: queue the report, then notify; clear,
/// then take the queue.
#[derive(Debug)]
pub struct Notifier(OwnedFd);

impl Notifier {
    /// A notifier that is not readable yet.
    ///
    /// # Errors
    ///
    /// When the host has no more file descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC,
        )?))
    }

    /// Makes it readable.
    pub fn notify(&self) {
        // Fails only when the counter is full, and then it is readable already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes it not readable.
    pub fn clear(&self) {
        let mut count = [0; 8];
        // Fails when it is not readable.
        let _ = rustix::io::read(&self.0, &mut count);
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_readable(notifier: &Notifier) -> bool {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(notifier, PollFlags::IN)];
        poll(&mut fds, Some(&now)).unwrap() != 0
    }

    #[test]
    fn notifier_is_readable_until_it_is_cleared() {
        let notifier = Notifier::new().unwrap();
        assert!(!is_readable(&notifier));
        notifier.notify();
        notifier.notify();
        assert!(is_readable(&notifier));
        notifier.clear();
        assert!(!is_readable(&notifier));
        notifier.clear();
    }
}
