//! A deterministic machine under a debugger: what is asked of it, and going forwards.

use std::sync::Arc;

use hindsight_cpu::state::CpuState;
use hindsight_cpu::stops::{StopConditions, StopHit};

use crate::deterministic::{CheckpointLimits, Timeline};
use crate::deterministic::{DeterministicMachine, RunStop};
use crate::kvm::KvmError;
use crate::state::RestoreError;
use crate::vcpu::board::Board;
use crate::vcpu::debug::inspect::{InspectRequest, PausedVcpu};
use crate::vcpu::debug::stop::{ResumeAction, StopReason, StopReport};
use crate::vcpu::engine::policy::Engine;
use crate::vcpu::model::VcpuModel;
use crate::vcpu::run_control::{Checkpoint, CheckpointState};
use crate::vcpu::stats::VcpuStats;

/// The machine, what the debugger stops for, and what each processor is to do.
pub(super) struct DebuggedMachine {
    pub(super) timeline: Timeline,
    pub(super) board: Arc<Board>,
    pub(super) stops: StopConditions,
    plans: Vec<ResumeAction>,
}

/// Runs the machine until it stops, as the debugger wants it. Gives it back.
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
        plans: vec![ResumeAction::Run; cpus],
    };
    while debugged.wait() == Checkpoint::Run {
        match debugged.go() {
            Ok(Some((cpu, stop))) => debugged.report(cpu, stop),
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(target: "gdb", "{error}");
                return Err(error);
            }
        }
    }
    Ok(debugged.timeline.into_machine())
}

/// DebuggedVcpu processor of the machine, for the debugger.
struct DebuggedVcpu<'a> {
    debugged: &'a mut DebuggedMachine,
    cpu: usize,
}

impl DebuggedMachine {
    pub(super) fn cpus(&mut self) -> usize {
        self.timeline.machine().vcpus.len()
    }

    /// Waits out a pause, serving requests.
    fn wait(&mut self) -> Checkpoint {
        let board = self.board.clone();
        let place = CheckpointState {
            ids: 0..self.cpus(),
            engine: Engine::Interp,
            movable: Some(false),
        };
        board.run.vcpus.doorbell(0).answer();
        let serve = &mut |cpu, request: InspectRequest| {
            request(&mut DebuggedVcpu {
                debugged: self,
                cpu,
            });
        };
        match board.run.vcpus.checkpoint(place, serve) {
            Checkpoint::Stop => Checkpoint::Stop,
            _ => Checkpoint::Run,
        }
    }

    fn report(&mut self, cpu: usize, stop: StopReason) {
        (0..self.cpus()).for_each(|id| self.board.run.vcpus.hold(id));
        let report = StopReport {
            id: cpu,
            reason: stop,
            state: None,
        };
        self.board.run.stops.push(report);
    }

    /// Does what is planned. `None`: it was interrupted, or the run is over.
    fn go(&mut self) -> Result<Option<(usize, StopReason)>, RestoreError> {
        let planned = self
            .plans
            .iter()
            .position(|plan| *plan != ResumeAction::Run);
        if !self.goes_back() && self.end() {
            return Ok(None);
        }
        let Some(cpu) = planned else {
            let ended = self.timeline.run_to(u64::MAX)?;
            return Ok(self.debugger_stop(ended));
        };
        match self.plans[cpu] {
            ResumeAction::StepBack { mask_interrupts } => self.step_back(cpu, mask_interrupts),
            ResumeAction::RunBack => self.run_back(cpu),
            ResumeAction::Step {
                mask_interrupts,
                range,
            } => self.step(cpu, range, mask_interrupts),
            ResumeAction::Run => Ok(None),
        }
    }

    fn goes_back(&self) -> bool {
        let mut plans = self.plans.iter();
        plans.any(|plan| matches!(plan, ResumeAction::StepBack { .. } | ResumeAction::RunBack))
    }

    /// Ends the machine for good where its guest ended or crashed: the debugger has seen that, and
    /// goes on. `false`: it did neither.
    fn end(&mut self) -> bool {
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

    /// What the debugger hears of the end of a run.
    fn debugger_stop(&mut self, ended: RunStop) -> Option<(usize, StopReason)> {
        match ended {
            RunStop::Hit { cpu, hit } => Some((cpu, StopReason::Hit(hit))),
            RunStop::Crashed { cpu } => {
                let vcpu = self.timeline.machine().vcpus.get(cpu)?;
                Some((cpu, StopReason::Crash(vcpu.crashed.clone()?)))
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

    /// Arms the stops but the one at the next instruction of a processor.
    pub(super) fn arm_past(&mut self, cpu: usize) {
        let mut stops = self.stops.clone();
        let (at, _) = self.frame(cpu);
        stops.execute.retain(|&pc| pc != at);
        self.timeline.machine().set_stops(&stops);
    }

    /// Arms the stops, those at instructions or not.
    pub(super) fn arm(&mut self, execute: bool) {
        let mut stops = self.stops.clone();
        if !execute {
            stops.execute.clear();
        }
        self.timeline.machine().set_stops(&stops);
    }

    pub(super) fn retired(&mut self, cpu: usize) -> u64 {
        let vcpu = self.timeline.machine().vcpus.get(cpu);
        vcpu.map_or(0, crate::deterministic::InterpVcpu::retired)
    }

    /// Where a processor is: the linear address of its next instruction, and its stack pointer.
    pub(super) fn frame(&mut self, cpu: usize) -> (u64, u64) {
        let vcpu = self.timeline.machine().vcpus.get(cpu);
        vcpu.map_or((0, 0), |vcpu| {
            (vcpu.vcpu.code_address(), vcpu.vcpu.stack_pointer())
        })
    }

    /// Interrupts that a processor took since the last checkpoint that was gone to.
    fn interrupts(&mut self, cpu: usize) -> u64 {
        let vcpu = self.timeline.machine().vcpus.get(cpu);
        vcpu.map_or(0, crate::deterministic::InterpVcpu::interrupts)
    }

    /// DebuggedVcpu instruction of one processor, or as many as stay in a range. A quiet step of an instruction
    /// that an interrupt comes before is over when the handler is, too: were the interrupt to wait,
    /// this would be another run.
    fn step(
        &mut self,
        cpu: usize,
        range: Option<(u64, u64)>,
        quiet: bool,
    ) -> Result<Option<(usize, StopReason)>, RestoreError> {
        let found = loop {
            let (before, at) = (self.retired(cpu), self.frame(cpu));
            // The handler of an interrupt may have a breakpoint.
            self.arm_past(cpu);
            let interrupts = self.interrupts(cpu);
            let next = self.timeline.place().wrapping_add(1);
            let ended = self.run_or_raise(next)?;
            let raised = ended == RunStop::Delivered { cpu };
            if !raised && !matches!(ended, RunStop::Reached | RunStop::Delivered { .. }) {
                break self.debugger_stop(ended);
            }
            if !raised && self.retired(cpu) == before {
                continue;
            }
            if quiet && self.interrupts(cpu) != interrupts {
                if let Some(ended) = self.finish_handler(cpu, at)? {
                    break self.debugger_stop(ended);
                }
                continue;
            }
            let (pc, _) = self.frame(cpu);
            if !range.is_some_and(|(from, to)| (from..to).contains(&pc)) {
                break Some((cpu, StopReason::Stepped));
            }
            if self.stops.execute.contains(&pc) {
                break Some((cpu, StopReason::Hit(StopHit::Execute(pc))));
            }
        };
        self.arm(true);
        Ok(found)
    }

    /// Runs to a place, or until an exception was delivered.
    pub(super) fn run_or_raise(&mut self, place: u64) -> Result<RunStop, RestoreError> {
        self.timeline.machine().stop_at_exceptions(true);
        let ended = self.timeline.run_to(place);
        self.timeline.machine().stop_at_exceptions(false);
        ended
    }

    /// Runs on until a processor is back at the instruction that was interrupted, whose address and
    /// stack pointer these are. Anything else that ends that is answered.
    fn finish_handler(
        &mut self,
        cpu: usize,
        at: (u64, u64),
    ) -> Result<Option<RunStop>, RestoreError> {
        let mut stops = self.stops.clone();
        stops.execute.push(at.0);
        loop {
            self.timeline.machine().set_stops(&stops);
            let ended = self.timeline.run_to(u64::MAX)?;
            self.arm(false);
            let passed = match ended {
                RunStop::Hit {
                    cpu: who,
                    hit: StopHit::Execute(pc),
                } => {
                    if who == cpu && self.frame(cpu) == at {
                        return Ok(None);
                    }
                    !self.stops.execute.contains(&pc)
                }
                _ => false,
            };
            if !passed {
                return Ok(Some(ended));
            }
            let next = self.timeline.place().wrapping_add(1);
            let ended = self.timeline.run_to(next)?;
            if ended != RunStop::Reached {
                return Ok(Some(ended));
            }
        }
    }
}

impl DebuggedVcpu<'_> {
    fn vcpu(&mut self) -> &mut crate::deterministic::InterpVcpu {
        &mut self.debugged.timeline.machine().vcpus[self.cpu]
    }

    /// What was changed from outside has made another future.
    fn changed(&mut self) {
        self.debugged.timeline.forget_future();
    }
}

impl PausedVcpu for DebuggedVcpu<'_> {
    fn engine(&self) -> Engine {
        Engine::Interp
    }

    fn state(&mut self) -> Result<CpuState, KvmError> {
        PausedVcpu::state(self.vcpu())
    }

    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError> {
        PausedVcpu::set_state(self.vcpu(), state)?;
        self.changed();
        Ok(())
    }

    fn model(&mut self) -> &mut VcpuModel {
        PausedVcpu::model(self.vcpu())
    }

    fn set_resume_action(&mut self, plan: ResumeAction) {
        self.debugged.plans[self.cpu] = plan;
    }

    fn set_stops(&mut self, stops: &StopConditions) {
        self.debugged.stops = stops.clone();
        self.vcpu().vcpu.set_stops(stops);
    }

    fn write_msr(&mut self, index: u32, value: u64) -> Result<bool, KvmError> {
        let done = PausedVcpu::write_msr(self.vcpu(), index, value)?;
        self.changed();
        Ok(done)
    }

    fn memory_written(&mut self, at: u64, len: u64) {
        PausedVcpu::memory_written(self.vcpu(), at, len);
        self.changed();
    }

    fn retired(&self) -> Option<u64> {
        Some(self.debugged.timeline.place())
    }

    fn stats(&mut self) -> VcpuStats {
        let vcpu = self.debugged.timeline.machine().vcpus.get(self.cpu);
        vcpu.map_or_else(VcpuStats::default, crate::deterministic::InterpVcpu::stats)
    }

    fn go_to(&mut self, place: u64) -> Option<bool> {
        // Time passes only on the way.
        let clock = self.debugged.board.time.clock.clone();
        clock.resume();
        let there = self.debugged.travel_paused(place);
        clock.pause();
        Some(matches!(there, Ok(true)))
    }
}
