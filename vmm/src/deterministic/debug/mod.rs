//! A deterministic machine under a debugger: pauses, and forward execution.

mod paused_vcpu;
mod reverse;
mod step;

use hindsight_cpu::stops::StopConditions;
use std::sync::Arc;

use self::paused_vcpu::DebuggedVcpu;
use super::machine::DeterministicMachine;
use super::stop::RunStop;
use super::timeline::{CheckpointLimits, Timeline};
use crate::state::RestoreError;
use crate::vcpu::board::Board;
use crate::vcpu::debug::inspect::InspectRequest;
use crate::vcpu::debug::stop::{ResumeAction, StopReason, StopReport};
use crate::vcpu::engine::policy::Engine;
use crate::vcpu::interp::InterpVcpu;
use crate::vcpu::run_control::{Checkpoint, CheckpointState};

/// A stop that is reported to the debugger: the vCPU, and why it stopped. `None`: there is nothing
/// to report, because the run was interrupted or has ended.
type DebuggerStop = Option<(usize, StopReason)>;

/// The machine, what the debugger stops for, and how each vCPU resumes.
struct DebuggedMachine {
    timeline: Timeline,
    board: Arc<Board>,
    stops: StopConditions,
    actions: Vec<ResumeAction>,
}

/// Runs the machine under a debugger until it stops, and returns it.
pub(super) fn run(
    machine: DeterministicMachine,
    board: &Arc<Board>,
    limits: CheckpointLimits,
) -> Result<DeterministicMachine, RestoreError> {
    let cpus = machine.vcpus.len();
    board.run.end.hold();
    let mut debugged = DebuggedMachine {
        timeline: Timeline::new(machine, limits)?,
        board: board.clone(),
        stops: StopConditions::default(),
        actions: vec![ResumeAction::Run; cpus],
    };
    while debugged.wait() == Checkpoint::Run {
        match debugged.resume() {
            Ok(Some((cpu, reason))) => debugged.report(cpu, reason),
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(target: "gdb", "{error}");
                return Err(error);
            }
        }
    }
    Ok(debugged.timeline.into_machine())
}

impl DebuggedMachine {
    fn cpus(&mut self) -> usize {
        self.timeline.machine().vcpus.len()
    }

    fn vcpu(&mut self, cpu: usize) -> Option<&mut InterpVcpu> {
        self.timeline.machine().vcpus.get_mut(cpu)
    }

    /// Waits for the end of a pause, and serves the debugger's requests meanwhile.
    fn wait(&mut self) -> Checkpoint {
        let board = self.board.clone();
        let state = CheckpointState {
            ids: 0..self.cpus(),
            engine: Engine::Interp,
            movable: Some(false),
        };
        board.run.vcpus.doorbell(0).answer();
        let serve = &mut |cpu, request: InspectRequest| {
            request(&mut DebuggedVcpu::new(self, cpu));
        };
        match board.run.vcpus.checkpoint(state, serve) {
            Checkpoint::Stop => Checkpoint::Stop,
            _ => Checkpoint::Run,
        }
    }

    fn report(&mut self, cpu: usize, reason: StopReason) {
        (0..self.cpus()).for_each(|id| self.board.run.vcpus.hold(id));
        let report = StopReport {
            id: cpu,
            reason,
            state: None,
        };
        self.board.run.stops.push(report);
    }

    /// Performs the resume actions. At most one vCPU has another action than to run.
    fn resume(&mut self) -> Result<DebuggerStop, RestoreError> {
        self.timeline.commit_write()?;
        let stepping = self
            .actions
            .iter()
            .position(|action| *action != ResumeAction::Run);
        if !self.is_reverse() && self.end_if_held() {
            return Ok(None);
        }
        let Some(cpu) = stepping else {
            let stop = self.timeline.run_to(u64::MAX)?;
            return Ok(self.debugger_stop(stop));
        };
        match self.actions[cpu] {
            ResumeAction::StepBack { mask_interrupts } => self.step_back(cpu, mask_interrupts),
            ResumeAction::RunBack => self.run_back(cpu),
            ResumeAction::Step {
                mask_interrupts,
                range,
            } => self.step(cpu, range, mask_interrupts),
            ResumeAction::Run => Ok(None),
        }
    }

    fn is_reverse(&self) -> bool {
        self.actions.iter().any(|action| {
            matches!(
                action,
                ResumeAction::StepBack { .. } | ResumeAction::RunBack
            )
        })
    }

    /// Ends the machine if its guest has ended the run or crashed: the debugger has inspected that,
    /// and continues. Returns `false` if it did neither.
    fn end_if_held(&mut self) -> bool {
        let board = self.board.clone();
        let vcpus = &mut self.timeline.machine().vcpus;
        let crashed = vcpus
            .iter_mut()
            .find_map(|vcpu| vcpu.crashed.take().map(|cause| (vcpu, cause)));
        match crashed {
            Some((vcpu, cause)) => vcpu.crash(&board, cause),
            None => return board.run.release_held_end(),
        }
        true
    }

    /// What to report to the debugger when a run stops.
    fn debugger_stop(&mut self, stop: RunStop) -> DebuggerStop {
        match stop {
            RunStop::Hit { cpu, hit } => Some((cpu, StopReason::Hit(hit))),
            RunStop::Crashed { cpu } => {
                let cause = self.vcpu(cpu)?.crashed.clone()?;
                Some((cpu, StopReason::Crash(cause)))
            }
            RunStop::AtEnd => {
                let cpu = self.timeline.machine().current();
                Some((cpu, StopReason::End(self.board.run.end.held()?)))
            }
            RunStop::Reached
            | RunStop::Delivered { .. }
            | RunStop::Ended
            | RunStop::Interrupted => None,
        }
    }

    /// Arms the debugger's stops, except a breakpoint at the next instruction of a vCPU.
    fn arm_past(&mut self, cpu: usize) {
        let mut stops = self.stops.clone();
        let (pc, _) = self.frame(cpu);
        stops.execute.retain(|&address| address != pc);
        self.timeline.machine().set_stops(&stops);
    }

    /// Arms the debugger's stops, with or without execution breakpoints.
    fn arm(&mut self, execute: bool) {
        let mut stops = self.stops.clone();
        if !execute {
            stops.execute.clear();
        }
        self.timeline.machine().set_stops(&stops);
    }

    /// Instructions that a vCPU has retired.
    fn retired(&mut self, cpu: usize) -> u64 {
        self.vcpu(cpu).map_or(0, |vcpu| vcpu.retired())
    }

    /// The linear address of a vCPU's next instruction, and its stack pointer.
    fn frame(&mut self, cpu: usize) -> (u64, u64) {
        self.vcpu(cpu).map_or((0, 0), |vcpu| {
            (vcpu.vcpu.code_address(), vcpu.vcpu.stack_pointer())
        })
    }

    /// Interrupts that a vCPU took since the machine was last restored.
    fn interrupts(&mut self, cpu: usize) -> u64 {
        self.vcpu(cpu).map_or(0, |vcpu| vcpu.interrupts())
    }
}
