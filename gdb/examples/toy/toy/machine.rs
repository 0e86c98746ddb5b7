//! The toy's thread, and how its vCPU runs, steps and goes back.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use hindsight_cpu::stops::{ResumeAction, StopConditions, StopHit};
use hindsight_gdb::target::{CrashSignal, GuestCrash, Notifier, StopCause, VcpuStop};

use super::cpu::{Effect, ToyCpu};
use super::target::ToyTarget;

/// How many instructions run until the thread lets the debugger in.
const SLICE: u32 = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Paused,
    Running,
    /// With the exit status; `None`: the debugger has ended the machine.
    Ended(Option<u8>),
}

/// The branches that are kept for a debugger.
pub struct ToyTrace {
    pub limit: usize,
    pub branches: VecDeque<(u64, u64)>,
    pub total: u64,
    pub start: u64,
}

/// Everything that the toy's thread and the debugger share.
pub struct Inner {
    pub phase: Phase,
    pub cpu: ToyCpu,
    /// The machine at the beginning of the run, from which every instruction can be reached again.
    pub start: ToyCpu,
    pub action: ResumeAction,
    pub stops: StopConditions,
    /// Reports that the debugger has not taken.
    pub reports: Vec<VcpuStop>,
    pub trace: Option<ToyTrace>,
    /// The last report was one of the end of the run.
    pub end_reported: bool,
}

pub struct Shared {
    inner: Mutex<Inner>,
    pub changed: Condvar,
    pub stop_event: Notifier,
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the machine; the first end counts.
    pub fn end(&self, status: Option<u8>) {
        let mut inner = self.lock();
        if !matches!(inner.phase, Phase::Ended(_)) {
            inner.phase = Phase::Ended(status);
        }
        self.changed.notify_all();
    }
}

/// A toy machine, which starts paused and ends when it is dropped.
pub struct ToyMachine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl ToyMachine {
    /// Starts the thread of the vCPU.
    pub fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared {
            inner: Mutex::new(Inner {
                phase: Phase::Paused,
                cpu: ToyCpu::new(),
                start: ToyCpu::new(),
                action: ResumeAction::Run,
                stops: StopConditions::default(),
                reports: Vec::new(),
                trace: None,
                end_reported: false,
            }),
            changed: Condvar::new(),
            stop_event: Notifier::new()?,
        });
        let thread_shared = shared.clone();
        let run = move || run_vcpu(&thread_shared);
        let thread = thread::Builder::new().name("toy vCPU".into()).spawn(run)?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// The machine for a debugger.
    pub fn target(&self) -> ToyTarget {
        ToyTarget::new(self.shared.clone())
    }

    /// Waits for the end of the machine and returns its exit status.
    pub fn wait(&self) -> Option<u8> {
        let mut inner = self.shared.lock();
        loop {
            if let Phase::Ended(status) = inner.phase {
                return status;
            }
            inner = self
                .shared
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for ToyMachine {
    fn drop(&mut self) {
        self.shared.end(None);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has printed its message.
            let _ = thread.join();
        }
    }
}

/// The thread of the vCPU: it holds the lock while the guest runs, and so is paused whenever another
/// thread holds it.
fn run_vcpu(shared: &Shared) {
    let mut inner = shared.lock();
    loop {
        match inner.phase {
            Phase::Ended(_) => return,
            Phase::Paused => {
                inner = shared
                    .changed
                    .wait(inner)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            Phase::Running => {
                if let Some(cause) = inner.run_slice() {
                    inner.phase = Phase::Paused;
                    let ends = matches!(cause, StopCause::RunEnd(_) | StopCause::Crash(_));
                    inner.end_reported = ends;
                    let state = Some(Box::new(inner.cpu.state.clone()));
                    inner.reports.push(VcpuStop {
                        vcpu: 0,
                        cause,
                        state,
                    });
                    shared.stop_event.notify();
                }
                drop(inner);
                thread::yield_now();
                inner = shared.lock();
            }
        }
    }
}

impl Inner {
    /// Runs as requested for a while. Returns why the vCPU stopped.
    fn run_slice(&mut self) -> Option<StopCause> {
        match self.action {
            ResumeAction::Run => (0..SLICE).find_map(|_| self.run_one()),
            ResumeAction::Step { range, .. } => {
                if let Some(cause) = self.execute() {
                    return Some(cause);
                }
                let (from, to) = range.unwrap_or((0, 0));
                if (from..to).contains(&self.cpu.state.rip) {
                    return None;
                }
                Some(StopCause::Stepped)
            }
            ResumeAction::StepBack { .. } => Some(self.step_back()),
            ResumeAction::RunBack => Some(self.run_back()),
        }
    }

    /// Executes the next instruction, unless a breakpoint is set at it.
    fn run_one(&mut self) -> Option<StopCause> {
        let rip = self.cpu.state.rip;
        if self.stops.execute.contains(&rip) {
            return Some(StopCause::Hit(StopHit::Execute(rip)));
        }
        self.execute()
    }

    /// Executes the next instruction.
    fn execute(&mut self) -> Option<StopCause> {
        match self.cpu.step() {
            Effect::None => None,
            Effect::Store(at) => {
                let mut watchpoints = self.stops.watchpoints.iter();
                let found = watchpoints.find(|w| w.write && w.overlaps(at, 8));
                found.map(|&watchpoint| {
                    StopCause::Hit(StopHit::Watchpoint {
                        watchpoint,
                        at,
                        write: true,
                    })
                })
            }
            Effect::Branch(from, to) => {
                if let Some(trace) = &mut self.trace {
                    trace.total += 1;
                    trace.branches.push_back((from, to));
                    if trace.branches.len() > trace.limit {
                        trace.branches.pop_front();
                    }
                }
                None
            }
            Effect::Halt => Some(StopCause::RunEnd("the guest halts".to_owned())),
            Effect::Illegal => Some(StopCause::Crash(GuestCrash {
                summary: format!("the toy lacks the instruction at {:#x}", self.cpu.state.rip),
                signal: CrashSignal::IllegalInstruction,
            })),
        }
    }

    /// Goes to an instruction, and returns whether the run gets there.
    pub fn go_to(&mut self, icount: u64) -> bool {
        self.end_reported = false;
        self.cpu = self.start.clone();
        while self.cpu.icount < icount {
            if matches!(self.cpu.step(), Effect::Halt | Effect::Illegal) {
                break;
            }
        }
        self.cpu.icount == icount
    }

    /// Goes back by one instruction. Where that undoes a write to a watched address, reports it.
    fn step_back(&mut self) -> StopCause {
        let Some(icount) = self.cpu.icount.checked_sub(1) else {
            return StopCause::HistoryBegin;
        };
        if icount < self.start.icount {
            return StopCause::HistoryBegin;
        }
        self.go_to(icount);
        let trace = self.trace.take();
        let undone = self.execute();
        self.trace = trace;
        self.go_to(icount);
        undone.unwrap_or(StopCause::Stepped)
    }

    /// Goes back to the last instruction before this one that met a stop condition: runs forwards from
    /// the beginning, and remembers the last one.
    fn run_back(&mut self) -> StopCause {
        let end = self.cpu.icount;
        let (mut last, mut cause) = (self.start.icount, StopCause::HistoryBegin);
        self.cpu = self.start.clone();
        let trace = self.trace.take();
        while self.cpu.icount < end {
            let (rip, icount) = (self.cpu.state.rip, self.cpu.icount);
            if self.stops.execute.contains(&rip) {
                (last, cause) = (icount, StopCause::Hit(StopHit::Execute(rip)));
            }
            match self.execute() {
                None => {}
                Some(hit @ StopCause::Hit(_)) => (last, cause) = (icount, hit),
                Some(_) => break,
            }
        }
        self.trace = trace;
        self.go_to(last);
        cause
    }

    /// Makes the present the beginning of the run: the debugger has changed the machine.
    pub fn forget_past(&mut self) {
        self.end_reported = false;
        self.start = self.cpu.clone();
    }
}
