//! Limits the rate of log messages that a guest or a client can cause.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::lock;

/// The interval in which at most [`BURST`] messages are logged.
const INTERVAL: Duration = Duration::from_secs(5);

/// Maximum number of messages in one [`INTERVAL`].
const BURST: u32 = 10;

/// The limit of one message, in a `static` beside the place that logs it.
#[derive(Debug)]
pub struct LogLimit(Mutex<Interval>);

#[derive(Debug)]
struct Interval {
    start: Option<Instant>,
    /// Messages in this interval, logged or not.
    count: u32,
}

/// Ends a message that may be logged: says how many were not logged before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Suppressed(u32);

impl fmt::Display for Suppressed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " ({count} more were not logged)"),
        }
    }
}

impl LogLimit {
    /// A limit that has not been used.
    #[expect(
        clippy::new_without_default,
        reason = "it is for statics, which need a const fn"
    )]
    pub const fn new() -> Self {
        Self(Mutex::new(Interval {
            start: None,
            count: 0,
        }))
    }

    /// Counts a message; `None` if it must not be logged.
    pub fn admit(&self) -> Option<Suppressed> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<Suppressed> {
        let mut interval = lock(&self.0);
        let over = |start| now.saturating_duration_since(start) >= INTERVAL;
        let suppressed = if interval.start.is_none_or(over) {
            let suppressed = interval.count.saturating_sub(BURST);
            *interval = Interval {
                start: Some(now),
                count: 0,
            };
            suppressed
        } else {
            0
        };
        interval.count = interval.count.saturating_add(1);
        (interval.count <= BURST).then_some(Suppressed(suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_is_admitted_and_the_rest_counted() {
        let (limit, start) = (LogLimit::new(), Instant::now());
        for _ in 0..BURST {
            assert_eq!(limit.admit_at(start), Some(Suppressed(0)));
        }
        for _ in 0..7 {
            assert_eq!(limit.admit_at(start + INTERVAL / 2), None);
        }
        let next = limit.admit_at(start + INTERVAL).unwrap();
        assert_eq!(next, Suppressed(7));
        assert_eq!(next.to_string(), " (7 more were not logged)");
        let later = limit.admit_at(start + INTERVAL).unwrap();
        assert_eq!(later.to_string(), "");
    }
}
