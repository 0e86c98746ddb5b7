//! Continuing, stepping and going back.

use gdbstub::common::{Signal, Tid};
use gdbstub::target::ext::base::multithread::{
    MultiThreadRangeStepping, MultiThreadRangeSteppingOps, MultiThreadResume,
    MultiThreadSchedulerLocking, MultiThreadSchedulerLockingOps, MultiThreadSingleStep,
    MultiThreadSingleStepOps,
};
use gdbstub::target::ext::base::reverse_exec::{
    ReverseCont, ReverseContOps, ReverseStep, ReverseStepOps,
};
use hindsight_cpu::stops::ResumeAction;

use crate::debugger::{DebugError, Debugger};
use crate::thread_id::vcpu_of;

/// A step of one instruction, or of as many as there are in a range of addresses.
fn step(debugger: &Debugger, range: Option<(u64, u64)>) -> ResumeAction {
    ResumeAction::Step {
        mask_interrupts: !debugger.settings.step_into_interrupts,
        range,
    }
}

impl MultiThreadResume for Debugger {
    fn resume(&mut self) -> Result<(), DebugError> {
        Debugger::resume(self)
    }

    fn clear_resume_actions(&mut self) -> Result<(), DebugError> {
        self.reset_actions();
        Ok(())
    }

    fn set_resume_action_continue(
        &mut self,
        tid: Tid,
        _: Option<Signal>,
    ) -> Result<(), DebugError> {
        self.set_action(vcpu_of(tid), ResumeAction::Run);
        Ok(())
    }

    fn support_single_step(&mut self) -> Option<MultiThreadSingleStepOps<'_, Self>> {
        Some(self)
    }

    fn support_range_step(&mut self) -> Option<MultiThreadRangeSteppingOps<'_, Self>> {
        Some(self)
    }

    fn support_reverse_step(&mut self) -> Option<ReverseStepOps<'_, Tid, Self>> {
        self.is_reversible().then_some(self)
    }

    fn support_reverse_cont(&mut self) -> Option<ReverseContOps<'_, Tid, Self>> {
        self.is_reversible().then_some(self)
    }

    fn support_scheduler_locking(&mut self) -> Option<MultiThreadSchedulerLockingOps<'_, Self>> {
        Some(self)
    }
}

impl ReverseStep<Tid> for Debugger {
    fn reverse_step(&mut self, tid: Tid) -> Result<(), DebugError> {
        let vcpu = self.step_back_vcpu.take().unwrap_or_else(|| vcpu_of(tid));
        self.reset_actions();
        let mask_interrupts = !self.settings.step_into_interrupts;
        self.set_action(vcpu, ResumeAction::StepBack { mask_interrupts });
        Debugger::resume(self)
    }
}

impl ReverseCont<Tid> for Debugger {
    fn reverse_cont(&mut self) -> Result<(), DebugError> {
        self.reset_actions();
        self.set_action(self.selected, ResumeAction::RunBack);
        Debugger::resume(self)
    }
}

impl MultiThreadSingleStep for Debugger {
    fn set_resume_action_step(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), DebugError> {
        self.set_action(vcpu_of(tid), step(self, None));
        Ok(())
    }
}

impl MultiThreadRangeStepping for Debugger {
    fn set_resume_action_range_step(
        &mut self,
        tid: Tid,
        start: u64,
        end: u64,
    ) -> Result<(), DebugError> {
        self.set_action(vcpu_of(tid), step(self, Some((start, end))));
        Ok(())
    }
}

impl MultiThreadSchedulerLocking for Debugger {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), DebugError> {
        self.hold_other_vcpus();
        Ok(())
    }
}
