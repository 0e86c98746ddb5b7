//! How many descriptors each share may hold.

use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors of the process for everything but files of shares.
const RESERVE: usize = 512;
/// Descriptors of all shares if the host has no lower limit. Each pins an inode in the host's
/// kernel.
const MAX: usize = 1 << 16;
/// Descriptors of one share if the host's limit is very low.
const MIN: usize = 64;

/// Shares of this process, between which the descriptors are divided.
static SHARES: AtomicUsize = AtomicUsize::new(0);

/// The number of descriptors that a share may hold.
#[derive(Debug)]
pub(super) struct Budget {
    all_shares: usize,
}

impl Budget {
    /// Raises the process's limit of open files to the host's maximum, and divides it between the
    /// shares.
    pub(super) fn new() -> Self {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let raised = Rlimit {
            current: maximum,
            maximum,
        };
        let limit = match setrlimit(Resource::Nofile, raised) {
            Ok(()) => maximum,
            Err(error) => {
                tracing::warn!("the limit of open files cannot be raised: {error}");
                current
            }
        };
        let limit = limit.map_or(MAX, |limit| usize::try_from(limit).unwrap_or(MAX));
        SHARES.fetch_add(1, Ordering::Relaxed);
        Self {
            all_shares: limit.saturating_sub(RESERVE).min(MAX),
        }
    }

    /// The descriptors of this share. They become fewer when another share is opened.
    pub(super) fn descriptors(&self) -> usize {
        let shares = SHARES.load(Ordering::Relaxed).max(1);
        (self.all_shares / shares).max(MIN)
    }

    /// A budget of at least 64 descriptors for tests.
    #[cfg(test)]
    pub(super) fn of(all_shares: usize) -> Self {
        SHARES.fetch_add(1, Ordering::Relaxed);
        Self { all_shares }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        SHARES.fetch_sub(1, Ordering::Relaxed);
    }
}
