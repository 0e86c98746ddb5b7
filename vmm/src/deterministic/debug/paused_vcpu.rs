//! A vCPU of a paused deterministic machine, for the debugger.

use hindsight_cpu::state::CpuState;
use hindsight_cpu::stops::StopConditions;

use super::DebuggedMachine;
use crate::kvm::KvmError;
use crate::vcpu::debug::inspect::PausedVcpu;
use crate::vcpu::debug::stop::ResumeAction;
use crate::vcpu::engine::policy::Engine;
use crate::vcpu::interp::InterpVcpu;
use crate::vcpu::model::VcpuModel;
use crate::vcpu::stats::VcpuStats;

/// One vCPU of a paused machine.
pub(super) struct DebuggedVcpu<'a> {
    debugged: &'a mut DebuggedMachine,
    cpu: usize,
}

impl<'a> DebuggedVcpu<'a> {
    /// vCPU `cpu` of the machine.
    pub(super) const fn new(debugged: &'a mut DebuggedMachine, cpu: usize) -> Self {
        Self { debugged, cpu }
    }

    fn vcpu(&mut self) -> &mut InterpVcpu {
        &mut self.debugged.timeline.machine().vcpus[self.cpu]
    }
}

impl PausedVcpu for DebuggedVcpu<'_> {
    fn engine(&self) -> Engine {
        Engine::Interp
    }

    fn state(&mut self) -> Result<CpuState, KvmError> {
        PausedVcpu::state(self.vcpu())
    }

    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError> {
        if PausedVcpu::state(self.vcpu())? == *state {
            return Ok(());
        }
        self.debugged.timeline.prepare_write();
        PausedVcpu::set_state(self.vcpu(), state)
    }

    fn model(&mut self) -> &mut VcpuModel {
        PausedVcpu::model(self.vcpu())
    }

    fn set_resume_action(&mut self, action: ResumeAction) {
        self.debugged.actions[self.cpu] = action;
    }

    fn set_stops(&mut self, stops: &StopConditions) {
        self.debugged.stops = stops.clone();
        self.vcpu().vcpu.set_stops(stops);
    }

    fn write_msr(&mut self, index: u32, value: u64) -> Result<bool, KvmError> {
        self.debugged.timeline.prepare_write();
        PausedVcpu::write_msr(self.vcpu(), index, value)
    }

    fn memory_written(&mut self, at: u64, len: u64) {
        PausedVcpu::memory_written(self.vcpu(), at, len);
        // Memory was written already, but no register.
        self.debugged.timeline.prepare_write();
    }

    fn device_changed(&mut self) {
        self.debugged.timeline.prepare_write();
    }

    fn retired(&self) -> Option<u64> {
        Some(self.debugged.timeline.icount())
    }

    fn stats(&mut self) -> VcpuStats {
        let vcpu = self.debugged.timeline.machine().vcpus.get(self.cpu);
        vcpu.map_or_else(VcpuStats::default, InterpVcpu::stats)
    }

    fn go_to(&mut self, icount: u64) -> Option<bool> {
        // A paused machine's clock stands still, but re-execution must advance it.
        let clock = self.debugged.board.time.clock.clone();
        clock.resume();
        let reached = self.debugged.travel_paused(icount);
        clock.pause();
        Some(matches!(reached, Ok(true)))
    }
}
