//! The client's branch traces.

use super::core::Debugger;
use super::error::DebugError;
use crate::btrace::{self, BTS_RECORD_BYTES, TraceAnnex, TracePosition};
use crate::modes;
use crate::target::TRACE_LIMIT_DEFAULT;

impl Debugger {
    /// Whether the machine can record branches.
    pub(crate) fn has_branch_trace(&mut self) -> bool {
        self.target.branch_trace().is_some()
    }

    /// Sets how much the client's next trace keeps, in bytes of BTS records.
    pub(crate) fn set_trace_size(&mut self, bytes: usize) {
        self.trace_limit = Some((bytes / BTS_RECORD_BYTES).max(1));
    }

    /// Records the branches of a vCPU from now on.
    pub(crate) fn start_trace(&mut self, vcpu: usize) -> Result<(), DebugError> {
        self.require_paused(vcpu)?;
        let limit = self.trace_limit.unwrap_or(TRACE_LIMIT_DEFAULT);
        let trace = self.target.branch_trace();
        trace.ok_or(DebugError::NoBranchTrace)?.start(vcpu, limit)?;
        self.trace_positions[vcpu] = Some(TracePosition::default());
        Ok(())
    }

    /// Ends the client's trace of a vCPU.
    pub(crate) fn stop_trace(&mut self, vcpu: usize) -> Result<(), DebugError> {
        self.require_paused(vcpu)?;
        self.trace_positions[vcpu] = None;
        match self.target.branch_trace() {
            Some(trace) => Ok(trace.stop(vcpu)?),
            None => Ok(()),
        }
    }

    /// Ends all traces of the client.
    pub(super) fn stop_all_traces(&mut self) -> Result<(), DebugError> {
        for vcpu in 0..self.vcpu_count() {
            self.stop_trace(vcpu)?;
        }
        self.trace_limit = None;
        Ok(())
    }

    /// The configuration of a vCPU's trace, as a document.
    pub(crate) fn trace_configuration(&mut self, vcpu: usize) -> Result<String, DebugError> {
        self.require_paused(vcpu)?;
        let limit = match self.target.branch_trace() {
            Some(trace) => trace.limit(vcpu)?,
            None => None,
        };
        Ok(btrace::configuration_xml(limit))
    }

    /// A part of a vCPU's trace, as a document; or an error in the words that gdb knows.
    pub(crate) fn trace(&mut self, vcpu: usize, annex: &str) -> Result<String, String> {
        let state = self.state(vcpu).map_err(|error| error.to_string())?;
        let pc = modes::linear_pc(state, state.rip);
        let recorded = match self.target.branch_trace() {
            Some(trace) => trace.branches(vcpu).map_err(|error| error.to_string())?,
            None => None,
        };
        let recorded = recorded.ok_or("Branch tracing not enabled")?;
        let annex = TraceAnnex::parse(annex).ok_or("Bad annex")?;
        let last = self.trace_positions[vcpu];
        let blocks = btrace::blocks(&recorded, pc, annex, last).ok_or("Overflow")?;
        self.trace_positions[vcpu] = Some(TracePosition {
            total: recorded.total,
            left_out: recorded.left_out,
            pc: Some(pc),
        });
        Ok(btrace::trace_xml(&blocks))
    }
}
