//! A deterministic machine under a debugger: going back.
//!
//! Going back is going to an earlier instruction of the same run ([`crate::deterministic::Timeline`]). To
//! go back to what the debugger stops for, the stretches between checkpoints are run again, the last
//! one first, and the last stop in one of them is it.

use std::ops::ControlFlow;

use hindsight_cpu::state::CpuState;
use hindsight_cpu::stops::{StopConditions, StopHit};
use iced_x86::Code;

use crate::deterministic::RunStop;
use crate::deterministic::debug::DebuggedMachine;
use crate::memory::page_walk;
use crate::state::RestoreError;
use crate::vcpu::crash;
use crate::vcpu::debug::stop::StopReason;

/// Bytes of the longest instruction.
const MAX_INSTRUCTION: usize = 15;

/// Something that is stopped for, met on the way.
#[derive(Clone, Copy, Debug)]
struct ReverseHit {
    /// Instructions retired by then.
    at: u64,
    cpu: usize,
    hit: StopHit,
    /// Address of the processor's next instruction.
    pc: u64,
    /// The breakpoint at that instruction was met, which is not over: a repeated one may be in the middle.
    passes: bool,
    /// Accesses met at this place so far, this one included.
    accesses: usize,
}

impl ReverseHit {
    /// It comes before the instruction that does it; an access, after it.
    const fn is_before(&self) -> bool {
        matches!(self.hit, StopHit::Execute(_) | StopHit::Exception { .. })
    }
}

/// The last of them, if there was one; to break is to be interrupted.
type LastHit = ControlFlow<(), Option<ReverseHit>>;

impl DebuggedMachine {
    /// Goes to a place without stopping on the way; `false` if it was interrupted.
    fn travel(&mut self, place: u64) -> Result<bool, RestoreError> {
        self.timeline
            .machine()
            .set_stops(&StopConditions::default());
        let ended = self.timeline.go_to(place)?;
        self.arm(true);
        Ok(ended == RunStop::Reached)
    }

    /// Goes to a place while the machine is paused: whoever rings a doorbell meanwhile (an interrupt
    /// does) interrupts it for nothing.
    pub(super) fn travel_paused(&mut self, place: u64) -> Result<bool, RestoreError> {
        for cpu in 0..self.cpus() {
            self.board.run.vcpus.doorbell(cpu).answer();
        }
        loop {
            let before = self.timeline.place();
            if self.travel(place)? {
                return Ok(true);
            }
            if self.board.run.vcpus.is_stopped() || self.timeline.place() == before {
                return Ok(false);
            }
        }
    }

    /// Goes to a place anew: what came between its last instruction and the present is undone, too.
    fn return_to(&mut self, place: u64) -> Result<bool, RestoreError> {
        self.timeline
            .machine()
            .set_stops(&StopConditions::default());
        let ended = self.timeline.return_to(place)?;
        self.arm(true);
        Ok(ended == RunStop::Reached)
    }

    /// Back to before the last instruction of a processor. A quiet step does not enter the handlers of
    /// interrupts: it goes to before the interrupt.
    pub(super) fn step_back(
        &mut self,
        cpu: usize,
        quiet: bool,
    ) -> Result<Option<(usize, StopReason)>, RestoreError> {
        if self.timeline.place() <= self.timeline.begin() {
            return Ok(Some((cpu, StopReason::Begin)));
        }
        let mut retired = self.retired(cpu);
        let rip = self.timeline.machine().state(cpu).map_or(0, |s| s.rip);
        loop {
            if !self.back_before(cpu, retired)? {
                return Ok(None);
            }
            let returns = quiet && self.returns_from_handler(cpu);
            let vcpu = self.timeline.machine().vcpus.get(cpu);
            let interrupted = vcpu
                .filter(|_| returns)
                .and_then(|vcpu| vcpu.interrupted(rip));
            match interrupted {
                Some(at) if at > 0 && at < retired => retired = at,
                _ => return Ok(Some((cpu, StopReason::Stepped))),
            }
        }
    }

    /// Goes back to the last place at which a processor has retired fewer instructions than that;
    /// `false` if it was interrupted.
    fn back_before(&mut self, cpu: usize, retired: u64) -> Result<bool, RestoreError> {
        let begin = self.timeline.begin();
        let Some(before) = self.timeline.place().checked_sub(1) else {
            return Ok(true);
        };
        // With one processor places are what it has retired.
        let near = if self.cpus() == 1 {
            retired.saturating_sub(1)
        } else {
            before
        };
        if !self.travel(near.clamp(begin, before.max(begin)))? {
            return Ok(false);
        }
        // Others had their turn. `low` has fewer, `high` has not.
        let (mut low, mut high) = (begin, self.timeline.place());
        if self.retired(cpu) < retired {
            return Ok(true);
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if !self.travel(middle)? {
                return Ok(false);
            }
            match self.retired(cpu) < retired {
                true => low = middle,
                false => high = middle,
            }
        }
        self.travel(low)
    }

    /// The next instruction of a processor returns from a handler.
    fn returns_from_handler(&mut self, cpu: usize) -> bool {
        let Some(state) = self.timeline.machine().state(cpu) else {
            return false;
        };
        let (at, _) = self.frame(cpu);
        let code = page_walk::read_linear(&self.board.ram.map, &state, at, MAX_INSTRUCTION);
        let instruction = crash::decode(&state, &code);
        instruction.is_some_and(|instruction| {
            let code = instruction.code();
            matches!(code, Code::Iretw | Code::Iretd | Code::Iretq)
        })
    }

    /// Back to the last thing that is stopped for.
    pub(super) fn run_back(
        &mut self,
        cpu: usize,
    ) -> Result<Option<(usize, StopReason)>, RestoreError> {
        let now = self.timeline.place();
        let here = self.stand();
        let mut end = now;
        let mut starts: Vec<u64> = self.timeline.checkpoints().collect();
        starts.retain(|&start| start <= now);
        for start in starts.into_iter().rev() {
            let here = (end == now).then_some(&here);
            match self.last_met(start, end, here)? {
                ControlFlow::Break(()) => return Ok(None),
                ControlFlow::Continue(Some(met)) => {
                    let there = self.go_before(&met)?;
                    return Ok(there.then_some((met.cpu, StopReason::Hit(met.hit))));
                }
                ControlFlow::Continue(None) => end = start,
            }
        }
        let begin = self.timeline.begin();
        let there = self.return_to(begin)?;
        Ok(there.then_some((cpu, StopReason::Begin)))
    }

    /// The states of all processors.
    fn stand(&mut self) -> Vec<Option<CpuState>> {
        let cpus = 0..self.cpus();
        cpus.map(|cpu| self.timeline.machine().state(cpu)).collect()
    }

    /// The last thing met from `start` to `end`; where that is the present, up to `here`.
    fn last_met(
        &mut self,
        start: u64,
        end: u64,
        here: Option<&Vec<Option<CpuState>>>,
    ) -> Result<LastHit, RestoreError> {
        if !self.return_to(start)? {
            return Ok(ControlFlow::Break(()));
        }
        let mut last = None;
        // A place that was stopped at is passed without its breakpoint.
        let mut until = end;
        loop {
            match self.timeline.run_to(until)? {
                RunStop::Hit { cpu, hit } => {
                    let met = self.met(cpu, hit, last.as_ref());
                    self.arm_after(&met);
                    until = match met.passes {
                        true => end.min(met.at.saturating_add(1)),
                        false => end,
                    };
                    if met.at < end || !met.is_before() {
                        last = Some(met);
                    }
                }
                RunStop::Interrupted => return Ok(ControlFlow::Break(())),
                RunStop::Reached => {
                    self.arm(true);
                    until = end;
                }
                _ => return Ok(ControlFlow::Continue(last)),
            }
            if self.timeline.place() >= end {
                break;
            }
        }
        match here {
            Some(here) => self.last_met_inside(end, here, last),
            None => Ok(ControlFlow::Continue(last)),
        }
    }

    /// As [`DebuggedMachine::last_met`], of what comes at the present place: deliveries, and accesses of an instruction that is
    /// not over.
    fn last_met_inside(
        &mut self,
        now: u64,
        here: &Vec<Option<CpuState>>,
        mut last: Option<ReverseHit>,
    ) -> Result<LastHit, RestoreError> {
        self.arm(true);
        while self.stand() != *here {
            match self.run_or_raise(now.saturating_add(1))? {
                RunStop::Hit { cpu, hit } => {
                    let met = self.met(cpu, hit, last.as_ref());
                    if met.at > now || (met.is_before() && self.stand() == *here) {
                        break;
                    }
                    self.arm_after(&met);
                    last = Some(met);
                }
                RunStop::Delivered { .. } => {}
                RunStop::Interrupted => return Ok(ControlFlow::Break(())),
                _ => break,
            }
        }
        Ok(ControlFlow::Continue(last))
    }

    /// Arms the stops for going on from one.
    fn arm_after(&mut self, met: &ReverseHit) {
        if met.passes {
            self.arm_past(met.cpu);
        } else {
            self.arm(true);
        }
    }

    fn met(&mut self, cpu: usize, hit: StopHit, last: Option<&ReverseHit>) -> ReverseHit {
        let (at, (pc, _)) = (self.timeline.place(), self.frame(cpu));
        let last = last.filter(|met| met.at == at);
        let mut met = ReverseHit {
            at,
            cpu,
            hit,
            pc,
            passes: last.is_some_and(|met| met.passes && (met.cpu, met.pc) == (cpu, pc)),
            accesses: last.map_or(0, |met| met.accesses),
        };
        met.passes |= met.is_before();
        met.accesses += usize::from(!met.is_before());
        met
    }

    /// Goes to before what was met; `false` if it was interrupted.
    fn go_before(&mut self, met: &ReverseHit) -> Result<bool, RestoreError> {
        if met.is_before() {
            return Ok(self.return_to(met.at)? && self.deliver(met)?);
        }
        // The instruction that retired last made the first accesses, or all; what came after it, the others.
        let Some(before) = met.at.checked_sub(1) else {
            return self.return_to(met.at);
        };
        if before < self.timeline.begin() {
            return self.return_to(met.at);
        }
        if !self.return_to(before)? {
            return Ok(false);
        }
        self.arm_accesses();
        let mut made = 0;
        loop {
            match self.timeline.run_to(met.at)? {
                RunStop::Hit { .. } if self.timeline.place() == met.at => made += 1,
                RunStop::Hit { .. } => {}
                RunStop::Interrupted => return Ok(false),
                _ => break,
            }
        }
        self.return_to(if met.accesses > made { met.at } else { before })
    }

    /// Arms what is stopped for after it was done.
    fn arm_accesses(&mut self) {
        let mut stops = self.stops.clone();
        stops.execute.clear();
        stops.exceptions = 0;
        self.timeline.machine().set_stops(&stops);
    }

    /// A breakpoint at the first instruction of a handler is reached at the place of the instruction
    /// that was interrupted: delivers what interrupts it. `false` if it was interrupted itself.
    fn deliver(&mut self, met: &ReverseHit) -> Result<bool, RestoreError> {
        let StopHit::Execute(at) = met.hit else {
            return Ok(true);
        };
        if self.frame(met.cpu).0 == at {
            return Ok(true);
        }
        let ended = self.timeline.run_to(met.at.wrapping_add(1))?;
        Ok(ended != RunStop::Interrupted)
    }
}
