//! What others may ask of a processor while it is paused, and what it tells them when it stops by
//! itself: the debugger's side door.
//!
//! A processor's thread owns its state. So a request is a function that this thread calls at its
//! checkpoint ([`super::control::Control::ask`]), with the processor in either way of running.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use hindsight_cpu::state::CpuState;
use hindsight_interp::{Hit, Stops};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use super::control::lock;
use super::dispatch::CrashCause;
use super::mode::Engine;
use super::models::Models;
use super::slots::Beyond;
use super::stats::VcpuStats;
use crate::kvm::KvmError;
use crate::machine::GuestEnd;

/// A paused processor.
pub trait Attended {
    /// What executes its code.
    fn engine(&self) -> Engine;

    /// Its state, complete between two instructions.
    ///
    /// # Errors
    ///
    /// When KVM does not give it.
    fn state(&mut self) -> Result<CpuState, KvmError>;

    /// Replaces its state.
    ///
    /// # Errors
    ///
    /// When KVM does not take it.
    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError>;

    /// Its models.
    fn models(&mut self) -> &mut Models;

    /// What it does when the pause ends.
    fn set_plan(&mut self, plan: Plan);

    /// What it stops for. Who asks sees to it that this way of running can do that, or is left before
    /// the processor runs on: `slots::fit` says where.
    fn set_stops(&mut self, stops: &Stops);

    /// Writes an MSR as WRMSR does. `false`: the guest would get #GP(0).
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    fn write_msr(&mut self, index: u32, value: u64) -> Result<bool, KvmError>;

    /// Memory was written by someone other than a processor: guest-physical address and length.
    fn memory_written(&mut self, at: u64, len: u64);

    /// Goes to an instruction of a deterministic run, by its number: whether it is there now. `None`:
    /// this is no such run.
    fn go_to(&mut self, _place: u64) -> Option<bool> {
        None
    }

    /// Instructions it retired, where they are counted.
    fn retired(&self) -> Option<u64>;

    /// What it did so far.
    fn stats(&mut self) -> VcpuStats;
}

/// Something that a paused processor's thread is to do.
pub type Request = Box<dyn FnOnce(&mut dyn Attended) + Send>;

/// How a processor runs when a pause ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Plan {
    /// Until something stops it.
    #[default]
    Run,
    /// One instruction, or until RIP leaves the addresses from the first to before the second.
    Step {
        /// Interrupts wait meanwhile.
        quiet: bool,
        /// Goes on as long as RIP is in here.
        range: Option<(u64, u64)>,
    },
    /// One instruction backwards, in a deterministic run.
    StepBack {
        /// Not into the handler of an interrupt.
        quiet: bool,
    },
    /// Backwards to the last stop, in a deterministic run.
    RunBack,
}

/// What a debugger wants of a processor. It goes with the processor from engine to engine.
#[derive(Debug, Default)]
pub struct Orders {
    /// How it runs on.
    pub plan: Plan,
    /// What it stops for.
    pub stops: Stops,
    /// Why it stops before it executes anything more.
    pub due: Option<Stop>,
}

impl Orders {
    /// Interrupts and NMIs wait.
    pub const fn quiet(&self) -> bool {
        matches!(self.plan, Plan::Step { quiet: true, .. })
    }

    /// It steps.
    pub const fn steps(&self) -> bool {
        matches!(self.plan, Plan::Step { .. })
    }

    /// A step that ends at this linear address goes on.
    pub fn in_range(&self, at: u64) -> bool {
        matches!(self.plan, Plan::Step { range: Some((from, to)), .. } if (from..to).contains(&at))
    }
}

/// Why a processor stopped by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It reached what it stops for.
    Hit(Hit),
    /// It did its [`Plan::Step`].
    Stepped,
    /// Backwards it got to where the run began.
    Begin,
    /// The guest cannot go on.
    Crash(CrashCause),
    /// The guest has ended a run that can go back from there.
    End(GuestEnd),
    /// It does not run on: the debugger wants what KVM does not do, and KVM alone may run it.
    Beyond(Beyond),
}

/// A processor that stopped by itself.
#[derive(Debug)]
pub struct Report {
    /// Which one.
    pub id: usize,
    /// Why.
    pub stop: Stop,
    /// Its state, which whoever debugs it looks at first; `None` where it must be asked for.
    pub state: Option<Box<CpuState>>,
}

/// Stops of processors on their way to whoever debugs the machine.
#[derive(Debug)]
pub struct Reports {
    wanted: AtomicBool,
    queue: Mutex<Vec<Report>>,
    /// Readable while there is something in the queue.
    bell: OwnedFd,
}

impl Reports {
    /// Nobody wants reports yet.
    ///
    /// # Errors
    ///
    /// When the host has no more file descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            wanted: AtomicBool::new(false),
            queue: Mutex::default(),
            bell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        })
    }

    /// From now on, a processor that stops waits for [`super::control::Control::hold_only`].
    pub fn want(&self) {
        self.wanted.store(true, Ordering::SeqCst);
    }

    /// Whether somebody takes reports.
    pub fn wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst)
    }

    /// A processor stopped.
    pub fn put(&self, report: Report) {
        lock(&self.queue).push(report);
        self.ring();
    }

    /// Makes [`Reports::as_fd`] readable.
    pub fn ring(&self) {
        // Fails only when the counter is full, and then the bell rings already.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Takes all reports.
    pub fn take(&self) -> Vec<Report> {
        let mut count = [0; 8];
        // Fails when nothing rang.
        let _ = rustix::io::read(&self.bell, &mut count);
        std::mem::take(&mut *lock(&self.queue))
    }
}

impl AsFd for Reports {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
