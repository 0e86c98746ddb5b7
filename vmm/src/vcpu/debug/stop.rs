//! The requirements of a debugger for a vCPU, and the stops that the vCPU reports to it.

use std::fmt;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use hindsight_cpu::state::CpuState;
pub use hindsight_cpu::stops::ResumeAction;
use hindsight_cpu::stops::{StopConditions, StopHit};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::sync::lock;
use crate::vcpu::crash::CrashCause;
use crate::vcpu::run_control::GuestEnd;

/// What a debugger requires of a vCPU. It stays in force when the vCPU changes engines.
#[derive(Debug, Default)]
pub struct DebugRequests {
    /// What the vCPU does when it resumes: run, or step.
    pub action: ResumeAction,
    /// The stop conditions of the vCPU.
    pub stops: StopConditions,
    /// A stop to report before anything more executes.
    pub due: Option<StopReason>,
}

impl DebugRequests {
    /// Whether interrupts and NMIs are held back.
    pub const fn masks_interrupts(&self) -> bool {
        matches!(
            self.action,
            ResumeAction::Step {
                mask_interrupts: true,
                ..
            }
        )
    }

    /// Whether the vCPU single-steps.
    pub const fn steps(&self) -> bool {
        matches!(self.action, ResumeAction::Step { .. })
    }

    /// Whether a range step that has reached this linear address continues.
    pub fn in_range(&self, at: u64) -> bool {
        matches!(self.action, ResumeAction::Step { range: Some((from, to)), .. } if (from..to).contains(&at))
    }
}

/// Why a vCPU stopped by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The vCPU reached one of its stop conditions.
    Hit(StopHit),
    /// The vCPU completed a [`ResumeAction::Step`].
    Stepped,
    /// Going backwards, it reached the beginning of the run.
    Begin,
    /// The guest cannot continue.
    Crash(CrashCause),
    /// The guest ended a run that can be reversed from its end.
    End(GuestEnd),
    /// The vCPU did not resume.
    ///
    /// KVM cannot do what the debugger requires, and the machine may not change to the interpreter.
    Unsupported(Unsupported),
}

/// The report of a vCPU that stopped by itself.
#[derive(Debug)]
pub struct StopReport {
    /// The vCPU.
    pub id: usize,
    /// Why it stopped.
    pub reason: StopReason,
    /// The vCPU's state, which a debugger reads first; `None` if it must be requested.
    pub state: Option<Box<CpuState>>,
}

/// Stop reports on their way from the vCPUs to a debugger.
#[derive(Debug)]
pub struct StopReports {
    requested: AtomicBool,
    queue: Mutex<Vec<StopReport>>,
    /// Readable while the queue is not empty.
    event: OwnedFd,
}

impl StopReports {
    /// An empty queue; reports are not requested yet.
    ///
    /// # Errors
    ///
    /// When the host has no more file descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            requested: AtomicBool::new(false),
            queue: Mutex::default(),
            event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        })
    }

    /// Requests reports. From now on, a vCPU that stops waits for
    /// [`crate::vcpu::run_control::VcpuControl::hold_only`].
    pub fn request(&self) {
        self.requested.store(true, Ordering::SeqCst);
    }

    /// Whether a debugger requested reports.
    pub fn requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// Queues a report.
    pub fn push(&self, report: StopReport) {
        lock(&self.queue).push(report);
        self.signal();
    }

    /// Makes [`StopReports::as_fd`] readable.
    pub fn signal(&self) {
        // Fails only when the counter is full, and then the event is signalled already.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// Takes all reports.
    pub fn take(&self) -> Vec<StopReport> {
        let mut count = [0; 8];
        // Fails when nothing was signalled.
        let _ = rustix::io::read(&self.event, &mut count);
        std::mem::take(&mut *lock(&self.queue))
    }
}

impl AsFd for StopReports {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Why KVM cannot do what a debugger requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unsupported {
    /// More breakpoints, or more watched bytes, than a processor has debug registers for.
    TooMany,
    /// A stop at reads but not at writes.
    ReadsOnly,
    /// A stop at another event than execution or a data access: an exception, a port, an MSR or a
    /// control register.
    Kind,
    /// The guest has enabled breakpoints of its own.
    GuestBreakpoints,
    /// A step of a vCPU that does more than execute its next instruction.
    Step,
    /// Recording branches.
    Branches,
    /// This host's KVM lacks it: the probe that showed it, with its finding.
    Probe(String),
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooMany => "a processor has only four breakpoints, of at most 8 aligned bytes",
            Self::ReadsOnly => "no processor stops at reads but not at writes",
            Self::Kind => "no processor has breakpoints for that",
            Self::GuestBreakpoints => "the guest uses breakpoints of its own",
            Self::Step => {
                "KVM cannot step a vCPU that is halted, single-steps itself, or is interrupted"
            }
            Self::Branches => "KVM records no branches",
            Self::Probe(found) => return write!(f, "this host's KVM does not support it: {found}"),
        })
    }
}
