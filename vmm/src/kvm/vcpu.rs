//! One virtual processor in KVM.

#![expect(
    unsafe_code,
    reason = "other threads set immediate_exit in the kvm_run page"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use hindsight_cpu::cpuid::{CpuidLeaf, CpuidTable};
use hindsight_cpu::debug::DebugRegisters;
use hindsight_cpu::msr::NATIVE_MSRS;
use hindsight_cpu::state::{CpuState, XsaveArea};
use hindsight_regs::cr::Cr0;
use hindsight_regs::vector::Vector;
use kvm_bindings::{
    CpuId, KVM_EXIT_MEMORY_FAULT, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP,
    KVM_GUESTDBG_USE_HW_BP, KVM_SYNC_X86_EVENTS, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS, Msrs,
    kvm_cpuid_entry2, kvm_debugregs, kvm_guest_debug, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_sync_regs, kvm_vcpu_events, kvm_xcr, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;

use crate::kvm::exit::Exit;
use crate::kvm::state::{self, XsaveLayout};
use crate::kvm::vm::KvmVm;
use crate::kvm::{KvmError, ioctl, ioctls, run};

/// A virtual processor in KVM, run by one thread.
#[derive(Debug)]
pub struct KvmVcpuFd {
    fd: VcpuFd,
    xsave_layout: XsaveLayout,
    /// An instruction waits for KVM_RUN to complete it.
    pending: bool,
    /// What KVM_RUN left in the kvm_run page is still the state: no call has changed any since.
    synced: bool,
    /// XCR0 as KVM has it.
    xcr0: u64,
    /// What KVM is known to hold; `None` once the guest has run.
    held: Option<Box<Held>>,
    /// The processor may have translations that the guest has invalidated elsewhere.
    stale: bool,
    /// The TSC offset that KVM was given last.
    tsc_offset: Option<u64>,
    /// What KVM was told last of debugging the guest.
    debug: GuestDebug,
    /// A step that KVM was told of is still on: setting registers ends it, unless RIP is where it was then.
    steps: bool,
    /// The thread is inside of KVM_RUN, or about to be.
    in_guest: Arc<AtomicBool>,
    /// After `fd`: the machine's memory outlives its processors.
    vm: Arc<KvmVm>,
}

/// The parts of the state that a stay in the interpreter often leaves alone: what KVM still holds is not told again.
#[derive(Debug, PartialEq)]
struct Held {
    sregs: kvm_sregs,
    pdptr: [u64; 4],
    xcr0: u64,
    xsave: XsaveArea,
    msrs: [u64; NATIVE_MSRS.len()],
    debug: DebugRegisters,
}

impl Held {
    fn of(state: &CpuState, apic_base: u64) -> Self {
        Self {
            sregs: state::export_sregs(state, apic_base),
            pdptr: state.pdptr,
            xcr0: state.xcr0,
            xsave: state.xsave.clone(),
            msrs: NATIVE_MSRS.map(|(_, msr)| state.msr(msr)),
            debug: state.debug(),
        }
    }
}

/// How KVM debugs the guest for us: KVM_SET_GUEST_DEBUG.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestDebug {
    /// It exits behind every instruction. KVM then hides RFLAGS.TF of the guest from us, and loses it.
    pub step: bool,
    /// These DR0-3 and DR7 are in the processor in place of the guest's. #DB then exits, and MOV DR
    /// if GD is set.
    pub registers: Option<DebugRegisters>,
}

impl GuestDebug {
    /// A step.
    pub const STEP: Self = Self {
        step: true,
        registers: None,
    };

    /// A breakpoint on execution at a linear address.
    pub fn until(address: u64) -> Self {
        let mut registers = DebugRegisters::RESET;
        registers.addresses[0] = address;
        // G0; of type 0, execution.
        registers.control |= 2;
        Self {
            step: false,
            registers: Some(registers),
        }
    }
}

/// Makes a running [`KvmVcpuFd`] leave KVM_RUN, from any thread.
#[derive(Debug)]
pub struct ImmediateExit(*const AtomicU8);

// SAFETY: the byte is only accessed atomically, and whoever holds this also keeps the mapping
// alive (see `KvmVcpuFd::immediate_exit`).
unsafe impl Send for ImmediateExit {}
// SAFETY: as for Send.
unsafe impl Sync for ImmediateExit {}

impl ImmediateExit {
    /// The next, or the current, KVM_RUN returns at once until [`ImmediateExit::clear`]. A thread
    /// that is inside KVM_RUN also needs a signal.
    pub fn set(&self) {
        // SAFETY: the kvm_run page is mapped as long as `self` exists.
        unsafe { &*self.0 }.store(1, Ordering::SeqCst);
    }

    /// KVM_RUN runs again.
    pub fn clear(&self) {
        // SAFETY: the kvm_run page is mapped as long as `self` exists.
        unsafe { &*self.0 }.store(0, Ordering::SeqCst);
    }
}

impl KvmVcpuFd {
    pub(super) fn new(mut fd: VcpuFd, vm: Arc<KvmVm>, xsave_layout: XsaveLayout) -> Self {
        let valid = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS | KVM_SYNC_X86_EVENTS;
        fd.get_kvm_run().kvm_valid_regs = u64::from(valid);
        Self {
            fd,
            xsave_layout,
            pending: false,
            synced: false,
            xcr0: 1,
            held: None,
            stale: false,
            tsc_offset: None,
            debug: GuestDebug::default(),
            steps: false,
            in_guest: Arc::default(),
            vm,
        }
    }

    /// The handle for other threads. The caller drops it, or stops using it, before this processor.
    pub fn immediate_exit(&mut self) -> ImmediateExit {
        let byte = &raw mut self.fd.get_kvm_run().immediate_exit;
        ImmediateExit(byte.cast::<AtomicU8>())
    }

    /// Whether the thread is inside of KVM_RUN, for [`crate::kvm::kick::Kicker`].
    pub(super) fn in_guest(&self) -> Arc<AtomicBool> {
        self.in_guest.clone()
    }

    /// Gives processor `id` its CPUID.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn set_cpuid(&self, id: u32, cpuid: &CpuidTable) -> Result<(), KvmError> {
        let entries: Vec<_> = cpuid.for_cpu(id).map(entry).collect();
        let entries = CpuId::from_entries(&entries)
            .map_err(|_| KvmError::Lacks("room for our CPUID leaves"))?;
        self.fd
            .set_cpuid2(&entries)
            .map_err(ioctl("KVM_SET_CPUID2"))
    }

    /// Runs the guest until something needs us. Gives CR8 as the guest left it as well: whoever
    /// serves the exit must know it first, for it is the APIC's task priority.
    ///
    /// # Errors
    ///
    /// When KVM_RUN fails other than by a signal.
    pub fn run(&mut self) -> Result<(u64, Exit<'_>), KvmError> {
        self.held = None;
        self.in_guest.store(true, Ordering::SeqCst);
        let result = self.fd.run().map(|_| ());
        self.in_guest.store(false, Ordering::SeqCst);
        self.pending = false;
        self.synced = true;
        let run = self.fd.get_kvm_run();
        let cr8 = run.cr8;
        match result {
            Ok(()) => {
                let exit = run::decode(run);
                self.pending = matches!(
                    exit,
                    Exit::Io { .. }
                        | Exit::MmioRead { .. }
                        | Exit::MmioWrite { .. }
                        | Exit::Rdmsr { .. }
                        | Exit::Wrmsr { .. }
                );
                Ok((cr8, exit))
            }
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                Ok((cr8, Exit::Kicked))
            }
            Err(_) if run.exit_reason == KVM_EXIT_MEMORY_FAULT => Ok((cr8, run::memory_fault(run))),
            Err(error) => Err(ioctl("KVM_RUN")(error)),
        }
    }

    /// Completes an instruction that an exit left half done, without running the next one.
    /// `Some` is a further exit of the same instruction, to be served like any other.
    ///
    /// # Errors
    ///
    /// When KVM_RUN fails.
    pub fn complete(&mut self) -> Result<Option<Exit<'_>>, KvmError> {
        if !self.pending {
            return Ok(None);
        }
        self.held = None;
        self.fd.set_kvm_immediate_exit(1);
        let result = self.fd.run().map(|_| ());
        self.fd.set_kvm_immediate_exit(0);
        self.pending = false;
        self.synced = true;
        match result {
            Ok(()) => {
                self.pending = true;
                Ok(Some(run::decode(self.fd.get_kvm_run())))
            }
            Err(error) if error.errno() == libc::EINTR => Ok(None),
            Err(error) => Err(ioctl("KVM_RUN")(error)),
        }
    }

    /// General, segment and control registers as they were at the last exit, at no cost. At an exit
    /// that left an instruction half done, RIP is still on it.
    pub fn at_exit(&self) -> kvm_sync_regs {
        self.fd.sync_regs()
    }

    /// Whether KVM takes an interrupt now: IF set, no shadow, none injected yet.
    pub fn ready_for_interrupt(&mut self) -> bool {
        self.fd.get_kvm_run().ready_for_interrupt_injection != 0
    }

    /// Asks for [`Exit::InterruptWindow`], or no longer.
    pub fn request_interrupt_window(&mut self, wanted: bool) {
        self.fd.get_kvm_run().request_interrupt_window = u8::from(wanted);
    }

    /// Injects an external interrupt.
    ///
    /// # Errors
    ///
    /// When KVM refuses, for example because one waits already.
    pub fn interrupt(&mut self, vector: u8) -> Result<(), KvmError> {
        self.synced = false;
        ioctls::interrupt(&self.fd, vector).map_err(|source| KvmError::Ioctl {
            call: "KVM_INTERRUPT",
            source,
        })
    }

    /// Injects an NMI.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn nmi(&mut self) -> Result<(), KvmError> {
        self.synced = false;
        self.fd.nmi().map_err(ioctl("KVM_NMI"))
    }

    /// CR8 as the guest last wrote it.
    pub fn cr8(&mut self) -> u64 {
        self.fd.get_kvm_run().cr8
    }

    /// CR8 as the guest will read it.
    pub fn set_cr8(&mut self, cr8: u64) {
        self.fd.get_kvm_run().cr8 = cr8;
    }

    /// The machine's TSC minus the host's, modulo 2^64.
    ///
    /// # Errors
    ///
    /// When this KVM has no such attribute.
    pub fn set_tsc_offset(&mut self, offset: u64) -> Result<(), KvmError> {
        if self.tsc_offset == Some(offset) {
            return Ok(());
        }
        ioctls::set_tsc_offset(&self.fd, offset).map_err(|source| KvmError::Ioctl {
            call: "KVM_SET_DEVICE_ATTR (TSC offset)",
            source,
        })?;
        self.tsc_offset = Some(offset);
        Ok(())
    }

    /// Frequency of the guest's TSC in kHz as KVM states it.
    pub fn tsc_khz(&self) -> Option<u32> {
        self.fd.get_tsc_khz().ok().filter(|khz| *khz > 0)
    }

    /// Sets one MSR in KVM. `false`: KVM does not take it.
    ///
    /// # Errors
    ///
    /// When the ioctl itself fails.
    pub fn set_msr(&self, index: u32, data: u64) -> Result<bool, KvmError> {
        let entry = kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let msrs = Msrs::from_entries(&[entry]).expect("one entry always fits");
        let done = self.fd.set_msrs(&msrs).map_err(ioctl("KVM_SET_MSRS"))?;
        Ok(done == 1)
    }

    /// Sets several MSRs in KVM, with one call where KVM takes them all. Answers the indices of
    /// those that it does not take.
    ///
    /// # Errors
    ///
    /// When the ioctl itself fails.
    pub fn set_msrs(
        &self,
        values: impl IntoIterator<Item = (u32, u64)>,
    ) -> Result<Vec<u32>, KvmError> {
        let entries: Vec<_> = values
            .into_iter()
            .map(|(index, data)| kvm_msr_entry {
                index,
                data,
                ..Default::default()
            })
            .collect();
        let mut refused = Vec::new();
        let mut rest = entries.as_slice();
        while !rest.is_empty() {
            let msrs = Msrs::from_entries(rest)
                .map_err(|_| KvmError::Lacks("room for our MSRs in one call"))?;
            let done = self.fd.set_msrs(&msrs).map_err(ioctl("KVM_SET_MSRS"))?;
            // It stops at the first one that it does not take.
            let (_, after) = rest.split_at(done.min(rest.len()));
            rest = after;
            if let Some((first, after)) = after.split_first() {
                refused.push(first.index);
                rest = after;
            }
        }
        Ok(refused)
    }

    /// The values of [`NATIVE_MSRS`]; 0 for those that KVM lacks.
    fn native_msrs(&self) -> Result<[u64; NATIVE_MSRS.len()], KvmError> {
        let mut values = [0; NATIVE_MSRS.len()];
        let mut from = 0;
        while from < NATIVE_MSRS.len() {
            let entries: Vec<_> = NATIVE_MSRS[from..]
                .iter()
                .map(|&(index, _)| kvm_msr_entry {
                    index,
                    ..Default::default()
                })
                .collect();
            let mut msrs = Msrs::from_entries(&entries)
                .map_err(|_| KvmError::Lacks("room for our MSRs in one call"))?;
            let done = self.fd.get_msrs(&mut msrs).map_err(ioctl("KVM_GET_MSRS"))?;
            for (value, entry) in values[from..].iter_mut().zip(&msrs.as_slice()[..done]) {
                *value = entry.data;
            }
            // It stops at the first one that it does not have.
            from += done + 1;
        }
        Ok(values)
    }

    /// Whether what is under way at this instruction boundary can be moved out of KVM: no shadow,
    /// which KVMs tell apart differently, and no NMI half delivered. An exception or an interrupt
    /// that waits for delivery is plain data. The instruction under way must be complete.
    ///
    /// # Errors
    ///
    /// When the ioctl fails.
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

    /// The exception that waits for delivery, by its vector. KVM then has the conditions of a #DB in
    /// DR6.
    ///
    /// # Errors
    ///
    /// When the ioctl fails.
    pub fn waiting_exception(&self) -> Result<Option<u8>, KvmError> {
        let exception = self.events()?.exception;
        let waits = exception.injected != 0 || exception.pending != 0;
        Ok(waits.then_some(exception.nr))
    }

    /// Has a #DB delivered before the next instruction. Its conditions must be in DR6 already.
    ///
    /// # Errors
    ///
    /// When the ioctl fails.
    pub fn inject_debug_exception(&mut self) -> Result<(), KvmError> {
        let mut events = self.events()?;
        self.synced = false;
        (events.exception.injected, events.exception.pending) = (1, 0);
        (events.exception.nr, events.exception.has_error_code) = (Vector::DB.0, 0);
        events.exception_has_payload = 0;
        // The instruction that the shadow was for is over.
        events.interrupt.shadow = 0;
        self.fd
            .set_vcpu_events(&events)
            .map_err(ioctl("KVM_SET_VCPU_EVENTS"))
    }

    /// The guest's debug registers, whoever holds them.
    ///
    /// # Errors
    ///
    /// When the ioctl fails.
    pub fn debug_registers(&self) -> Result<DebugRegisters, KvmError> {
        let dr = self.fd.get_debug_regs();
        let dr = dr.map_err(ioctl("KVM_GET_DEBUGREGS"))?;
        Ok(DebugRegisters {
            addresses: dr.db,
            status: dr.dr6,
            control: dr.dr7,
        })
    }

    /// Sets the guest's debug registers.
    ///
    /// # Errors
    ///
    /// When KVM refuses a value.
    pub fn set_debug_registers(&mut self, registers: &DebugRegisters) -> Result<(), KvmError> {
        self.held = None;
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

    /// Has KVM debug the guest in this way from now on.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn set_guest_debug(&mut self, wanted: &GuestDebug) -> Result<(), KvmError> {
        if self.debug == *wanted && self.steps == wanted.step {
            return Ok(());
        }
        let mut debug = kvm_guest_debug::default();
        if wanted.step {
            debug.control |= KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;
        }
        if let Some(registers) = &wanted.registers {
            debug.control |= KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
            debug.arch.debugreg[..4].copy_from_slice(&registers.addresses);
            debug.arch.debugreg[7] = registers.control;
        }
        self.fd
            .set_guest_debug(&debug)
            .map_err(ioctl("KVM_SET_GUEST_DEBUG"))?;
        self.debug = *wanted;
        self.steps = wanted.step;
        Ok(())
    }

    /// General registers between two instructions.
    ///
    /// # Errors
    ///
    /// When the ioctl fails.
    pub fn general(&self) -> Result<kvm_regs, KvmError> {
        if self.synced {
            return Ok(self.fd.sync_regs().regs);
        }
        self.fd.get_regs().map_err(ioctl("KVM_GET_REGS"))
    }

    /// The linear address of the next instruction.
    ///
    /// # Errors
    ///
    /// When an ioctl fails.
    pub fn code_address(&self) -> Result<u64, KvmError> {
        let rip = self.general()?.rip;
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

    /// The guest-physical address of a linear one, by the guest's page tables.
    pub fn translate(&self, linear: u64) -> Option<u64> {
        let found = self.fd.translate_gva(linear).ok()?;
        (found.valid != 0).then_some(found.physical_address)
    }

    /// Gives KVM the whole state. `apic_base` is the local APIC's.
    ///
    /// The order matters: SREGS before REGS (mode before RIP and flags), XCR0 before the XSAVE
    /// image that it governs, events last because the calls before may clear them.
    ///
    /// # Errors
    ///
    /// When KVM refuses the state.
    pub fn load(&mut self, state: &CpuState, apic_base: u64) -> Result<(), KvmError> {
        debug_assert!(!self.pending, "complete the instruction first");
        self.synced = false;
        let old = self.held.take();
        let old = old.as_deref();
        let new = Held::of(state, apic_base);
        if std::mem::take(&mut self.stale) {
            // There is no call for it: KVM forgets translations when CR0 changes.
            let mut other = new.sregs;
            other.cr0 ^= Cr0::WP.bits();
            self.load_sregs(state, &other)?;
            self.load_sregs(state, &new.sregs)?;
        } else if old.is_none_or(|old| (&old.sregs, old.pdptr) != (&new.sregs, new.pdptr)) {
            self.load_sregs(state, &new.sregs)?;
        }
        if new.xcr0 != self.xcr0 {
            self.load_xcr0(new.xcr0)?;
        }
        if old.is_none_or(|old| (old.xcr0, &old.xsave) != (new.xcr0, &new.xsave)) {
            self.load_xsave(state)?;
        }
        if old.is_none_or(|old| old.msrs != new.msrs) {
            self.load_msrs(new.msrs)?;
        }
        if old.is_none_or(|old| old.debug != new.debug) {
            self.set_debug_registers(&new.debug)?;
        }
        self.steps = false;
        self.fd
            .set_regs(&state::export_regs(state))
            .map_err(ioctl("KVM_SET_REGS"))?;
        self.fd
            .set_vcpu_events(&state::export_events(state, false))
            .map_err(ioctl("KVM_SET_VCPU_EVENTS"))?;
        self.held = Some(Box::new(new));
        Ok(())
    }

    /// The guest has invalidated translations while something else ran it: the next [`KvmVcpuFd::load`] has the
    /// processor forget all.
    pub const fn forget_translations(&mut self) {
        self.stale = true;
    }

    fn load_sregs(&self, state: &CpuState, sregs: &kvm_sregs) -> Result<(), KvmError> {
        if state.has_pae_paging() && self.vm.has_sregs2() {
            let sregs2 = state::export_sregs2(sregs, state);
            return ioctls::set_sregs2(&self.fd, &sregs2).map_err(|source| {
                let call = "KVM_SET_SREGS2";
                KvmError::Ioctl { call, source }
            });
        }
        self.fd.set_sregs(sregs).map_err(ioctl("KVM_SET_SREGS"))
    }

    fn load_xcr0(&mut self, xcr0: u64) -> Result<(), KvmError> {
        let mut xcrs = kvm_xcrs {
            nr_xcrs: 1,
            ..Default::default()
        };
        xcrs.xcrs[0] = kvm_xcr {
            xcr: 0,
            reserved: 0,
            value: xcr0,
        };
        self.fd.set_xcrs(&xcrs).map_err(ioctl("KVM_SET_XCRS"))?;
        self.xcr0 = xcr0;
        Ok(())
    }

    fn load_msrs(&self, values: [u64; NATIVE_MSRS.len()]) -> Result<(), KvmError> {
        let entries = || NATIVE_MSRS.into_iter().map(|(index, _)| index).zip(values);
        let refused = self.set_msrs(entries())?;
        let mut needed = entries().filter(|&(_, value)| value != 0);
        if needed.any(|(index, _)| refused.contains(&index)) {
            return Err(KvmError::Lacks("an MSR of the base architecture"));
        }
        Ok(())
    }

    fn load_xsave(&self, state: &CpuState) -> Result<(), KvmError> {
        let bytes = self.xsave_layout.export(&state.xsave);
        let mut xsave = kvm_xsave::default();
        for (word, bytes) in xsave.region.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        // SAFETY: without dynamically enabled components KVM reads only the fixed 4 KiB.
        unsafe { self.fd.set_xsave(&xsave) }.map_err(ioctl("KVM_SET_XSAVE"))
    }

    /// Takes the x87 and vector registers, also where an exit left an instruction half done.
    ///
    /// # Errors
    ///
    /// When the ioctl fails.
    pub fn store_xsave(&self, area: &mut XsaveArea) -> Result<(), KvmError> {
        let xsave = self.fd.get_xsave().map_err(ioctl("KVM_GET_XSAVE"))?;
        let mut bytes = [0; 4096];
        for (to, word) in bytes.chunks_exact_mut(4).zip(xsave.region) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        self.xsave_layout.import(&bytes, area);
        Ok(())
    }

    /// Takes the general, segment and control registers as they were at the last exit, at no cost.
    pub fn store_at_exit(&self, state: &mut CpuState) {
        let there = self.fd.sync_regs();
        state::import_regs(&there.regs, state);
        state::import_sregs(&there.sregs, state);
    }

    /// Changes RFLAGS as they were at the last exit.
    ///
    /// # Errors
    ///
    /// When the ioctl fails.
    pub fn set_flags_at_exit(&mut self, rflags: u64) -> Result<(), KvmError> {
        let mut regs = self.fd.sync_regs().regs;
        regs.rflags = rflags;
        self.synced = false;
        self.steps = false;
        self.fd.set_regs(&regs).map_err(ioctl("KVM_SET_REGS"))
    }

    /// Takes the whole state out of KVM. The instruction under way must be complete.
    ///
    /// # Errors
    ///
    /// When an ioctl fails.
    pub fn store(&mut self, state: &mut CpuState) -> Result<(), KvmError> {
        debug_assert!(!self.pending, "complete the instruction first");
        let fd = &self.fd;
        let (regs, sregs) = if self.synced {
            let there = fd.sync_regs();
            (there.regs, there.sregs)
        } else {
            (
                fd.get_regs().map_err(ioctl("KVM_GET_REGS"))?,
                fd.get_sregs().map_err(ioctl("KVM_GET_SREGS"))?,
            )
        };
        state::import_regs(&regs, state);
        state::import_sregs(&sregs, state);
        self.store_xsave(&mut state.xsave)?;
        if let Ok(xcrs) = fd.get_xcrs() {
            let count = (xcrs.nr_xcrs as usize).min(xcrs.xcrs.len());
            if let Some(x) = xcrs.xcrs[..count].iter().find(|x| x.xcr == 0) {
                state.xcr0 = x.value;
                self.xcr0 = x.value;
            }
        }
        for ((_, msr), value) in NATIVE_MSRS.into_iter().zip(self.native_msrs()?) {
            *state.msr_mut(msr) = value;
        }
        let dr = self.debug_registers()?;
        (state.dr, state.dr6, state.dr7) = (dr.addresses, dr.status, dr.control);
        let events = self.events()?;
        state::import_events(&events, state);
        if state.has_pae_paging() {
            state.pdptr = self.page_directory_pointers(state.cr3)?;
        }
        self.held = Some(Box::new(Held::of(state, sregs.apic_base)));
        Ok(())
    }

    /// The page-directory pointers that PAE paging uses: those that were loaded, where KVM tells,
    /// else those that are in memory now.
    fn page_directory_pointers(&self, cr3: u64) -> Result<[u64; 4], KvmError> {
        if !self.vm.has_sregs2() {
            return Ok(self.vm.read_page_directory_pointers(cr3));
        }
        let sregs = ioctls::sregs2(&self.fd).map_err(|source| {
            let call = "KVM_GET_SREGS2";
            KvmError::Ioctl { call, source }
        })?;
        Ok(sregs.pdptrs)
    }

    /// The machine this processor belongs to.
    pub const fn vm(&self) -> &Arc<KvmVm> {
        &self.vm
    }
}

fn entry(leaf: CpuidLeaf) -> kvm_cpuid_entry2 {
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
