//! Debug exits of a vCPU under KVM.
//!
//! They come from the debugger's breakpoints and steps and from the guest's own debug registers.
//! The monitor adds the checks that KVM does not make.

use hindsight_cpu::stops::StopConditions;
use std::time::Instant;

use hindsight_cpu::armed::Armed;

use hindsight_regs::dr::Dr6;
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;
use kvm_bindings::kvm_regs;

use super::KvmVcpu;
use super::guest_debug_regs::{DebugRegsOwner, ExitAccess};
use crate::kvm::KvmError;
use crate::kvm::vcpu::GuestDebug;
use crate::vcpu::debug::stop::StopReason;

/// How often a step that changed no register is repeated.
///
/// KVM inside Bochs stops up to three times at one instruction, and once for each page or page
/// table that KVM has not mapped yet.
const STEP_REPEATS_MAX: u8 = 16;

impl KvmVcpu {
    /// Programs KVM's guest debugging for the next run: the debugger's breakpoints and steps, and
    /// general detect to intercept MOV DR. No other code decides that.
    pub(super) fn program_guest_debug(&mut self) -> Result<(), KvmError> {
        let step = self.monitor_steps();
        let mut passed = None;
        if step {
            let general = self.unstepped_regs()?;
            self.step_start.get_or_insert((general, 0));
            // A step executes its instruction whether or not it has a breakpoint.
            passed = Some(self.fd.code_address()?);
        }
        let ours = self.guest_debug_regs.owner() == DebugRegsOwner::Monitor
            || !self.hw_breakpoints.is_empty();
        self.fd.set_guest_debug(&GuestDebug {
            step,
            registers: ours.then(|| self.hw_breakpoints.registers(passed)),
        })
    }

    /// General registers without the flags that stepping changes.
    fn unstepped_regs(&self) -> Result<kvm_regs, KvmError> {
        let mut registers = self.fd.general_registers()?;
        registers.rflags &= !(Rflags::TF | Rflags::RF).bits();
        Ok(registers)
    }

    /// Whether the vCPU single-steps until it can be moved to the interpreter.
    ///
    /// The debugger requires a stop that KVM cannot do, and at the last checkpoint the vCPU could
    /// not be moved.
    fn steps_to_boundary(&self) -> bool {
        self.unsettled
            && self.hw_breakpoints.is_empty()
            && self.model.debug.stops != StopConditions::default()
    }

    /// Whether the monitor single-steps the guest.
    pub(super) fn monitor_steps(&self) -> bool {
        self.model.debug.steps() || self.steps_to_boundary()
    }

    /// Reports that the guest single-steps itself, as an exit has shown.
    ///
    /// If KVM does not handle this exactly, the machine moves to the interpreter before the guest
    /// continues, with its #DB pending.
    pub(super) fn arm_single_step(&mut self) {
        if !self.armed.contains(Armed::SINGLE_STEP) {
            self.armed |= Armed::SINGLE_STEP;
            self.report_armed();
        }
    }

    /// Serves a debug exit. Returns `false` if the interpreter must execute a MOV DR or INT1.
    pub(super) fn debug_exit(&mut self, dr6: u64) -> Result<bool, KvmError> {
        let trapped = dr6 & Dr6::BS.bits() != 0;
        let steps = self.monitor_steps();
        let at = self.fd.code_address()?;
        let hit = self.hw_breakpoints.hit(dr6, at);
        if trapped && !steps {
            self.raise_debug_exception(Dr6::BS)?;
            self.arm_single_step();
        }
        match hit {
            Some(hit) => self.model.debug.due = Some(StopReason::Hit(hit)),
            None if trapped && steps => self.complete_step(at)?,
            None => return Ok(trapped),
        }
        Ok(true)
    }

    /// Completes a single-step after which KVM has stopped at `at`, or repeats it.
    ///
    /// Some KVMs stop more than once at one instruction, so a step that changed no register is
    /// repeated. The number of repetitions is limited, since an instruction may jump to itself.
    fn complete_step(&mut self, at: u64) -> Result<(), KvmError> {
        let now = self.unstepped_regs()?;
        if let Some((start, repeats)) = &mut self.step_start
            && *start == now
            && *repeats < STEP_REPEATS_MAX
        {
            *repeats += 1;
            return Ok(());
        }
        self.step_start = None;
        let debug = &mut self.model.debug;
        if !debug.steps() {
            self.model.board.run.vcpus.doorbell(self.model.id).ring();
        } else if !debug.in_range(at) {
            debug.due = Some(StopReason::Stepped);
        }
        Ok(())
    }

    /// Reads the debug registers after an exit that may have changed them.
    ///
    /// Also finds the breakpoints that the exit's access hits.
    pub(super) fn check_debug_regs(&mut self, access: Option<ExitAccess>) -> Result<(), KvmError> {
        // Checked first: `at_exit` copies all registers.
        if self.guest_debug_regs.owner() == DebugRegsOwner::Monitor {
            return Ok(());
        }
        let cr4 = self.fd.regs_at_exit().sregs.cr4;
        if !self.guest_debug_regs.must_read(access, cr4) {
            return Ok(());
        }
        let registers = self.fd.debug_registers()?;
        let armed = Armed::from_dr7(registers.control, cr4) | (self.armed & Armed::SINGLE_STEP);
        if armed != self.armed {
            self.armed = armed;
            self.report_armed();
        }
        // `program_guest_debug` follows a change of the owner.
        self.guest_debug_regs
            .update(registers.control, Instant::now());
        let translate = |linear| self.fd.translate(linear);
        self.hits |= access.map_or(0, |access| access.hits(&registers, cr4, translate));
        Ok(())
    }

    /// Raises the #DB after the instruction of the last exit, unless KVM raises it.
    ///
    /// Its causes are the breakpoints that the monitor found and, if `stepped`, RFLAGS.TF.
    pub(super) fn trap(&mut self, stepped: bool) -> Result<(), KvmError> {
        self.complete()?;
        let mut conditions = Dr6::from_bits_retain(std::mem::take(&mut self.hits));
        match self.fd.pending_exception()?.map(Vector) {
            Some(Vector::DB) if conditions.is_empty() => return Ok(()),
            Some(Vector::DB) | None => {}
            // The instruction faulted.
            Some(_) => return Ok(()),
        }
        if stepped {
            conditions |= Dr6::BS;
        }
        self.raise_debug_exception(conditions)
    }

    /// Injects a #DB with these conditions in DR6.
    fn raise_debug_exception(&mut self, conditions: Dr6) -> Result<(), KvmError> {
        let mut registers = self.fd.debug_registers()?;
        registers.record_conditions(conditions.bits());
        registers.deliver(false);
        self.fd.set_debug_registers(&registers)?;
        self.fd.inject_debug_exception()?;
        self.accepts_interrupt = Some(false);
        Ok(())
    }
}
