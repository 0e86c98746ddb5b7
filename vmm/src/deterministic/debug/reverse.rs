//! Reverse execution of a deterministic machine.
//!
//! Going back is going to an earlier instruction of the same run
//! ([`crate::deterministic::Timeline`]). To run back to a stop, the stretches between checkpoints
//! are executed again, the last stretch first. The last stop in the first stretch that has any is
//! the one to go to.

use hindsight_cpu::stops::{StopConditions, StopHit};
use std::ops::ControlFlow;

use hindsight_cpu::state::CpuState;

use iced_x86::Code;

use super::{DebuggedMachine, DebuggerStop};
use crate::deterministic::stop::RunStop;
use crate::memory::page_walk;
use crate::state::RestoreError;
use crate::vcpu::crash;
use crate::vcpu::debug::stop::StopReason;

/// Bytes of the longest instruction.
const MAX_INSTRUCTION: usize = 15;

/// A stop that re-execution came to.
#[derive(Clone, Copy, Debug)]
struct ReverseHit {
    /// The instruction count at the stop.
    icount: u64,
    cpu: usize,
    hit: StopHit,
    /// Address of the vCPU's next instruction.
    pc: u64,
    /// The breakpoint at `pc` has stopped already, and must be disarmed to continue. The
    /// instruction is not complete: a repeated one may have executed some iterations.
    at_breakpoint: bool,
    /// Accesses that stopped at this instruction count so far, this one included.
    accesses: usize,
}

impl ReverseHit {
    /// Whether the stop comes before its instruction executes. Stops at accesses come after it.
    const fn is_before(&self) -> bool {
        matches!(self.hit, StopHit::Execute(_) | StopHit::Exception { .. })
    }
}

/// The last stop, if there was any; `Break` if the run was interrupted.
type LastHit = ControlFlow<(), Option<ReverseHit>>;

/// The states of all vCPUs.
type AllStates = Vec<Option<CpuState>>;

impl DebuggedMachine {
    /// Goes to an instruction count without stops. Returns `false` if it was interrupted.
    fn travel(&mut self, icount: u64) -> Result<bool, RestoreError> {
        self.timeline
            .machine()
            .set_stops(&StopConditions::default());
        let stop = self.timeline.go_to(icount)?;
        self.arm(true);
        Ok(stop == RunStop::Reached)
    }

    /// Goes to an instruction count while the machine is paused.
    ///
    /// A doorbell that rings meanwhile, for example for an interrupt, interrupts the run. Then the
    /// machine continues to the instruction count.
    pub(super) fn travel_paused(&mut self, icount: u64) -> Result<bool, RestoreError> {
        for cpu in 0..self.cpus() {
            self.board.run.vcpus.doorbell(cpu).answer();
        }
        loop {
            let before = self.timeline.icount();
            if self.travel(icount)? {
                return Ok(true);
            }
            if self.board.run.vcpus.is_stopped() || self.timeline.icount() == before {
                return Ok(false);
            }
        }
    }

    /// Goes to an instruction count from a checkpoint, before the events that follow its last
    /// instruction. Returns `false` if it was interrupted.
    fn return_to(&mut self, icount: u64) -> Result<bool, RestoreError> {
        self.timeline
            .machine()
            .set_stops(&StopConditions::default());
        let stop = self.timeline.return_to(icount)?;
        self.arm(true);
        Ok(stop == RunStop::Reached)
    }

    /// Goes back to the state before the last instruction of a vCPU.
    ///
    /// With `mask_interrupts`, it does not stop in the handler of an interrupt, but goes back to
    /// the state before the interrupt.
    pub(super) fn step_back(
        &mut self,
        cpu: usize,
        mask_interrupts: bool,
    ) -> Result<DebuggerStop, RestoreError> {
        if self.timeline.icount() <= self.timeline.begin() {
            return Ok(Some((cpu, StopReason::Begin)));
        }
        let mut retired = self.retired(cpu);
        let rip = self.timeline.machine().state(cpu).map_or(0, |s| s.rip);
        loop {
            if !self.go_back_before(cpu, retired)? {
                return Ok(None);
            }
            let at_iret = mask_interrupts && self.next_is_iret(cpu);
            let interrupted = self
                .vcpu(cpu)
                .filter(|_| at_iret)
                .and_then(|vcpu| vcpu.interrupted_at(rip));
            match interrupted {
                Some(at) if at > 0 && at < retired => retired = at,
                _ => return Ok(Some((cpu, StopReason::Stepped))),
            }
        }
    }

    /// Goes back to the last instruction count at which a vCPU has retired fewer than `retired`
    /// instructions. Returns `false` if it was interrupted.
    fn go_back_before(&mut self, cpu: usize, retired: u64) -> Result<bool, RestoreError> {
        let begin = self.timeline.begin();
        let Some(before) = self.timeline.previous() else {
            return Ok(true);
        };
        // With one vCPU, the instruction count is the number that it has retired.
        let near = if self.cpus() == 1 {
            retired.saturating_sub(1).min(before)
        } else {
            before
        };
        if !self.travel(near.max(begin))? {
            return Ok(false);
        }
        // Other vCPUs had turns in between. At `low` the vCPU has retired fewer, at `high` it has
        // not.
        let (mut low, mut high) = (begin, self.timeline.icount());
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

    /// Whether the next instruction of a vCPU is IRET.
    fn next_is_iret(&mut self, cpu: usize) -> bool {
        let Some(state) = self.timeline.machine().state(cpu) else {
            return false;
        };
        let (pc, _) = self.frame(cpu);
        let code = page_walk::read_linear(&self.board.ram.map, &state, pc, MAX_INSTRUCTION);
        let instruction = crash::decode(&state, &code);
        instruction.is_some_and(|instruction| {
            let code = instruction.code();
            matches!(code, Code::Iretw | Code::Iretd | Code::Iretq)
        })
    }

    /// Goes back to the last stop before the current instruction.
    pub(super) fn run_back(&mut self, cpu: usize) -> Result<DebuggerStop, RestoreError> {
        let now = self.timeline.icount();
        let present = self.states();
        let mut end = now;
        let mut starts: Vec<u64> = self.timeline.checkpoints().collect();
        starts.retain(|&start| start <= now);
        for start in starts.into_iter().rev() {
            let present = (end == now).then_some(&present);
            match self.last_hit(start, end, present)? {
                ControlFlow::Break(()) => return Ok(None),
                ControlFlow::Continue(Some(hit)) => {
                    let reached = self.go_to_hit(&hit)?;
                    return Ok(reached.then_some((hit.cpu, StopReason::Hit(hit.hit))));
                }
                ControlFlow::Continue(None) => end = start,
            }
        }
        let begin = self.timeline.begin();
        let reached = self.return_to(begin)?;
        Ok(reached.then_some((cpu, StopReason::Begin)))
    }

    fn states(&mut self) -> AllStates {
        let cpus = 0..self.cpus();
        cpus.map(|cpu| self.timeline.machine().state(cpu)).collect()
    }

    /// Finds the last stop from `start` to `end`.
    ///
    /// If `end` is the current instruction count, only stops before the vCPU states `present`
    /// count.
    fn last_hit(
        &mut self,
        start: u64,
        end: u64,
        present: Option<&AllStates>,
    ) -> Result<LastHit, RestoreError> {
        if !self.return_to(start)? {
            return Ok(ControlFlow::Break(()));
        }
        let mut last = None;
        // After a stop at a breakpoint, one instruction runs with the breakpoint disarmed.
        let mut until = end;
        loop {
            match self.timeline.run_to(until)? {
                RunStop::Hit { cpu, hit } => {
                    let hit = self.reverse_hit(cpu, hit, last.as_ref());
                    self.arm_after(&hit);
                    until = match hit.at_breakpoint {
                        true => end.min(hit.icount.saturating_add(1)),
                        false => end,
                    };
                    if hit.icount < end || !hit.is_before() {
                        last = Some(hit);
                    }
                }
                RunStop::Interrupted => return Ok(ControlFlow::Break(())),
                RunStop::Reached => {
                    self.arm(true);
                    until = end;
                }
                _ => return Ok(ControlFlow::Continue(last)),
            }
            if self.timeline.icount() >= end {
                break;
            }
        }
        match present {
            Some(present) => self.last_hit_at_present(end, present, last),
            None => Ok(ControlFlow::Continue(last)),
        }
    }

    /// Continues [`DebuggedMachine::last_hit`] at the current instruction count, `now`.
    ///
    /// Stops there come from deliveries, and from accesses of an instruction that is not complete.
    fn last_hit_at_present(
        &mut self,
        now: u64,
        present: &AllStates,
        mut last: Option<ReverseHit>,
    ) -> Result<LastHit, RestoreError> {
        self.arm(true);
        while self.states() != *present {
            match self.run_to_or_exception(now.saturating_add(1))? {
                RunStop::Hit { cpu, hit } => {
                    let hit = self.reverse_hit(cpu, hit, last.as_ref());
                    if hit.icount > now || (hit.is_before() && self.states() == *present) {
                        break;
                    }
                    self.arm_after(&hit);
                    last = Some(hit);
                }
                RunStop::Delivered { .. } => {}
                RunStop::Interrupted => return Ok(ControlFlow::Break(())),
                _ => break,
            }
        }
        Ok(ControlFlow::Continue(last))
    }

    /// Arms the stops so that the run can continue after `hit`.
    fn arm_after(&mut self, hit: &ReverseHit) {
        if hit.at_breakpoint {
            self.arm_past(hit.cpu);
        } else {
            self.arm(true);
        }
    }

    /// Describes a stop at the current instruction count. `last` is the stop before it.
    fn reverse_hit(&mut self, cpu: usize, hit: StopHit, last: Option<&ReverseHit>) -> ReverseHit {
        let (icount, (pc, _)) = (self.timeline.icount(), self.frame(cpu));
        let last = last.filter(|last| last.icount == icount);
        let mut hit = ReverseHit {
            icount,
            cpu,
            hit,
            pc,
            at_breakpoint: last
                .is_some_and(|last| last.at_breakpoint && (last.cpu, last.pc) == (cpu, pc)),
            accesses: last.map_or(0, |last| last.accesses),
        };
        hit.at_breakpoint |= hit.is_before();
        hit.accesses += usize::from(!hit.is_before());
        hit
    }

    /// Goes to the point at which `hit` stopped. Returns `false` if it was interrupted.
    fn go_to_hit(&mut self, hit: &ReverseHit) -> Result<bool, RestoreError> {
        if hit.is_before() {
            return Ok(self.return_to(hit.icount)? && self.deliver(hit)?);
        }
        // Either the instruction that retired last made the access, or a delivery or an incomplete
        // instruction after it.
        let Some(before) = hit.icount.checked_sub(1) else {
            return self.return_to(hit.icount);
        };
        if before < self.timeline.begin() {
            return self.return_to(hit.icount);
        }
        if !self.return_to(before)? {
            return Ok(false);
        }
        self.arm_accesses();
        let mut made = 0;
        loop {
            match self.timeline.run_to(hit.icount)? {
                RunStop::Hit { .. } if self.timeline.icount() == hit.icount => made += 1,
                RunStop::Hit { .. } => {}
                RunStop::Interrupted => return Ok(false),
                _ => break,
            }
        }
        self.return_to(if hit.accesses > made {
            hit.icount
        } else {
            before
        })
    }

    /// Arms only stops at accesses, which come after their instruction.
    fn arm_accesses(&mut self) {
        let mut stops = self.stops.clone();
        stops.execute.clear();
        stops.exceptions = 0;
        self.timeline.machine().set_stops(&stops);
    }

    /// Delivers the interrupt or exception in whose handler a breakpoint stopped.
    ///
    /// A breakpoint at the first instruction of a handler stops at the instruction count of the
    /// interrupted instruction. Returns `false` if it was interrupted.
    fn deliver(&mut self, hit: &ReverseHit) -> Result<bool, RestoreError> {
        let StopHit::Execute(pc) = hit.hit else {
            return Ok(true);
        };
        if self.frame(hit.cpu).0 == pc {
            return Ok(true);
        }
        let stop = self.timeline.run_to(hit.icount.wrapping_add(1))?;
        Ok(stop != RunStop::Interrupted)
    }
}
