//! Going back, and recording branches.

use hindsight_gdb::modes;
use hindsight_gdb::target::{BranchTrace, RecordedBranches, ReverseExecution, TargetError};

use super::stops::needs_interpreter;
use super::target::{MachineTarget, failed};
use crate::vcpu::branch_history::BranchHistory;
use crate::vcpu::debug::stop::Unsupported;

impl ReverseExecution for MachineTarget {
    fn icount(&mut self) -> Result<u64, TargetError> {
        let retired = self.request(0, |vcpu| vcpu.retired())?;
        // Deterministic runs count instructions.
        Ok(retired.unwrap_or(0))
    }

    fn go_to(&mut self, icount: u64) -> Result<bool, TargetError> {
        self.check_travel()?;
        self.forget_statuses();
        let reached = self.request(0, move |vcpu| vcpu.go_to(icount))?;
        Ok(reached == Some(true))
    }
}

impl BranchTrace for MachineTarget {
    fn start(&mut self, vcpu: usize, limit: usize) -> Result<(), TargetError> {
        if self.uses_kvm() && !self.board.run.engine.can_change() {
            let reason = needs_interpreter(&Unsupported::Branches);
            return Err(TargetError::Unsupported(reason));
        }
        let started = self.request(vcpu, move |vcpu| {
            let state = vcpu.state()?;
            let history = &mut vcpu.model().history;
            if history.is_none() {
                let base = modes::code_base(&state);
                *history = Some(Box::new(BranchHistory::new(limit, state.rip, base)));
            }
            Ok(())
        })?;
        started.map_err(failed)?;
        self.traced |= 1 << vcpu;
        Ok(())
    }

    fn stop(&mut self, vcpu: usize) -> Result<(), TargetError> {
        self.traced &= !(1 << vcpu);
        self.request(vcpu, |vcpu| {
            let model = vcpu.model();
            if !model.recorded_from_start {
                model.history = None;
            }
        })
    }

    fn limit(&mut self, vcpu: usize) -> Result<Option<usize>, TargetError> {
        self.request(vcpu, |vcpu| {
            let history = vcpu.model().history.as_ref();
            history.map(|history| history.limit())
        })
    }

    fn branches(&mut self, vcpu: usize) -> Result<Option<RecordedBranches>, TargetError> {
        let history = self.request(vcpu, |vcpu| {
            let history = vcpu.model().history.as_ref();
            history.map(|history| history.snapshot())
        })?;
        Ok(history.map(|history| RecordedBranches {
            branches: history.branches,
            total: history.total,
            left_out: history.left_out,
            end: history.end,
            start: history.start,
        }))
    }
}
