//! A deterministic machine under a debugger: forwards, and back.
//!
//! Going back is going to an earlier instruction of the same run ([`Timeline`]). To go back to what
//! the debugger stops for, the stretches between checkpoints are run again, the last one first, and
//! the last stop in one of them is it.

use std::ops::ControlFlow;
use std::sync::Arc;

use hindsight_cpu::state::CpuState;
use hindsight_interp::{Hit, Stops};

use super::{Determined, Stop as Ended};
use crate::kvm::KvmError;
use crate::machine::Board;
use crate::snapshot::{Limits, RestoreError, Timeline};
use crate::vcpu::attend::{Attended, Plan, Request, Stop};
use crate::vcpu::control::{Checkpoint, Place};
use crate::vcpu::mode::Engine;
use crate::vcpu::models::Models;

/// Place, processor and cause of a stop, if there was one; to break is to be interrupted.
type LastStop = ControlFlow<(), Option<(u64, usize, Hit)>>;

/// The machine, what the debugger stops for, and what each processor is to do.
struct Debugged {
    timeline: Timeline,
    board: Arc<Board>,
    stops: Stops,
    plans: Vec<Plan>,
}

/// Runs the machine until it stops, as the debugger wants it. Gives it back.
pub(super) fn run(machine: Determined, board: &Arc<Board>) -> Result<Determined, RestoreError> {
    let cpus = machine.vcpus.len();
    let mut debugged = Debugged {
        timeline: Timeline::new(machine, Limits::default())?,
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
    fn cpus(&mut self) -> usize {
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
        self.board.control.hold(cpu);
        self.board.reports.put(cpu, stop);
    }

    /// Does what is planned. `None`: it was interrupted, or the run is over.
    fn go(&mut self) -> Result<Option<(usize, Stop)>, RestoreError> {
        if let Some(cpu) = self.crashed() {
            // The debugger has seen it.
            let board = self.board.clone();
            if let Some(vcpu) = self.timeline.machine().vcpus.get_mut(cpu)
                && !matches!(self.plans.get(cpu), Some(Plan::Back { .. }))
                && let Some(cause) = vcpu.crashed.take()
            {
                vcpu.crash(&board, cause);
                return Ok(None);
            }
        }
        let planned = self.plans.iter().position(|plan| *plan != Plan::Run);
        let Some(cpu) = planned else {
            let ended = self.timeline.go_to(u64::MAX)?;
            return Ok(self.told(ended));
        };
        match self.plans[cpu] {
            Plan::Back { step: true } => self.step_back(cpu),
            Plan::Back { step: false } => self.run_back(cpu),
            Plan::Step { range, .. } => self.step(cpu, range),
            Plan::Run => Ok(None),
        }
    }

    fn crashed(&mut self) -> Option<usize> {
        let vcpus = &self.timeline.machine().vcpus;
        vcpus.iter().position(|vcpu| vcpu.crashed.is_some())
    }

    /// What the debugger hears of the end of a run.
    fn told(&mut self, ended: Ended) -> Option<(usize, Stop)> {
        match ended {
            Ended::Hit { cpu, hit } => Some((cpu, Stop::Hit(hit))),
            Ended::Crashed { cpu } => {
                let vcpu = self.timeline.machine().vcpus.get(cpu)?;
                Some((cpu, Stop::Crash(vcpu.crashed.clone()?)))
            }
            Ended::Reached | Ended::Ended | Ended::Interrupted => None,
        }
    }

    /// Arms the stops, those at instructions or not.
    fn arm(&mut self, execute: bool) {
        let mut stops = self.stops.clone();
        if !execute {
            stops.execute.clear();
        }
        self.timeline.machine().set_stops(&stops);
    }

    fn retired(&mut self, cpu: usize) -> u64 {
        let vcpu = self.timeline.machine().vcpus.get(cpu);
        vcpu.map_or(0, super::ObservedVcpu::retired)
    }

    fn pc(&mut self, cpu: usize) -> u64 {
        let vcpu = self.timeline.machine().vcpus.get(cpu);
        vcpu.map_or(0, |vcpu| vcpu.vcpu.rip())
    }

    /// One instruction of one processor, or as many as stay in a range.
    fn step(
        &mut self,
        cpu: usize,
        range: Option<(u64, u64)>,
    ) -> Result<Option<(usize, Stop)>, RestoreError> {
        self.arm(false);
        let found = loop {
            let before = self.retired(cpu);
            let next = self.timeline.place().wrapping_add(1);
            let ended = self.timeline.go_to(next)?;
            if ended != Ended::Reached {
                break self.told(ended);
            }
            if self.retired(cpu) == before {
                continue;
            }
            let pc = self.pc(cpu);
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

    /// Goes to a place without stopping on the way; `false` if it was interrupted.
    fn travel(&mut self, place: u64) -> Result<bool, RestoreError> {
        self.timeline.machine().set_stops(&Stops::default());
        let ended = self.timeline.go_to(place)?;
        for vcpu in &mut self.timeline.machine().vcpus {
            vcpu.crashed = None;
        }
        self.arm(true);
        Ok(ended == Ended::Reached)
    }

    /// Goes to a place while the machine is paused: whoever rings a doorbell meanwhile (an interrupt
    /// does) interrupts it for nothing.
    fn travel_paused(&mut self, place: u64) -> Result<bool, RestoreError> {
        for cpu in 0..self.cpus() {
            self.board.control.doorbell(cpu).answer();
        }
        loop {
            let before = self.timeline.place();
            if self.travel(place)? {
                return Ok(true);
            }
            if self.board.control.is_stopped() || self.timeline.place() == before {
                return Ok(false);
            }
        }
    }

    /// Back to before the last instruction of a processor.
    fn step_back(&mut self, cpu: usize) -> Result<Option<(usize, Stop)>, RestoreError> {
        let (now, begin) = (self.timeline.place(), self.timeline.begin());
        if now <= begin {
            return Ok(Some((cpu, Stop::Begin)));
        }
        let retired = self.retired(cpu);
        if !self.travel(now - 1)? {
            return Ok(None);
        }
        // Others had their turn: the last place with fewer instructions of this one.
        let (mut low, mut high) = (begin, now - 1);
        while self.retired(cpu) == retired && low < high {
            let middle = low + (high - low) / 2;
            if !self.travel(middle)? {
                return Ok(None);
            }
            if self.retired(cpu) < retired {
                if !self.travel(middle + 1)? {
                    return Ok(None);
                }
                if self.retired(cpu) == retired {
                    if !self.travel(middle)? {
                        return Ok(None);
                    }
                    break;
                }
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(Some((cpu, Stop::Stepped)))
    }

    /// Back to the last thing that is stopped for.
    fn run_back(&mut self, cpu: usize) -> Result<Option<(usize, Stop)>, RestoreError> {
        let mut end = self.timeline.place();
        let now = end;
        let mut starts: Vec<u64> = self.timeline.checkpoints().collect();
        starts.retain(|&start| start < now);
        for start in starts.into_iter().rev() {
            match self.last_stop(start, end, now)? {
                ControlFlow::Break(()) => return Ok(None),
                ControlFlow::Continue(Some((place, cpu, hit))) => {
                    let there = self.travel(place)?;
                    return Ok(there.then_some((cpu, Stop::Hit(hit))));
                }
                ControlFlow::Continue(None) => end = start,
            }
        }
        let begin = self.timeline.begin();
        let there = self.travel(begin)?;
        Ok(there.then_some((cpu, Stop::Begin)))
    }

    /// The last stop from `start` to `end` that is before `now`: its place, the processor, and what
    /// it is. To break is to be interrupted.
    fn last_stop(&mut self, start: u64, end: u64, now: u64) -> Result<LastStop, RestoreError> {
        if !self.travel(start)? {
            return Ok(ControlFlow::Break(()));
        }
        let mut last = None;
        loop {
            self.arm(true);
            match self.timeline.go_to(end)? {
                Ended::Hit { cpu, hit } => {
                    let at = self.timeline.place();
                    // Backwards, an access is met before it was made.
                    let before = matches!(hit, Hit::Execute(_) | Hit::Exception { .. });
                    let place = if before { at } else { at.saturating_sub(1) };
                    if place < now {
                        last = Some((place, cpu, hit));
                    }
                    if before {
                        self.arm(false);
                        match self.timeline.go_to(at + 1)? {
                            Ended::Interrupted => return Ok(ControlFlow::Break(())),
                            Ended::Hit { cpu, hit } if at < now => last = Some((at, cpu, hit)),
                            _ => {}
                        }
                    }
                    if self.timeline.place() >= end {
                        return Ok(ControlFlow::Continue(last));
                    }
                }
                Ended::Interrupted => return Ok(ControlFlow::Break(())),
                Ended::Reached | Ended::Ended | Ended::Crashed { .. } => {
                    return Ok(ControlFlow::Continue(last));
                }
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

    fn set_stops(&mut self, stops: &Stops) -> Result<bool, KvmError> {
        self.debugged.stops = stops.clone();
        self.vcpu().vcpu.set_stops(stops);
        Ok(true)
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

    fn go_to(&mut self, place: u64) -> Option<bool> {
        // Time passes only on the way.
        let clock = self.debugged.board.clock.clone();
        clock.resume();
        let there = self.debugged.travel_paused(place);
        clock.pause();
        Some(matches!(there, Ok(true)))
    }
}
