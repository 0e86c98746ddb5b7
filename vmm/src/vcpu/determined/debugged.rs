//! A deterministic machine under a debugger: what is asked of it, and going forwards.

use std::sync::Arc;

use hindsight_cpu::state::CpuState;
use hindsight_interp::{Hit, Stops};

use super::{Determined, Stop as Ended};
use crate::kvm::KvmError;
use crate::machine::Board;
use crate::snapshot::{Limits, RestoreError, Timeline};
use crate::vcpu::attend::{Attended, Plan, Report, Request, Stop};
use crate::vcpu::control::{Checkpoint, Place};
use crate::vcpu::mode::Engine;
use crate::vcpu::models::Models;
use crate::vcpu::stats::VcpuStats;

/// The machine, what the debugger stops for, and what each processor is to do.
pub(super) struct Debugged {
    pub(super) timeline: Timeline,
    pub(super) board: Arc<Board>,
    pub(super) stops: Stops,
    plans: Vec<Plan>,
}

/// Runs the machine until it stops, as the debugger wants it. Gives it back.
pub(super) fn run(
    machine: Determined,
    board: &Arc<Board>,
    limits: Limits,
) -> Result<Determined, RestoreError> {
    let cpus = machine.vcpus.len();
    board.hold_end();
    let mut debugged = Debugged {
        timeline: Timeline::new(machine, limits)?,
        board: board.clone(),
        stops: Stops::default(),
        plans: vec![Plan::Run; cpus],
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

/// One processor of the machine, for the debugger.
struct One<'a> {
    debugged: &'a mut Debugged,
    cpu: usize,
}

impl Debugged {
    pub(super) fn cpus(&mut self) -> usize {
        self.timeline.machine().vcpus.len()
    }

    /// Waits out a pause, serving requests.
    fn wait(&mut self) -> Checkpoint {
        let board = self.board.clone();
        let place = Place {
            ids: 0..self.cpus(),
            engine: Engine::Interp,
            movable: Some(false),
        };
        board.control.doorbell(0).answer();
        let serve = &mut |cpu, request: Request| {
            request(&mut One {
                debugged: self,
                cpu,
            });
        };
        match board.control.checkpoint(place, serve) {
            Checkpoint::Stop => Checkpoint::Stop,
            _ => Checkpoint::Run,
        }
    }

    fn report(&mut self, cpu: usize, stop: Stop) {
        (0..self.cpus()).for_each(|id| self.board.control.hold(id));
        let report = Report {
            id: cpu,
            stop,
            state: None,
        };
        self.board.reports.put(report);
    }

    /// Does what is planned. `None`: it was interrupted, or the run is over.
    fn go(&mut self) -> Result<Option<(usize, Stop)>, RestoreError> {
        let planned = self.plans.iter().position(|plan| *plan != Plan::Run);
        if !self.goes_back() && self.end() {
            return Ok(None);
        }
        let Some(cpu) = planned else {
            let ended = self.timeline.run_to(u64::MAX)?;
            return Ok(self.told(ended));
        };
        match self.plans[cpu] {
            Plan::StepBack { quiet } => self.step_back(cpu, quiet),
            Plan::RunBack => self.run_back(cpu),
            Plan::Step { range, quiet } => self.step(cpu, range, quiet),
            Plan::Run => Ok(None),
        }
    }

    fn goes_back(&self) -> bool {
        let mut plans = self.plans.iter();
        plans.any(|plan| matches!(plan, Plan::StepBack { .. } | Plan::RunBack))
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
            None => return board.let_end(),
        }
        true
    }

    /// What the debugger hears of the end of a run.
    fn told(&mut self, ended: Ended) -> Option<(usize, Stop)> {
        match ended {
            Ended::Hit { cpu, hit } => Some((cpu, Stop::Hit(hit))),
            Ended::Crashed { cpu } => {
                let vcpu = self.timeline.machine().vcpus.get(cpu)?;
                Some((cpu, Stop::Crash(vcpu.crashed.clone()?)))
            }
            Ended::AtEnd => {
                let cpu = self.timeline.machine().current();
                Some((cpu, Stop::End(self.board.held_end()?)))
            }
            Ended::Reached | Ended::Delivered { .. } | Ended::Ended | Ended::Interrupted => None,
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
        vcpu.map_or(0, super::ObservedVcpu::retired)
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
        vcpu.map_or(0, super::ObservedVcpu::interrupts)
    }

    /// One instruction of one processor, or as many as stay in a range. A quiet step of an instruction
    /// that an interrupt comes before is over when the handler is, too: were the interrupt to wait,
    /// this would be another run.
    fn step(
        &mut self,
        cpu: usize,
        range: Option<(u64, u64)>,
        quiet: bool,
    ) -> Result<Option<(usize, Stop)>, RestoreError> {
        let found = loop {
            let (before, at) = (self.retired(cpu), self.frame(cpu));
            // The handler of an interrupt may have a breakpoint.
            self.arm_past(cpu);
            let interrupts = self.interrupts(cpu);
            let next = self.timeline.place().wrapping_add(1);
            let ended = self.run_or_raise(next)?;
            let raised = ended == Ended::Delivered { cpu };
            if !raised && !matches!(ended, Ended::Reached | Ended::Delivered { .. }) {
                break self.told(ended);
            }
            if !raised && self.retired(cpu) == before {
                continue;
            }
            if quiet && self.interrupts(cpu) != interrupts {
                if let Some(ended) = self.finish_handler(cpu, at)? {
                    break self.told(ended);
                }
                continue;
            }
            let (pc, _) = self.frame(cpu);
            if !range.is_some_and(|(from, to)| (from..to).contains(&pc)) {
                break Some((cpu, Stop::Stepped));
            }
            if self.stops.execute.contains(&pc) {
                break Some((cpu, Stop::Hit(Hit::Execute(pc))));
            }
        };
        self.arm(true);
        Ok(found)
    }

    /// Runs to a place, or until an exception was delivered.
    pub(super) fn run_or_raise(&mut self, place: u64) -> Result<Ended, RestoreError> {
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
    ) -> Result<Option<Ended>, RestoreError> {
        let mut stops = self.stops.clone();
        stops.execute.push(at.0);
        loop {
            self.timeline.machine().set_stops(&stops);
            let ended = self.timeline.run_to(u64::MAX)?;
            self.arm(false);
            let passed = match ended {
                Ended::Hit {
                    cpu: who,
                    hit: Hit::Execute(pc),
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
            if ended != Ended::Reached {
                return Ok(Some(ended));
            }
        }
    }
}

impl One<'_> {
    fn vcpu(&mut self) -> &mut super::ObservedVcpu {
        &mut self.debugged.timeline.machine().vcpus[self.cpu]
    }

    /// What was changed from outside has made another future.
    fn changed(&mut self) {
        self.debugged.timeline.forget_future();
    }
}

impl Attended for One<'_> {
    fn engine(&self) -> Engine {
        Engine::Interp
    }

    fn state(&mut self) -> Result<CpuState, KvmError> {
        Attended::state(self.vcpu())
    }

    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError> {
        Attended::set_state(self.vcpu(), state)?;
        self.changed();
        Ok(())
    }

    fn models(&mut self) -> &mut Models {
        Attended::models(self.vcpu())
    }

    fn set_plan(&mut self, plan: Plan) {
        self.debugged.plans[self.cpu] = plan;
    }

    fn set_stops(&mut self, stops: &Stops) {
        self.debugged.stops = stops.clone();
        self.vcpu().vcpu.set_stops(stops);
    }

    fn write_msr(&mut self, index: u32, value: u64) -> Result<bool, KvmError> {
        let done = Attended::write_msr(self.vcpu(), index, value)?;
        self.changed();
        Ok(done)
    }

    fn memory_written(&mut self, at: u64, len: u64) {
        Attended::memory_written(self.vcpu(), at, len);
        self.changed();
    }

    fn retired(&self) -> Option<u64> {
        Some(self.debugged.timeline.place())
    }

    fn stats(&mut self) -> VcpuStats {
        let vcpu = self.debugged.timeline.machine().vcpus.get(self.cpu);
        vcpu.map_or_else(VcpuStats::default, super::ObservedVcpu::stats)
    }

    fn go_to(&mut self, place: u64) -> Option<bool> {
        // Time passes only on the way.
        let clock = self.debugged.board.clock.clone();
        clock.resume();
        let there = self.debugged.travel_paused(place);
        clock.pause();
        Some(matches!(there, Ok(true)))
    }
}
