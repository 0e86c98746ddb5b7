//! Debug registers of a vCPU in KVM, and KVM_SET_GUEST_DEBUG.

use hindsight_cpu::debug::DebugRegisters;
use hindsight_regs::vector::Vector;
use kvm_bindings::{
    KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP, kvm_debugregs,
    kvm_guest_debug,
};

use super::KvmVcpuFd;
use crate::kvm::{KvmError, ioctl};

/// How KVM debugs the guest: KVM_SET_GUEST_DEBUG.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestDebug {
    /// Exit after every instruction. KVM then hides the guest's own RFLAGS.TF, and loses it.
    pub step: bool,
    /// DR0-3 and DR7 that replace the guest's in the processor. #DB then exits, and MOV DR if GD is
    /// set.
    pub registers: Option<DebugRegisters>,
}

impl GuestDebug {
    /// A single step.
    pub const STEP: Self = Self {
        step: true,
        registers: None,
    };

    /// An execution breakpoint at a linear address.
    pub fn execute_breakpoint(address: u64) -> Self {
        let mut registers = DebugRegisters::RESET;
        registers.addresses[0] = address;
        // G0, with type 0: execution.
        registers.control |= 2;
        Self {
            step: false,
            registers: Some(registers),
        }
    }
}

impl KvmVcpuFd {
    /// Makes KVM deliver a #DB before the next instruction. Its conditions must be in DR6 already.
    ///
    /// # Errors
    ///
    /// The ioctl fails.
    pub fn inject_debug_exception(&mut self) -> Result<(), KvmError> {
        let mut events = self.events()?;
        self.synced = false;
        (events.exception.injected, events.exception.pending) = (1, 0);
        (events.exception.nr, events.exception.has_error_code) = (Vector::DB.0, 0);
        events.exception_has_payload = 0;
        // The shadow ended with the instruction that raises the #DB.
        events.interrupt.shadow = 0;
        self.fd
            .set_vcpu_events(&events)
            .map_err(ioctl("KVM_SET_VCPU_EVENTS"))
    }

    /// The guest's own debug registers, also while [`GuestDebug::registers`] replace them.
    ///
    /// # Errors
    ///
    /// The ioctl fails.
    pub fn debug_registers(&self) -> Result<DebugRegisters, KvmError> {
        let dr = self.fd.get_debug_regs();
        let dr = dr.map_err(ioctl("KVM_GET_DEBUGREGS"))?;
        Ok(DebugRegisters {
            addresses: dr.db,
            status: dr.dr6,
            control: dr.dr7,
        })
    }

    /// Sets the guest's own debug registers.
    ///
    /// # Errors
    ///
    /// KVM refuses a value.
    pub fn set_debug_registers(&mut self, registers: &DebugRegisters) -> Result<(), KvmError> {
        self.loaded = None;
        let dr = kvm_debugregs {
            db: registers.addresses,
            dr6: registers.status,
            dr7: registers.control,
            ..Default::default()
        };
        self.fd
            .set_debug_regs(&dr)
            .map_err(ioctl("KVM_SET_DEBUGREGS"))
    }

    /// Makes KVM debug the guest in this way from now on.
    ///
    /// # Errors
    ///
    /// KVM refuses.
    pub fn set_guest_debug(&mut self, request: &GuestDebug) -> Result<(), KvmError> {
        if self.debug == *request && self.step_armed == request.step {
            return Ok(());
        }
        let mut debug = kvm_guest_debug::default();
        if request.step {
            debug.control |= KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;
        }
        if let Some(registers) = &request.registers {
            debug.control |= KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
            debug.arch.debugreg[..4].copy_from_slice(&registers.addresses);
            debug.arch.debugreg[7] = registers.control;
        }
        self.fd
            .set_guest_debug(&debug)
            .map_err(ioctl("KVM_SET_GUEST_DEBUG"))?;
        self.debug = *request;
        self.step_armed = request.step;
        Ok(())
    }
}
