//! Pausing the machine, resuming it, and the stops in between.

use hindsight_cpu::stops::{ResumeAction, StopConditions, StopHit};

use super::core::{DebugSettings, DebugStop, Debugger};
use super::error::DebugError;
use crate::breakpoints::BreakpointSet;
use crate::registers::CodeModel;
use crate::target::{ResumeError, StopCause, VcpuResume};

/// Whether the breakpoints that are set now would still cause this stop.
fn is_still_due(conditions: &StopConditions, cause: &StopCause) -> bool {
    match cause {
        StopCause::Hit(StopHit::Execute(_)) => true,
        StopCause::Hit(hit) => conditions.includes(hit),
        _ => true,
    }
}

impl Debugger {
    /// Pauses the machine.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    pub fn pause(&mut self) -> Result<(), DebugError> {
        self.target.pause()?;
        self.paused = true;
        if self.available.msrs.is_empty() {
            self.probe_msrs()?;
        }
        Ok(())
    }

    /// Takes the reports of vCPUs that stopped by themselves and pauses the machine. Returns the
    /// stop that the client hears of; `None` if no vCPU stopped.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    pub fn collect(&mut self) -> Result<Option<DebugStop>, DebugError> {
        if let Err(error) = self.take_reports() {
            // Nothing comes of the stops of a machine that has ended.
            self.pending.clear();
            return Err(error);
        }
        let next = self.pending.pop_front();
        // A vCPU that reached a breakpoint at the same time as another one reaches it again.
        self.pending.retain(|stop| {
            let again = Some(StopCause::Stepped) == stop.cause
                || matches!(stop.cause, Some(StopCause::Hit(StopHit::Execute(_))));
            !again
        });
        if let Some(stop) = &next {
            self.last_stop = stop.clone();
        }
        Ok(next)
    }

    /// Moves the reports of vCPUs that stopped by themselves to the pending stops.
    ///
    /// Pauses the machine if there is a pending stop then.
    fn take_reports(&mut self) -> Result<(), DebugError> {
        let reports = self.target.take_stops()?;
        if reports.is_empty() && self.pending.is_empty() {
            return Ok(());
        }
        self.pause()?;
        for report in reports {
            // The vCPU has not run since it sent its state.
            if let (Some(cached), Some(state)) = (self.states.get_mut(report.vcpu), report.state) {
                *cached = Some(state);
            }
            self.pending.push_back(DebugStop {
                vcpu: report.vcpu,
                cause: Some(report.cause),
            });
        }
        Ok(())
    }

    /// Pauses the machine because the user requested it.
    ///
    /// # Errors
    ///
    /// When the machine has ended.
    pub fn interrupt(&mut self) -> Result<DebugStop, DebugError> {
        if let Some(stop) = self.collect()? {
            return Ok(stop);
        }
        self.pause()?;
        // A vCPU that stopped by itself meanwhile comes first.
        if let Some(stop) = self.collect()? {
            return Ok(stop);
        }
        let vcpu = self.last_stop.vcpu.min(self.vcpu_count() - 1);
        self.last_stop = DebugStop { vcpu, cause: None };
        Ok(self.last_stop.clone())
    }

    /// Has every vCPU run when the machine resumes, unless [`Debugger::set_action`] says otherwise.
    pub(crate) fn reset_actions(&mut self) {
        self.actions.fill(Some(ResumeAction::Run));
        self.explicit_actions = 0;
    }

    /// Sets what one vCPU does when the machine resumes.
    pub(crate) fn set_action(&mut self, vcpu: usize, action: ResumeAction) {
        if let Some(own) = self.actions.get_mut(vcpu) {
            *own = Some(action);
            self.explicit_actions |= 1 << vcpu;
        }
    }

    /// Removes the action of each vCPU for which the client named none: it does not run.
    pub(crate) fn hold_other_vcpus(&mut self) {
        for (vcpu, action) in self.actions.iter_mut().enumerate() {
            if self.explicit_actions >> vcpu & 1 == 0 {
                *action = None;
            }
        }
    }

    /// Resumes the machine.
    ///
    /// If it cannot resume, or a stop is pending, [`Debugger::collect`] returns a stop at once.
    pub(crate) fn resume(&mut self) -> Result<(), DebugError> {
        if self.suppress_resume {
            return Ok(());
        }
        if !self.paused {
            return Err(DebugError::Running);
        }
        self.drop_stale_stops();
        if self.has_pending_stop() {
            return Ok(());
        }
        let vcpus = 0..self.vcpu_count();
        let resumes: Vec<_> = vcpus.map(|vcpu| self.vcpu_resume(vcpu)).collect();
        match self.target.resume(&resumes) {
            Ok(()) => {}
            Err(ResumeError::Refused { vcpu, reason }) => {
                let cause = Some(StopCause::Refused(reason));
                self.pending.push_back(DebugStop { vcpu, cause });
                return Ok(());
            }
            Err(ResumeError::Target(error)) => return Err(error.into()),
        }
        for (applied, resume) in self.applied.iter_mut().zip(resumes) {
            if let Some(resume) = resume {
                *applied = resume.stops;
            }
        }
        self.states.fill(None);
        self.paused = false;
        Ok(())
    }

    /// Drops pending stops of vCPUs that resume, if the client has removed the breakpoint.
    ///
    /// To step one vCPU over a breakpoint, a client removes all breakpoints and resumes only this
    /// vCPU. The pending stops of the other vCPUs are kept.
    fn drop_stale_stops(&mut self) {
        let conditions = self.breakpoints.conditions();
        let actions = &self.actions;
        let resumes = |vcpu: usize| actions.get(vcpu).is_some_and(Option::is_some);
        self.pending.retain(|stop| {
            let due = stop.cause.as_ref();
            !resumes(stop.vcpu) || due.is_none_or(|cause| is_still_due(&conditions, cause))
        });
    }

    /// How a vCPU resumes; `None` if it does not run.
    fn vcpu_resume(&self, vcpu: usize) -> Option<VcpuResume> {
        let action = (*self.actions.get(vcpu)?)?;
        let applied = self.applied.get(vcpu)?;
        let mut stops = self.breakpoints.conditions();
        let single_step = ResumeAction::Step {
            mask_interrupts: true,
            range: None,
        };
        // A step executes its instruction whatever breakpoint is set there. Clients remove all
        // breakpoints for it and set them again after it; keeping them saves the vCPU two changes.
        // A step of a deterministic run executes the handlers of interrupts too, and must meet the
        // breakpoints there if the client left any.
        if action == single_step && (stops.execute.is_empty() || !self.reversible) {
            stops.execute.clone_from(&applied.execute);
        }
        let stops_changed = stops != *applied;
        Some(VcpuResume {
            action,
            stops,
            stops_changed,
        })
    }

    /// Removes the client's breakpoints, traces and settings, and resumes the machine.
    pub fn detach(&mut self) {
        self.breakpoints = BreakpointSet::default();
        self.settings = DebugSettings::default();
        self.set_code_model(CodeModel::default());
        self.reset_actions();
        self.pending.clear();
        if !self.paused && self.pause().is_err() {
            return;
        }
        // vCPUs that stopped by themselves resume too.
        if self.target.take_stops().is_err() || self.stop_all_traces().is_err() {
            return;
        }
        self.open_file = None;
        // A machine that has ended meanwhile needs nothing.
        let _ = self.resume();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_cpu::stops::Watchpoint;

    #[test]
    fn stop_of_a_removed_watchpoint_is_stale() {
        let watchpoint = |at| Watchpoint {
            at,
            len: 8,
            read: false,
            write: true,
        };
        let mut conditions = StopConditions::default();
        conditions.watchpoints = vec![watchpoint(1)];
        let hit = |at| {
            StopCause::Hit(StopHit::Watchpoint {
                watchpoint: watchpoint(at),
                at,
                write: true,
            })
        };
        assert!(is_still_due(&conditions, &hit(1)));
        assert!(!is_still_due(&conditions, &hit(2)));
        assert!(is_still_due(&conditions, &StopCause::Stepped));
        let breakpoint = StopCause::Hit(StopHit::Execute(7));
        assert!(is_still_due(&conditions, &breakpoint));
    }
}
