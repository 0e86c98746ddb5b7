//! How a run ends: set once, by any thread, and waited for.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hindsight_devices::MachineRequest;
use thiserror::Error;

use crate::kvm::KvmError;
use crate::memory::RamError;
use crate::output::OutputError;
use crate::state::RestoreError;
use crate::sync::lock;
use crate::vcpu::crash::{Crash, FinalState};

/// How a run ended.
#[derive(Debug)]
pub enum Outcome {
    /// The guest wrote a value to the debug exit port.
    Exit(u32),
    /// The guest powered the machine off.
    PowerOff,
    /// The guest requested a reset.
    Reset,
    /// The guest cannot continue.
    Crash(Box<Crash>),
    /// The guest halted with interrupts off, nothing can wake it, and that ends the run.
    Halted {
        /// The vCPU that halted last.
        cpu: usize,
        /// The address behind its HLT.
        rip: u64,
    },
    /// The time limit passed; where each vCPU was then.
    Timeout(Vec<FinalState>),
    /// The user ended the run.
    Quit,
    /// The monitor itself failed.
    Failed(Box<RunError>),
}

impl<E: Into<RunError>> From<E> for Outcome {
    fn from(error: E) -> Self {
        Self::Failed(Box::new(error.into()))
    }
}

/// A guest that halted for good, in words.
#[derive(Clone, Copy, Debug)]
pub struct HaltText {
    /// The vCPU that halted last.
    pub cpu: usize,
    /// The address behind its HLT.
    pub rip: u64,
}

impl fmt::Display for HaltText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, rip } = self;
        write!(
            f,
            "the guest halted for good: cpu {cpu} executed HLT with interrupts off before {rip:#x}, and \
             no other processor runs"
        )
    }
}

/// Why the monitor could not continue a run.
#[derive(Debug, Error)]
pub enum RunError {
    /// KVM refused.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The interpreter's view of guest memory could not be created.
    #[error(transparent)]
    Memory(#[from] RamError),
    /// A deterministic machine could not be saved or restored.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The input log cannot be written.
    #[error("the input log cannot be written")]
    InputLog(#[source] io::Error),
    /// An output cannot be written, or has reached its limit.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The input log belongs to another run.
    #[error(
        "the input log belongs to another run: at round {round}, instruction {icount}, time {ticks} it has \"{entry}\""
    )]
    ForeignInput {
        /// Round of turns.
        round: u64,
        /// Instructions retired by all vCPUs.
        icount: u64,
        /// Ticks of the virtual clock.
        ticks: u64,
        /// The entry that does not fit.
        entry: String,
    },
    /// A thread of the monitor panicked; the panic message is on stderr.
    #[error("a thread of the monitor panicked: this is a bug in hindsight")]
    Panicked,
}

/// How a guest ended its own run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestEnd {
    /// The guest requested the end through a device.
    Request(MachineRequest),
    /// The end is an entry of the replayed input log.
    Input,
}

impl fmt::Display for GuestEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(MachineRequest::Exit(code)) => {
                write!(f, "the guest ends the run with exit code {code}")
            }
            Self::Request(MachineRequest::Reset) => f.write_str("the guest resets the machine"),
            Self::Request(MachineRequest::PowerOff) => {
                f.write_str("the guest switches the machine off")
            }
            Self::Input => f.write_str("the input log ends the run"),
        }
    }
}

impl From<MachineRequest> for Outcome {
    fn from(request: MachineRequest) -> Self {
        match request {
            MachineRequest::Exit(code) => Self::Exit(code),
            MachineRequest::Reset => Self::Reset,
            MachineRequest::PowerOff => Self::PowerOff,
        }
    }
}

/// What a reset by the guest does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResetPolicy {
    /// It ends the run.
    #[default]
    End,
    /// The thread that waits for the end of the run resets the machine.
    Reboot,
    /// The thread that runs all vCPUs of a deterministic machine resets it.
    RebootInTurn,
}

/// What [`RunEnd::wait_or_reset`] waited for.
#[derive(Debug)]
pub enum RunEvent {
    /// The run ended.
    End(Outcome),
    /// The guest requested a reset, which does not end the run.
    Reset,
    /// The limit passed.
    Limit,
}

/// The end of a run.
#[derive(Debug, Default)]
pub struct RunEnd {
    resets: ResetPolicy,
    /// The guest requested a reset that was not made yet.
    reset: AtomicBool,
    outcome: Mutex<Option<Outcome>>,
    /// The time that does not count for the limit.
    excluded: Mutex<ExcludedTime>,
    set: Condvar,
    /// A guest's own end waits for a debugger, which may go back from there.
    holds: AtomicBool,
    held: Mutex<Option<GuestEnd>>,
    /// The end was an entry of recorded or replayed input.
    by_input: AtomicBool,
}

/// Time that a limit does not count: a debugger holds the guest.
#[derive(Clone, Copy, Debug, Default)]
struct ExcludedTime {
    total: Duration,
    /// Since when none counts.
    since: Option<Instant>,
}

impl RunEnd {
    /// The end of a run in which a reset by the guest does this.
    pub fn with_resets(resets: ResetPolicy) -> Self {
        Self {
            resets,
            ..Self::default()
        }
    }

    /// What a reset by the guest does.
    pub const fn resets(&self) -> ResetPolicy {
        self.resets
    }

    /// Records that the guest requested a reset.
    pub fn set_reset(&self) {
        // The thread that waits must not miss it.
        let _outcome = lock(&self.outcome);
        self.reset.store(true, Ordering::SeqCst);
        self.set.notify_all();
    }

    /// Whether the guest requested a reset; withdraws the request.
    pub fn take_reset(&self) -> bool {
        self.reset.load(Ordering::Relaxed) && self.reset.swap(false, Ordering::SeqCst)
    }

    /// Excludes the time from now on from the limit of [`RunEnd::wait`], or ends that.
    pub fn suspend_limit(&self, suspend: bool) {
        let mut excluded = lock(&self.excluded);
        excluded.since = match (suspend, excluded.since) {
            (true, since) => Some(since.unwrap_or_else(Instant::now)),
            (false, Some(since)) => {
                excluded.total += since.elapsed();
                None
            }
            (false, None) => None,
        };
        drop(excluded);
        // The thread that waits finds its new limit.
        let _outcome = lock(&self.outcome);
        self.set.notify_all();
    }

    /// The limit without the excluded time; `None` while time does not count.
    fn extended(&self, limit: Instant) -> Option<Instant> {
        let excluded = *lock(&self.excluded);
        match excluded.since {
            Some(_) => None,
            // A limit that `Instant` cannot represent is no limit.
            None => limit.checked_add(excluded.total),
        }
    }

    /// Sets the outcome; the first one counts.
    pub fn set(&self, outcome: Outcome) {
        lock(&self.outcome).get_or_insert(outcome);
        self.set.notify_all();
    }

    /// Withdraws the outcome: the machine was restored to a state before it.
    pub fn clear(&self) {
        *lock(&self.outcome) = None;
        self.by_input.store(false, Ordering::SeqCst);
    }

    /// Waits for the outcome, until `limit` if there is one, and longer by the time excluded from
    /// it.
    pub fn wait(&self, limit: Option<Instant>) -> Option<Outcome> {
        match self.wait_for(limit, false) {
            RunEvent::End(outcome) => Some(outcome),
            RunEvent::Reset | RunEvent::Limit => None,
        }
    }

    /// Like [`RunEnd::wait`], and also returns when the guest has requested a reset.
    pub fn wait_or_reset(&self, limit: Option<Instant>) -> RunEvent {
        self.wait_for(limit, self.resets == ResetPolicy::Reboot)
    }

    fn wait_for(&self, limit: Option<Instant>, resets: bool) -> RunEvent {
        let mut outcome = lock(&self.outcome);
        loop {
            if let Some(outcome) = outcome.take() {
                return RunEvent::End(outcome);
            }
            if resets && self.take_reset() {
                return RunEvent::Reset;
            }
            outcome = match limit.and_then(|limit| self.extended(limit)) {
                None => self
                    .set
                    .wait(outcome)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(limit) => {
                    let Some(left) = limit.checked_duration_since(Instant::now()) else {
                        return RunEvent::Limit;
                    };
                    self.set
                        .wait_timeout(outcome, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }

    /// From now on a guest's own end is held instead of set: see [`RunEnd::held`].
    pub fn hold(&self) {
        self.holds.store(true, Ordering::SeqCst);
    }

    /// Whether a guest's own end is held.
    pub fn holds(&self) -> bool {
        self.holds.load(Ordering::SeqCst)
    }

    /// Holds an end; the first one counts.
    pub fn set_held(&self, end: GuestEnd) {
        lock(&self.held).get_or_insert(end);
    }

    /// The end that is held, if the guest has reached one.
    pub fn held(&self) -> Option<GuestEnd> {
        *lock(&self.held)
    }

    /// Takes the end that is held.
    pub fn take_held(&self) -> Option<GuestEnd> {
        lock(&self.held).take()
    }

    /// Marks the end as caused by recorded or replayed input.
    pub fn set_by_input(&self) {
        self.by_input.store(true, Ordering::SeqCst);
    }

    /// Whether the end was caused by recorded or replayed input, so that every replay has it too.
    pub fn by_input(&self) -> bool {
        self.by_input.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn limit_is_extended_by_the_time_that_is_suspended() {
        let end = Arc::new(RunEnd::default());
        end.suspend_limit(true);
        let waiting = end.clone();
        let start = Instant::now();
        let waiter = thread::spawn(move || {
            assert!(waiting.wait(Some(start + SHORT)).is_none());
            start.elapsed()
        });
        thread::sleep(10 * SHORT);
        assert!(
            !waiter.is_finished(),
            "the limit passed while it was suspended"
        );
        end.suspend_limit(false);
        assert!(waiter.join().unwrap() >= 10 * SHORT);
    }

    #[test]
    fn outcome_ends_the_wait_while_the_limit_is_suspended() {
        let end = Arc::new(RunEnd::default());
        end.suspend_limit(true);
        end.set(Outcome::Quit);
        let outcome = end.wait(Some(Instant::now()));
        assert!(matches!(outcome, Some(Outcome::Quit)));
    }
}
