//! How vCPUs resume, and why they stop.

use hindsight_cpu::state::CpuState;
use hindsight_cpu::stops::{ResumeAction, StopConditions, StopHit};

/// How one vCPU resumes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VcpuResume {
    /// What it does.
    pub action: ResumeAction,
    /// What it stops for. These replace all earlier conditions.
    pub stops: StopConditions,
    /// Whether the conditions differ from those of this vCPU's last resume.
    pub stops_changed: bool,
}

/// The report of a vCPU that stopped by itself.
#[derive(Clone, Debug)]
pub struct VcpuStop {
    /// The vCPU.
    pub vcpu: usize,
    /// Why it stopped.
    pub cause: StopCause,
    /// Its state, where that is at hand; else the debugger calls [`super::DebugTarget::state`].
    pub state: Option<Box<CpuState>>,
}

/// Why a vCPU stopped by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopCause {
    /// It met one of its stop conditions.
    Hit(StopHit),
    /// It completed a step, forwards or backwards.
    Stepped,
    /// Going backwards, it reached the beginning of the run.
    HistoryBegin,
    /// The guest cannot continue. Resuming ends the machine.
    Crash(GuestCrash),
    /// The guest requested the end of a run that can go back from there: one clause that names the
    /// end. Resuming ends the machine.
    RunEnd(String),
    /// It did not resume: see [`super::ResumeError::Refused`].
    Refused(String),
}

/// A guest that cannot continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestCrash {
    /// One line: what happened, at which instruction.
    pub summary: String,
    /// The signal that stands for it.
    pub signal: CrashSignal,
}

/// The signal by which a client sees a guest's crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CrashSignal {
    /// SIGILL: the engine lacks the instruction.
    IllegalInstruction,
    /// SIGABRT: anything else, such as a triple fault.
    Abort,
}
