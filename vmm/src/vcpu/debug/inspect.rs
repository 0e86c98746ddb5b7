//! Requests of a debugger to a paused vCPU.
//!
//! A vCPU's thread owns its state. So a request is a function that this thread calls at its
//! checkpoint ([`crate::vcpu::run_control::VcpuControl::request`]), whichever engine runs the vCPU.

use hindsight_cpu::state::CpuState;
use hindsight_cpu::stops::StopConditions;

use super::stop::ResumeAction;
use crate::kvm::KvmError;
use crate::vcpu::engine::Engine;
use crate::vcpu::model::VcpuModel;
use crate::vcpu::stats::VcpuStats;

/// A paused vCPU.
pub trait PausedVcpu {
    /// The engine that runs it.
    fn engine(&self) -> Engine;

    /// The vCPU's state, complete between two instructions.
    ///
    /// # Errors
    ///
    /// When KVM does not return it.
    fn state(&mut self) -> Result<CpuState, KvmError>;

    /// Replaces its state.
    ///
    /// # Errors
    ///
    /// When KVM does not accept it.
    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError>;

    /// The vCPU's models.
    fn model(&mut self) -> &mut VcpuModel;

    /// Sets what it does when the pause ends.
    fn set_resume_action(&mut self, action: ResumeAction);

    /// Sets what it stops for. The caller makes sure that the engine supports it, or that the
    /// machine changes engines before the vCPU resumes: see `vcpu::debug::hw_breakpoints`.
    fn set_stops(&mut self, stops: &StopConditions);

    /// Writes an MSR as WRMSR does. `false`: the guest would get #GP(0).
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    fn write_msr(&mut self, index: u32, value: u64) -> Result<bool, KvmError>;

    /// Reports that something other than a vCPU wrote memory: guest-physical address and length.
    fn memory_written(&mut self, at: u64, len: u64);

    /// Reports that the debugger changed a device, for example an interrupt line.
    fn device_changed(&mut self) {}

    /// Follows a reset: the registers and the MSRs of the model were replaced.
    ///
    /// # Errors
    ///
    /// When KVM refuses an MSR.
    fn was_reset(&mut self) -> Result<(), KvmError> {
        Ok(())
    }

    /// Goes to an instruction of a deterministic run, by its number. Returns whether it arrived;
    /// `None`: the run is not deterministic.
    fn go_to(&mut self, icount: u64) -> Option<bool>;

    /// Instructions retired, where they are counted.
    fn retired(&self) -> Option<u64>;

    /// The vCPU's statistics so far.
    fn stats(&mut self) -> VcpuStats;
}

/// Something that a paused vCPU's thread does on request.
pub type InspectRequest = Box<dyn FnOnce(&mut dyn PausedVcpu) + Send>;
