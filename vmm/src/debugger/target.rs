//! [`DebugTarget`] for a machine.
//!
//! A vCPU's thread owns its state. So a request is a function that this thread calls while it is
//! paused, and the server's thread waits for the answer.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Instant;

use hindsight_cpu::cpuid::CpuidRegs;
use hindsight_cpu::state::CpuState;
use hindsight_gdb::DebugTarget;
use hindsight_gdb::target::{
    BranchTrace, MachineCommands, PhysicalMemory, ResumeError, ReverseExecution, TargetError,
    Unavailable, VcpuResume, VcpuStop,
};
use rustix::fd::{AsFd, BorrowedFd};
use vm_memory::{Bytes, GuestAddress};

use super::stops::stop_cause;
use super::{DebuggerFiles, DebuggerTrace, Screendump, SendKey};
use crate::kvm::KvmError;
use crate::kvm::host_support::HwBreakpointSupport;
use crate::memory::MachineMemory;
use crate::vcpu::board::Board;
use crate::vcpu::debug::hw_breakpoints::DebugStatus;
use crate::vcpu::debug::inspect::PausedVcpu;
use crate::vcpu::debug::stop::StopReport;
use crate::vcpu::run_control::Outcome;

/// A machine, for the debugger's server.
pub(super) struct MachineTarget {
    pub(super) board: Arc<Board>,
    pub(super) memory: MachineMemory,
    /// The debug status of each vCPU; `None` if it was not read since the last pause.
    statuses: Vec<Option<DebugStatus>>,
    /// The breakpoints that this host's KVM supports; `None` until they are first needed.
    pub(super) hw_breakpoint_support: Option<HwBreakpointSupport>,
    /// The vCPUs whose branches a client traces, a bit each.
    pub(super) traced: u64,
    /// When the server was started.
    pub(super) started: Instant,
    /// The machine waits for its first client.
    waits: bool,
    /// Writes a picture of the screen; `None` if the run has no file for it.
    pub(super) screendump: Option<Screendump>,
    /// The file for traces; `None` if the run has none.
    pub(super) trace: Option<DebuggerTrace>,
    /// Presses keys; `None` if the machine has no keyboard, or the run takes no input.
    pub(super) sendkey: Option<SendKey>,
}

/// An error of KVM, for the server.
pub(super) fn failed(error: KvmError) -> TargetError {
    TargetError::Failed(Box::new(error))
}

impl MachineTarget {
    pub(super) fn new(board: Arc<Board>, waits: bool, files: DebuggerFiles) -> Self {
        Self {
            memory: MachineMemory::new(board.ram.map.clone()),
            statuses: vec![None; board.run.vcpus.cpus()],
            hw_breakpoint_support: None,
            traced: 0,
            started: Instant::now(),
            waits,
            screendump: files.screendump,
            trace: files.trace,
            sendkey: files.sendkey,
            board,
        }
    }

    /// Has the thread of a paused vCPU call `request`, and returns its result.
    pub(super) fn request<R: Send + 'static>(
        &self,
        vcpu: usize,
        request: impl FnOnce(&mut dyn PausedVcpu) -> R + Send + 'static,
    ) -> Result<R, TargetError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let request = Box::new(move |vcpu: &mut dyn PausedVcpu| {
            // The receiver waits below.
            let _ = sender.send(request(vcpu));
        });
        if !self.board.run.vcpus.request(vcpu, request) {
            return Err(TargetError::Ended);
        }
        receiver.recv().map_err(|_| TargetError::Ended)
    }

    /// Records what a state means for the engine.
    fn set_status(&mut self, vcpu: usize, status: Option<DebugStatus>) {
        if let Some(known) = self.statuses.get_mut(vcpu) {
            *known = status;
        }
    }

    /// Records that vCPUs are no longer in the states that were read.
    pub(super) fn forget_statuses(&mut self) {
        self.statuses.fill(None);
    }

    /// Returns the state of a vCPU that decides whether KVM can debug it.
    pub(super) fn debug_status(&mut self, vcpu: usize) -> Result<DebugStatus, TargetError> {
        match self.statuses.get(vcpu).copied().flatten() {
            Some(status) => Ok(status),
            None => Ok(DebugStatus::from(&*self.state(vcpu)?)),
        }
    }

    /// Converts a vCPU's stop report to the type of the gdb server.
    fn vcpu_stop(&mut self, report: StopReport) -> VcpuStop {
        let vcpu = report.id;
        self.set_status(vcpu, report.state.as_deref().map(DebugStatus::from));
        let cause = stop_cause(
            vcpu,
            report.reason,
            &self.memory.map.clone(),
            || match &report.state {
                Some(state) => Ok((**state).clone()),
                None => Ok(*self.state(vcpu)?),
            },
        );
        VcpuStop {
            vcpu,
            cause,
            state: report.state,
        }
    }

    /// Has a vCPU resume like this when the pause ends.
    fn prepare(&self, vcpu: usize, resume: &VcpuResume) -> Result<(), TargetError> {
        let action = resume.action;
        let stops = resume.stops_changed.then(|| resume.stops.clone());
        let request = Box::new(move |vcpu: &mut dyn PausedVcpu| {
            vcpu.set_resume_action(action);
            if let Some(stops) = stops {
                vcpu.set_stops(&stops);
            }
        });
        if !self.board.run.vcpus.queue_request(vcpu, request) {
            return Err(TargetError::Ended);
        }
        Ok(())
    }
}

impl DebugTarget for MachineTarget {
    fn name(&self) -> &str {
        "hindsight"
    }

    fn vcpu_count(&self) -> usize {
        self.board.run.vcpus.cpus()
    }

    fn cpuid(&self, leaf: u32, subleaf: u32) -> CpuidRegs {
        self.board.package.cpuid.query(leaf, subleaf, 0, 0, 0)
    }

    fn memory(&self) -> &dyn PhysicalMemory {
        &self.memory
    }

    fn write_memory(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), TargetError> {
        let mut old = vec![0; bytes.len()];
        if self.memory.read(gpa, &mut old) == old.len() && old == bytes {
            // A write that changes nothing makes no other future.
            return Ok(());
        }
        let written = self.memory.map.write_slice(bytes, GuestAddress(gpa));
        written.map_err(|error| TargetError::Failed(Box::new(error)))?;
        let len = bytes.len() as u64;
        self.request(0, move |vcpu| vcpu.memory_written(gpa, len))
    }

    fn pause(&mut self) -> Result<(), TargetError> {
        match self.board.pause() {
            true => Ok(()),
            false => Err(TargetError::Ended),
        }
    }

    fn resume(&mut self, vcpus: &[Option<VcpuResume>]) -> Result<(), ResumeError> {
        self.check_direction(vcpus)?;
        self.choose_engine(vcpus)?;
        let mut held = 0;
        for (vcpu, resume) in vcpus.iter().enumerate() {
            match resume {
                Some(resume) => self.prepare(vcpu, resume)?,
                None => held |= 1 << vcpu,
            }
        }
        self.forget_statuses();
        self.board.run.vcpus.hold_only(held);
        self.board.resume();
        Ok(())
    }

    fn stop_event(&self) -> BorrowedFd<'_> {
        self.board.run.stops.as_fd()
    }

    fn take_stops(&mut self) -> Result<Vec<VcpuStop>, TargetError> {
        let mut reports = self.board.run.stops.take();
        if reports.is_empty() {
            return Ok(Vec::new());
        }
        self.pause()?;
        // vCPUs that stopped by themselves before the pause reached them.
        reports.append(&mut self.board.run.stops.take());
        let stops = reports.into_iter().map(|report| self.vcpu_stop(report));
        Ok(stops.collect())
    }

    fn starts_paused(&self) -> bool {
        self.waits
    }

    fn set_held(&mut self, held: bool) {
        self.board.run.end.suspend_limit(held);
    }

    fn kill(&mut self) {
        self.board.run.finish(Outcome::Quit);
    }

    fn state(&mut self, vcpu: usize) -> Result<Box<CpuState>, TargetError> {
        let state = self.request(vcpu, |vcpu| vcpu.state().map(Box::new))?;
        let state = state.map_err(failed)?;
        self.set_status(vcpu, Some(DebugStatus::from(&*state)));
        Ok(state)
    }

    fn set_state(&mut self, vcpu: usize, state: &CpuState) -> Result<(), TargetError> {
        let new = Box::new(state.clone());
        self.request(vcpu, move |vcpu| vcpu.set_state(&new))?
            .map_err(failed)?;
        self.set_status(vcpu, Some(DebugStatus::from(state)));
        Ok(())
    }

    fn read_msrs(&mut self, vcpu: usize, indices: &[u32]) -> Result<Vec<Option<u64>>, TargetError> {
        let indices = indices.to_vec();
        self.request(vcpu, move |vcpu| {
            let model = vcpu.model();
            let values = indices.iter().map(|&index| model.peek_msr(index));
            values.collect()
        })
    }

    fn write_msr(&mut self, vcpu: usize, index: u32, value: u64) -> Result<bool, TargetError> {
        self.set_status(vcpu, None);
        self.request(vcpu, move |vcpu| vcpu.write_msr(index, value))?
            .map_err(failed)
    }

    fn reverse(&mut self) -> Result<&mut dyn ReverseExecution, Unavailable> {
        match self.board.time.clock.is_virtual() {
            true => Ok(self),
            false => Err(Unavailable(
                "only a run with --deterministic can go back".into(),
            )),
        }
    }

    fn branch_trace(&mut self) -> Option<&mut dyn BranchTrace> {
        Some(self)
    }

    fn commands(&mut self) -> Option<&mut dyn MachineCommands> {
        Some(self)
    }
}
