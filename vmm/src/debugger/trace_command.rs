//! `monitor trace`: starts and stops a trace of the machine.

use hindsight_cpu::state::CpuState;
use hindsight_gdb::target::{CommandError, ResumeError, TargetError, VcpuResume};
use hindsight_gdb::{DebugTarget, modes};
use hindsight_trace::EventKinds;

use super::stops::needs_interpreter;
use super::target::MachineTarget;
use super::trace::DebuggerTrace;
use crate::vcpu::debug::stop::{ResumeAction, Unsupported};
use crate::vcpu::process_tracker::ProcessTracker;

/// The kinds that are traced by default.
const EVENTS: EventKinds = EventKinds::BRANCHES
    .union(EventKinds::EXCEPTIONS)
    .union(EventKinds::INTERRUPTS)
    .union(EventKinds::MSR)
    .union(EventKinds::IO)
    .union(EventKinds::MODE);

/// Why a machine that is traced does not go back.
const GOES_ON: &str =
    "the machine is traced, and a trace has no way back: `monitor trace stop` first";

fn failed(text: impl Into<String>) -> CommandError {
    CommandError::Failed(text.into())
}

impl MachineTarget {
    /// Runs `monitor trace` with these arguments.
    pub(super) fn trace(&mut self, arguments: &[&str]) -> Result<String, CommandError> {
        let Some(trace) = self.trace.clone() else {
            return Err(failed("the run has no file for traces: --trace-out FILE"));
        };
        match arguments {
            ["start"] => self.start_trace(&trace, EVENTS),
            ["start", kinds] => self.start_trace(&trace, parse_kinds(kinds)?),
            ["stop"] => self.stop_trace(&trace),
            ["status"] => Ok(trace.status()),
            _ => Err(CommandError::Usage),
        }
    }

    /// Whether the machine is traced.
    pub(super) fn is_traced(&self) -> bool {
        self.trace.as_ref().is_some_and(DebuggerTrace::is_running)
    }

    /// Refuses to go back while the machine is traced.
    pub(super) fn check_direction(&self, vcpus: &[Option<VcpuResume>]) -> Result<(), ResumeError> {
        let goes_back = |resume: &Option<VcpuResume>| {
            let action = resume.as_ref().map(|resume| resume.action);
            matches!(
                action,
                Some(ResumeAction::StepBack { .. } | ResumeAction::RunBack)
            )
        };
        match vcpus.iter().position(goes_back) {
            Some(vcpu) if self.is_traced() => Err(ResumeError::Refused {
                vcpu,
                reason: GOES_ON.to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Refuses to go to another instruction while the machine is traced.
    pub(super) fn check_travel(&self) -> Result<(), TargetError> {
        if self.is_traced() {
            return Err(TargetError::Unsupported(GOES_ON.to_owned()));
        }
        Ok(())
    }

    fn start_trace(
        &mut self,
        trace: &DebuggerTrace,
        kinds: EventKinds,
    ) -> Result<String, CommandError> {
        if trace.is_running() {
            return Err(failed(format!(
                "{}; `monitor trace stop` ends that",
                trace.status()
            )));
        }
        if self.uses_kvm() && !self.board.run.engine.can_change() {
            return Err(failed(needs_interpreter(&Unsupported::Branches)));
        }
        let cpus = 0..self.board.run.vcpus.cpus();
        let states: Result<Vec<_>, _> = cpus.map(|vcpu| self.state(vcpu)).collect();
        let states = states?;
        let start = states
            .first()
            .map_or(0, |state| modes::linear_pc(state, state.rip));
        trace
            .begin(kinds, start)
            .map_err(|error| failed(format!("--trace-out: {:#}", anyhow::Error::new(error))))?;
        for ((vcpu, cpu), state) in (0..).zip(0..).zip(&states) {
            let Some(mut tracer) = trace.tracer(cpu) else {
                continue;
            };
            tracer.restart(modes::code_base(state));
            let tracer = Some(Box::new(tracer));
            self.request(vcpu, |vcpu| vcpu.model().tracer = tracer)?;
        }
        self.name_kernel(&states)?;
        Ok(trace.status())
    }

    /// Adds the functions of a Linux kernel to the trace, if one of these states has it mapped.
    fn name_kernel(&self, states: &[Box<CpuState>]) -> Result<(), TargetError> {
        let tracker = ProcessTracker::new(&self.board.ram.map, false);
        let logs = states.iter().map(|state| tracker.entry_set(state).log);
        let Some(log) = logs.into_iter().find(|log| !log.is_empty()) else {
            return Ok(());
        };
        self.request(0, move |vcpu| {
            let model = vcpu.model();
            log.into_iter().for_each(|event| model.trace_process(event));
        })
    }

    fn stop_trace(&mut self, trace: &DebuggerTrace) -> Result<String, CommandError> {
        for vcpu in 0..self.board.run.vcpus.cpus() {
            self.request(vcpu, |vcpu| vcpu.model().tracer = None)?;
        }
        match trace.finish() {
            None => Err(failed("no trace runs; `monitor trace start` begins one")),
            Some(finished) => finished.map_err(|error| failed(format!("{error:#}"))),
        }
    }
}

/// Parses the kinds of a trace.
fn parse_kinds(text: &str) -> Result<EventKinds, CommandError> {
    let kinds: EventKinds = text.parse().map_err(|error| failed(format!("{error}")))?;
    if kinds.contains(EventKinds::PROCESSES) {
        // The tracker of processes would need breakpoints of its own.
        return Err(failed(
            "processes are traced by `hindsight trace` only: leave them out",
        ));
    }
    Ok(kinds)
}
