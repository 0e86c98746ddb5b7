//! The clock of a virtual machine: time-stamp-counter ticks since its reset.
//!
//! All guest-visible time (TSC, local APIC timer, PIT, RTC) is computed from [`Clock::now`]. The
//! source is the host's counter or a virtual one that only [`Clock::advance`] moves. Devices that
//! count at another rate convert with [`Rate`], always from the absolute time, so that rounding
//! errors do not accumulate.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

/// A time or a duration in ticks of the clock.
pub type Ticks = u64;

/// Value of `held` while the clock runs.
const RUNNING: u64 = u64::MAX;

const NS_PER_S: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
enum ClockSource {
    /// The host's counter, which the function reads.
    Host(fn() -> u64),
    /// A count that [`Clock::advance`] moves.
    Virtual,
}

/// The clock of a virtual machine. Reading it takes no lock; pausing and setting it do.
#[derive(Debug)]
pub struct Clock {
    source: ClockSource,
    hz: u64,
    /// Odd while a writer changes `base` and `held`; readers then read again.
    sequence: AtomicU64,
    /// Host source: the counter's value at tick 0. Virtual source: the time itself.
    base: AtomicU64,
    /// The time at which the clock is paused, or [`RUNNING`].
    held: AtomicU64,
    /// Serializes the writers of the three fields above.
    writers: Mutex<()>,
}

impl Clock {
    /// A clock that follows a host counter, with time 0 now.
    ///
    /// `read` reads the counter, which has `hz` ticks per second (0 counts as 1).
    pub fn host(hz: u64, read: fn() -> u64) -> Self {
        Self::new(ClockSource::Host(read), hz, read())
    }

    /// A clock that only [`Clock::advance`] moves.
    ///
    /// `hz` ticks are one second (0 counts as 1).
    pub fn new_virtual(hz: u64) -> Self {
        Self::new(ClockSource::Virtual, hz, 0)
    }

    fn new(source: ClockSource, hz: u64, base: u64) -> Self {
        Self {
            source,
            hz: hz.max(1),
            sequence: AtomicU64::new(0),
            base: AtomicU64::new(base),
            held: AtomicU64::new(RUNNING),
            writers: Mutex::new(()),
        }
    }

    /// The time in ticks. Monotonic, except across [`Clock::set`].
    #[inline]
    pub fn now(&self) -> Ticks {
        let ClockSource::Host(read) = self.source else {
            return self.base.load(Ordering::Acquire);
        };
        loop {
            let sequence = self.sequence.load(Ordering::Acquire);
            let held = self.held.load(Ordering::Acquire);
            let now = if held == RUNNING {
                let base = self.base.load(Ordering::Acquire);
                // Another core's counter may lag by a few ticks just after `base` was read.
                let elapsed = read().wrapping_sub(base);
                if elapsed > u64::MAX / 2 { 0 } else { elapsed }
            } else {
                held
            };
            fence(Ordering::Acquire);
            if sequence & 1 == 0 && self.sequence.load(Ordering::Relaxed) == sequence {
                return now;
            }
            std::hint::spin_loop();
        }
    }

    /// Ticks per second.
    #[inline]
    pub fn hz(&self) -> u64 {
        self.hz
    }

    /// Whether [`Clock::advance`] moves this clock.
    #[inline]
    pub fn is_virtual(&self) -> bool {
        matches!(self.source, ClockSource::Virtual)
    }

    /// The host counter's value at tick 0 (modulo 2^64), if the host's counter is the source.
    ///
    /// With a guest offset `o` (guest TSC = ticks + `o`), the offset of the guest's TSC to the
    /// host's is `o - host_base()`, modulo 2^64. Changes with [`Clock::resume`] and [`Clock::set`].
    pub fn host_base(&self) -> Option<u64> {
        match self.source {
            ClockSource::Host(_) => Some(self.base.load(Ordering::Acquire)),
            ClockSource::Virtual => None,
        }
    }

    /// Advances a virtual clock by `ticks`, unless it is paused. A host clock is not changed.
    #[inline]
    pub fn advance(&self, ticks: Ticks) {
        if self.is_virtual() && self.held.load(Ordering::Relaxed) == RUNNING {
            let before = self.base.fetch_add(ticks, Ordering::Release);
            debug_assert!(
                before.checked_add(ticks).is_some(),
                "the clock is monotonic"
            );
        }
    }

    /// Sets the time, also to an earlier one, when a snapshot is restored.
    pub fn set(&self, ticks: Ticks) {
        self.write(|held, base| match self.source {
            ClockSource::Host(_) if held != RUNNING => (ticks, base),
            ClockSource::Host(read) => (RUNNING, read().wrapping_sub(ticks)),
            ClockSource::Virtual => (if held == RUNNING { held } else { ticks }, ticks),
        });
    }

    /// Pauses the clock. Does nothing if it is paused.
    pub fn pause(&self) {
        self.write(|held, base| match self.source {
            _ if held != RUNNING => (held, base),
            ClockSource::Host(read) => (read().wrapping_sub(base), base),
            ClockSource::Virtual => (base, base),
        });
    }

    /// Continues from the time at which the clock was paused. Does nothing if it runs.
    pub fn resume(&self) {
        self.write(|held, base| match self.source {
            ClockSource::Host(read) if held != RUNNING => (RUNNING, read().wrapping_sub(held)),
            _ => (RUNNING, base),
        });
    }

    /// Whether the clock is paused.
    pub fn is_paused(&self) -> bool {
        self.held.load(Ordering::Acquire) != RUNNING
    }

    /// Replaces `(held, base)` by the result of `change`, in one step for every reader.
    fn write(&self, change: impl FnOnce(u64, u64) -> (u64, u64)) {
        let _writers = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        self.sequence.fetch_add(1, Ordering::AcqRel);
        let (held, base) = change(
            self.held.load(Ordering::Relaxed),
            self.base.load(Ordering::Relaxed),
        );
        self.base.store(base, Ordering::Release);
        self.held.store(held, Ordering::Release);
        self.sequence.fetch_add(1, Ordering::AcqRel);
    }

    /// `ticks` in nanoseconds, rounded down; saturates.
    pub fn ns_from_ticks(&self, ticks: Ticks) -> u64 {
        mul_div(ticks, NS_PER_S, self.hz)
    }

    /// `ns` nanoseconds in ticks, rounded down; saturates.
    pub fn ticks_from_ns(&self, ns: u64) -> Ticks {
        mul_div(ns, self.hz, NS_PER_S)
    }

    /// The conversion to and from a counter that runs at `hz`.
    pub fn rate(&self, hz: u64) -> Rate {
        Rate {
            clock_hz: self.hz,
            hz: hz.max(1),
        }
    }
}

fn mul_div(value: u64, multiplier: u64, divisor: u64) -> u64 {
    let wide = u128::from(value) * u128::from(multiplier) / u128::from(divisor);
    u64::try_from(wide).unwrap_or(u64::MAX)
}

/// A counter that was 0 at tick 0 and counts at a fixed rate: an oscillator of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    clock_hz: u64,
    hz: u64,
}

impl Rate {
    /// The counter's value at a time.
    #[inline]
    pub fn count(self, ticks: Ticks) -> u64 {
        mul_div(ticks, self.hz, self.clock_hz)
    }

    /// The first time at which the counter is at least `count`; saturates.
    pub fn ticks(self, count: u64) -> Ticks {
        let wide = (u128::from(count) * u128::from(self.clock_hz)).div_ceil(u128::from(self.hz));
        u64::try_from(wide).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    static COUNTER: AtomicU64 = AtomicU64::new(1000);

    fn read_counter() -> u64 {
        COUNTER.load(Ordering::Relaxed)
    }

    #[test]
    fn host_clock_keeps_its_time_while_paused_and_moves_its_base() {
        let clock = Clock::host(1000, read_counter);
        let base = COUNTER.load(Ordering::Relaxed);
        COUNTER.fetch_add(5, Ordering::Relaxed);
        assert_eq!(clock.now(), 5);
        clock.pause();
        COUNTER.fetch_add(70, Ordering::Relaxed);
        assert_eq!(clock.now(), 5);
        clock.resume();
        COUNTER.fetch_add(2, Ordering::Relaxed);
        assert_eq!(clock.now(), 7);
        assert_eq!(clock.host_base(), Some(base + 70));
        clock.set(100);
        assert_eq!(clock.now(), 100);
    }

    #[test]
    fn paused_virtual_clock_ignores_advance() {
        let clock = Clock::new_virtual(1000);
        clock.advance(3);
        clock.pause();
        clock.advance(4);
        assert_eq!(clock.now(), 3);
        clock.resume();
        clock.advance(4);
        assert_eq!(clock.now(), 7);
        assert_eq!(clock.host_base(), None);
    }

    #[test]
    fn conversion_of_large_values_does_not_overflow() {
        let clock = Clock::new_virtual(3_000_000_000);
        assert_eq!(clock.ns_from_ticks(u64::MAX), 6_148_914_691_236_517_205);
        assert_eq!(clock.ticks_from_ns(1), 3);
        assert_eq!(clock.ticks_from_ns(u64::MAX), u64::MAX);
    }

    proptest! {
        #[test]
        fn rate_ticks_returns_the_first_time_of_a_count(
            clock_hz in 1_u64..10_000_000_000,
            hz in 1_u64..100_000_000,
            count in 0_u64..1 << 40,
        ) {
            let rate = Clock::new_virtual(clock_hz).rate(hz);
            let ticks = rate.ticks(count);
            prop_assume!(ticks != u64::MAX);
            prop_assert!(rate.count(ticks) >= count);
            prop_assert!(ticks == 0 || rate.count(ticks - 1) < count);
        }
    }
}
