//! Single steps of a deterministic machine.

use super::{DebuggedMachine, DebuggerStop};
use crate::deterministic::stop::RunStop;
use crate::state::RestoreError;
use crate::vcpu::debug::stop::StopReason;
use hindsight_cpu::stops::StopHit;

impl DebuggedMachine {
    /// Steps one instruction of a vCPU, or until its RIP leaves `range`.
    ///
    /// With `mask_interrupts`, an interrupt that comes before the instruction is not reported: the
    /// step ends when its handler has returned and the instruction has retired. The interrupt
    /// cannot be delayed, because that would make this a different run.
    pub(super) fn step(
        &mut self,
        cpu: usize,
        range: Option<(u64, u64)>,
        mask_interrupts: bool,
    ) -> Result<DebuggerStop, RestoreError> {
        let found = loop {
            let (before, frame) = (self.retired(cpu), self.frame(cpu));
            // The handler of an interrupt may have a breakpoint.
            self.arm_past(cpu);
            let interrupts = self.interrupts(cpu);
            let next = self.timeline.icount().wrapping_add(1);
            let stop = self.run_to_or_exception(next)?;
            let raised = stop == RunStop::Delivered { cpu };
            if !raised && !matches!(stop, RunStop::Reached | RunStop::Delivered { .. }) {
                break self.debugger_stop(stop);
            }
            if !raised && self.retired(cpu) == before {
                continue;
            }
            if mask_interrupts && self.interrupts(cpu) != interrupts {
                if let Some(stop) = self.finish_handler(cpu, frame)? {
                    break self.debugger_stop(stop);
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

    /// Runs to an instruction count, or until an exception was delivered.
    pub(super) fn run_to_or_exception(&mut self, icount: u64) -> Result<RunStop, RestoreError> {
        self.timeline.machine().stop_at_exceptions(true);
        let stop = self.timeline.run_to(icount);
        self.timeline.machine().stop_at_exceptions(false);
        stop
    }

    /// Runs until a vCPU has returned to the interrupted instruction, of which `frame` has the
    /// address and the stack pointer. Returns any other stop that comes first.
    fn finish_handler(
        &mut self,
        cpu: usize,
        frame: (u64, u64),
    ) -> Result<Option<RunStop>, RestoreError> {
        let mut stops = self.stops.clone();
        stops.execute.push(frame.0);
        loop {
            self.timeline.machine().set_stops(&stops);
            let stop = self.timeline.run_to(u64::MAX)?;
            self.arm(false);
            let is_own_breakpoint = match stop {
                RunStop::Hit {
                    cpu: hit_cpu,
                    hit: StopHit::Execute(pc),
                } => {
                    if hit_cpu == cpu && self.frame(cpu) == frame {
                        return Ok(None);
                    }
                    !self.stops.execute.contains(&pc)
                }
                _ => false,
            };
            if !is_own_breakpoint {
                return Ok(Some(stop));
            }
            // The address was reached with another stack pointer, or by another vCPU.
            let next = self.timeline.icount().wrapping_add(1);
            let stop = self.timeline.run_to(next)?;
            if stop != RunStop::Reached {
                return Ok(Some(stop));
            }
        }
    }
}
