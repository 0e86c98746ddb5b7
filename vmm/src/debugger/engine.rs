//! Which engine the machine resumes in, for what a debugger requires.

use hindsight_cpu::stops::{ResumeAction, StopConditions};
use hindsight_gdb::target::{ResumeError, TargetError, VcpuResume};

use super::stops::needs_interpreter;
use super::target::MachineTarget;
use crate::probe::host::measure_hw_breakpoints;
use crate::vcpu::debug::hw_breakpoints;
use crate::vcpu::debug::stop::Unsupported;
use crate::vcpu::engine::policy::{DebuggerDemand, Engine};

impl MachineTarget {
    /// Whether the machine runs in KVM, now or when nothing requires the interpreter.
    pub(super) fn uses_kvm(&self) -> bool {
        let run = &self.board.run;
        run.engine.can_change() || run.vcpus.engine() == Engine::Kvm
    }

    /// Has the machine resume in an engine that can do all of this. Where only KVM may run it and
    /// cannot, refuses the vCPU that requires it.
    pub(super) fn choose_engine(
        &mut self,
        vcpus: &[Option<VcpuResume>],
    ) -> Result<(), ResumeError> {
        if !self.uses_kvm() {
            return Ok(());
        }
        let can_change = self.board.run.engine.can_change();
        let mut demand = DebuggerDemand::Nothing;
        for (vcpu, resume) in vcpus.iter().enumerate() {
            match self.requires_hw_breakpoints(vcpu, resume.as_ref())? {
                Ok(true) if demand == DebuggerDemand::Nothing => {
                    demand = DebuggerDemand::HwBreakpoints;
                }
                Ok(_) => {}
                Err(_) if can_change => demand = DebuggerDemand::BeyondKvm,
                Err(unsupported) => {
                    let reason = needs_interpreter(&unsupported);
                    return Err(ResumeError::Refused { vcpu, reason });
                }
            }
        }
        self.board.run.engine.demand(demand);
        Ok(())
    }

    /// Whether a vCPU needs debug registers for a debugger, or why KVM cannot do what it requires.
    fn requires_hw_breakpoints(
        &mut self,
        vcpu: usize,
        resume: Option<&VcpuResume>,
    ) -> Result<Result<bool, Unsupported>, TargetError> {
        if self.traced != 0 || self.is_traced() {
            return Ok(Err(Unsupported::Branches));
        }
        let Some(resume) = resume else {
            return Ok(Ok(false));
        };
        if resume.action == ResumeAction::Run && resume.stops == StopConditions::default() {
            return Ok(Ok(false));
        }
        let status = self.debug_status(vcpu)?;
        let can_change = self.board.run.engine.can_change();
        let support = self
            .hw_breakpoint_support
            .get_or_insert_with(|| measure_hw_breakpoints(can_change));
        let fit = hw_breakpoints::allocate(&resume.stops, resume.action, status, support);
        Ok(fit.map(|hw_breakpoints| !hw_breakpoints.is_empty()))
    }
}
