//! One vCPU in KVM: running it, its interrupts and its clock.
//!
//! `transfer` loads and stores the whole state; `msrs` has the MSRs, `debug` the debug registers
//! and KVM_SET_GUEST_DEBUG.

#![expect(unsafe_code, reason = "decodes the kvm_run page after KVM_RUN")]

mod debug;
mod loaded_state;
mod msrs;
mod transfer;

pub use debug::GuestDebug;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hindsight_cpu::cpuid::{CpuidLeaf, CpuidTable};
use kvm_bindings::{
    CpuId, KVM_EXIT_MEMORY_FAULT, KVM_SYNC_X86_EVENTS, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS,
    kvm_cpuid_entry2, kvm_regs, kvm_sync_regs, kvm_vcpu_events,
};
use kvm_ioctls::VcpuFd;

use self::loaded_state::LoadedState;
use crate::kvm::exit::KvmExit;
use crate::kvm::immediate_exit::ImmediateExit;
use crate::kvm::vm::KvmVm;
use crate::kvm::{KvmError, call, decode, ioctl, ioctls, state};

/// A vCPU in KVM. One thread runs it.
#[derive(Debug)]
pub struct KvmVcpuFd {
    fd: VcpuFd,
    /// The last exit left an instruction incomplete; the next KVM_RUN completes it.
    incomplete: bool,
    /// The registers in the kvm_run page are current: no call has changed any since KVM_RUN.
    synced: bool,
    /// XCR0 as KVM has it.
    xcr0: u64,
    /// The state that KVM is known to have; `None` once the guest has run.
    loaded: Option<Box<LoadedState>>,
    /// The processor may hold translations that the guest invalidated in the interpreter.
    stale_tlb: bool,
    /// The TSC offset that KVM was given last.
    tsc_offset: Option<u64>,
    /// The last KVM_SET_GUEST_DEBUG.
    debug: GuestDebug,
    /// A single step is armed in KVM: setting registers disarms it, unless RIP stays the same.
    step_armed: bool,
    /// The thread is inside of KVM_RUN, or about to enter it.
    in_guest: Arc<AtomicBool>,
    immediate_exit: Arc<ImmediateExit>,
    /// Dropped after `fd`: the VM's memory outlives its vCPUs.
    vm: Arc<KvmVm>,
}

impl KvmVcpuFd {
    /// Creates vCPU `id`. It needs [`KvmVcpuFd::set_cpuid`] before it runs.
    ///
    /// # Errors
    ///
    /// KVM refuses.
    pub fn new(vm: &Arc<KvmVm>, id: u32) -> Result<Self, KvmError> {
        let mut fd = vm.create_vcpu_fd(id)?;
        let valid = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS | KVM_SYNC_X86_EVENTS;
        fd.get_kvm_run().kvm_valid_regs = u64::from(valid);
        let immediate_exit = Arc::new(ImmediateExit::of_vcpu(&mut fd)?);
        Ok(Self {
            fd,
            incomplete: false,
            synced: false,
            xcr0: 1,
            loaded: None,
            stale_tlb: false,
            tsc_offset: None,
            debug: GuestDebug::default(),
            step_armed: false,
            in_guest: Arc::default(),
            immediate_exit,
            vm: vm.clone(),
        })
    }

    /// The flag that makes KVM_RUN return, for [`crate::kvm::kick::KvmKicker`].
    pub(super) const fn immediate_exit(&self) -> &Arc<ImmediateExit> {
        &self.immediate_exit
    }

    /// Whether the thread is inside of KVM_RUN, for [`crate::kvm::kick::KvmKicker`].
    pub(super) const fn in_guest(&self) -> &Arc<AtomicBool> {
        &self.in_guest
    }

    /// KVM_SET_CPUID2 with the leaves of vCPU `id`.
    ///
    /// # Errors
    ///
    /// KVM refuses.
    pub fn set_cpuid(&self, id: u32, cpuid: &CpuidTable) -> Result<(), KvmError> {
        let entries: Vec<_> = cpuid.for_cpu(id).map(cpuid_entry).collect();
        let entries = CpuId::from_entries(&entries)
            .map_err(|_| KvmError::Lacks("space for this machine's CPUID leaves"))?;
        self.fd
            .set_cpuid2(&entries)
            .map_err(ioctl("KVM_SET_CPUID2"))
    }

    /// KVM_RUN: runs the guest until it exits.
    ///
    /// Also returns CR8 as the guest left it: it is the task priority of the APIC, which must know
    /// it before the exit is handled.
    ///
    /// # Errors
    ///
    /// KVM_RUN fails for another reason than a signal.
    pub fn run(&mut self) -> Result<(u64, KvmExit<'_>), KvmError> {
        self.loaded = None;
        self.in_guest.store(true, Ordering::SeqCst);
        let result = self.fd.run().map(|_| ());
        self.in_guest.store(false, Ordering::SeqCst);
        self.incomplete = false;
        self.synced = true;
        let run = self.fd.get_kvm_run();
        let cr8 = run.cr8;
        match result {
            Ok(()) => {
                // SAFETY: the vCPU's page, unchanged since KVM_RUN returned.
                let exit = unsafe { decode::decode(run) };
                self.incomplete = exit.is_incomplete();
                Ok((cr8, exit))
            }
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                Ok((cr8, KvmExit::Kicked))
            }
            Err(_) if run.exit_reason == KVM_EXIT_MEMORY_FAULT => {
                Ok((cr8, decode::memory_fault(run)))
            }
            Err(error) => Err(ioctl("KVM_RUN")(error)),
        }
    }

    /// Completes an instruction that an exit left incomplete, without running the next one.
    ///
    /// Returns `Some` if the same instruction exits again; the caller handles that like any exit.
    ///
    /// # Errors
    ///
    /// KVM_RUN fails.
    pub fn complete(&mut self) -> Result<Option<KvmExit<'_>>, KvmError> {
        if !self.incomplete {
            return Ok(None);
        }
        self.loaded = None;
        self.fd.set_kvm_immediate_exit(1);
        let result = self.fd.run().map(|_| ());
        self.fd.set_kvm_immediate_exit(0);
        self.incomplete = false;
        self.synced = true;
        match result {
            Ok(()) => {
                self.incomplete = true;
                // SAFETY: the vCPU's page; since KVM_RUN returned, only `immediate_exit` changed.
                Ok(Some(unsafe { decode::decode(self.fd.get_kvm_run()) }))
            }
            Err(error) if error.errno() == libc::EINTR => Ok(None),
            Err(error) => Err(ioctl("KVM_RUN")(error)),
        }
    }

    /// General, segment and control registers as they were at the last exit, without an ioctl.
    ///
    /// At an exit that leaves an instruction incomplete, RIP is still on that instruction.
    pub fn regs_at_exit(&self) -> kvm_sync_regs {
        self.fd.sync_regs()
    }

    /// Whether KVM accepts an interrupt now: IF is set, there is no shadow, and none is injected.
    pub fn ready_for_interrupt(&mut self) -> bool {
        self.fd.get_kvm_run().ready_for_interrupt_injection != 0
    }

    /// Requests [`KvmExit::InterruptWindow`], or cancels the request.
    pub fn request_interrupt_window(&mut self, requested: bool) {
        self.fd.get_kvm_run().request_interrupt_window = u8::from(requested);
    }

    /// KVM_INTERRUPT: injects an external interrupt.
    ///
    /// # Errors
    ///
    /// KVM refuses, for example because one is queued already.
    pub fn inject_interrupt(&mut self, vector: u8) -> Result<(), KvmError> {
        self.synced = false;
        ioctls::interrupt(&self.fd, vector).map_err(call("KVM_INTERRUPT"))
    }

    /// KVM_NMI: injects an NMI.
    ///
    /// # Errors
    ///
    /// KVM refuses.
    pub fn inject_nmi(&mut self) -> Result<(), KvmError> {
        self.synced = false;
        self.fd.nmi().map_err(ioctl("KVM_NMI"))
    }

    /// CR8 as the guest last wrote it.
    pub fn cr8(&mut self) -> u64 {
        self.fd.get_kvm_run().cr8
    }

    /// Sets CR8 as the guest will read it.
    pub fn set_cr8(&mut self, cr8: u64) {
        self.fd.get_kvm_run().cr8 = cr8;
    }

    /// Sets the guest's TSC minus the host's, modulo 2^64.
    ///
    /// # Errors
    ///
    /// This KVM lacks the attribute.
    pub fn set_tsc_offset(&mut self, offset: u64) -> Result<(), KvmError> {
        if self.tsc_offset == Some(offset) {
            return Ok(());
        }
        ioctls::set_tsc_offset(&self.fd, offset)
            .map_err(call("KVM_SET_DEVICE_ATTR (TSC offset)"))?;
        self.tsc_offset = Some(offset);
        Ok(())
    }

    /// Frequency of the guest's TSC in kHz, if KVM reports it.
    pub fn tsc_khz(&self) -> Option<u32> {
        self.fd.get_tsc_khz().ok().filter(|khz| *khz > 0)
    }

    /// Whether the pending events can be moved out of KVM at this instruction boundary.
    ///
    /// They cannot during an interrupt shadow, of which KVMs report different kinds, nor while an
    /// NMI is half delivered. An exception or interrupt that waits for delivery is plain data. The
    /// instruction must be complete.
    ///
    /// # Errors
    ///
    /// The ioctl fails.
    pub fn is_movable(&self) -> Result<bool, KvmError> {
        Ok(state::is_movable(&self.events()?))
    }

    fn events(&self) -> Result<kvm_vcpu_events, KvmError> {
        if self.synced {
            return Ok(self.fd.sync_regs().events);
        }
        let events = self.fd.get_vcpu_events();
        events.map_err(ioctl("KVM_GET_VCPU_EVENTS"))
    }

    /// The vector of the exception that waits for delivery.
    ///
    /// For a #DB, KVM has stored its conditions in DR6 already.
    ///
    /// # Errors
    ///
    /// The ioctl fails.
    pub fn pending_exception(&self) -> Result<Option<u8>, KvmError> {
        let exception = self.events()?.exception;
        let is_pending = exception.injected != 0 || exception.pending != 0;
        Ok(is_pending.then_some(exception.nr))
    }

    /// The general registers. The instruction must be complete.
    ///
    /// # Errors
    ///
    /// The ioctl fails.
    pub fn general_registers(&self) -> Result<kvm_regs, KvmError> {
        debug_assert!(!self.incomplete, "complete the instruction first");
        if self.synced {
            return Ok(self.fd.sync_regs().regs);
        }
        self.fd.get_regs().map_err(ioctl("KVM_GET_REGS"))
    }

    /// The linear address of the next instruction.
    ///
    /// # Errors
    ///
    /// An ioctl fails.
    pub fn code_address(&self) -> Result<u64, KvmError> {
        let rip = self.general_registers()?.rip;
        let cs = if self.synced {
            self.fd.sync_regs().sregs.cs
        } else {
            let sregs = self.fd.get_sregs();
            sregs.map_err(ioctl("KVM_GET_SREGS"))?.cs
        };
        Ok(match cs.l {
            0 => cs.base.wrapping_add(rip) & 0xffff_ffff,
            _ => rip,
        })
    }

    /// KVM_TRANSLATE: the guest-physical address of a linear one, by the guest's page tables.
    pub fn translate(&self, linear: u64) -> Option<u64> {
        let translation = self.fd.translate_gva(linear).ok()?;
        (translation.valid != 0).then_some(translation.physical_address)
    }

    /// The machine that this vCPU belongs to.
    pub const fn vm(&self) -> &Arc<KvmVm> {
        &self.vm
    }
}

fn cpuid_entry(leaf: CpuidLeaf) -> kvm_cpuid_entry2 {
    const SIGNIFICANT_INDEX: u32 = 1;
    let [eax, ebx, ecx, edx] = leaf.regs;
    kvm_cpuid_entry2 {
        function: leaf.leaf,
        index: leaf.subleaf.unwrap_or(0),
        flags: if leaf.subleaf.is_some() {
            SIGNIFICANT_INDEX
        } else {
            0
        },
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    }
}
