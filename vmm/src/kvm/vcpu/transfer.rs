//! Loads a whole [`CpuState`] into KVM, and stores KVM's state in one.

#![expect(unsafe_code, reason = "KVM_SET_XSAVE")]

use hindsight_cpu::state::{CpuState, XsaveArea};
use hindsight_regs::cr::Cr0;
use kvm_bindings::{kvm_sregs, kvm_xcr, kvm_xcrs, kvm_xsave};

use super::KvmVcpuFd;
use super::loaded_state::LoadedState;
use crate::kvm::{KvmError, call, ioctl, ioctls, state};

impl KvmVcpuFd {
    /// Loads the whole state into KVM. `apic_base` is the local APIC's.
    ///
    /// The order matters: SREGS before REGS (mode before RIP and flags), XCR0 before the XSAVE
    /// image that it governs, events last because the calls before may clear them.
    ///
    /// # Errors
    ///
    /// KVM refuses the state.
    pub fn load(&mut self, state: &CpuState, apic_base: u64) -> Result<(), KvmError> {
        debug_assert!(!self.incomplete, "complete the instruction first");
        self.synced = false;
        let old = self.loaded.take();
        let old = old.as_deref();
        let new = LoadedState::of(state, apic_base);
        if std::mem::take(&mut self.stale_tlb) {
            // KVM has no call for it, but flushes the TLB when CR0 changes.
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
            self.load_base_msrs(new.msrs)?;
        }
        if old.is_none_or(|old| old.debug != new.debug) {
            self.set_debug_registers(&new.debug)?;
        }
        self.step_armed = false;
        self.fd
            .set_regs(&state::export_regs(state))
            .map_err(ioctl("KVM_SET_REGS"))?;
        self.fd
            .set_vcpu_events(&state::export_events(state, false))
            .map_err(ioctl("KVM_SET_VCPU_EVENTS"))?;
        self.loaded = Some(Box::new(new));
        Ok(())
    }

    /// Makes the next [`KvmVcpuFd::load`] flush the TLB, because the guest has invalidated
    /// translations in the interpreter.
    pub const fn flush_tlb_on_load(&mut self) {
        self.stale_tlb = true;
    }

    fn load_sregs(&self, state: &CpuState, sregs: &kvm_sregs) -> Result<(), KvmError> {
        if hindsight_cpu::page_walk::has_pdptrs(state) && self.vm.has_sregs2() {
            let sregs2 = state::export_sregs2(sregs, state);
            return ioctls::set_sregs2(&self.fd, &sregs2).map_err(call("KVM_SET_SREGS2"));
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

    fn load_xsave(&self, state: &CpuState) -> Result<(), KvmError> {
        let bytes = self.vm.xsave_layout().export(&state.xsave);
        let mut xsave = kvm_xsave::default();
        for (word, bytes) in xsave.region.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        // SAFETY: KVM reads more than the fixed 4 KiB only if dynamic XSAVE components are enabled
        // (arch_prctl), and this program never enables any.
        unsafe { self.fd.set_xsave(&xsave) }.map_err(ioctl("KVM_SET_XSAVE"))
    }

    /// Stores the x87 and vector registers, also while an instruction is incomplete.
    ///
    /// # Errors
    ///
    /// The ioctl fails.
    pub fn store_xsave(&self, area: &mut XsaveArea) -> Result<(), KvmError> {
        let xsave = self.fd.get_xsave().map_err(ioctl("KVM_GET_XSAVE"))?;
        let mut bytes = [0; 4096];
        for (to, word) in bytes.chunks_exact_mut(4).zip(xsave.region) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        self.vm.xsave_layout().import(&bytes, area);
        Ok(())
    }

    /// Stores the general, segment and control registers of the last exit, without an ioctl.
    pub fn store_regs_at_exit(&self, state: &mut CpuState) {
        let regs = self.fd.sync_regs();
        state::import_regs(&regs.regs, state);
        state::import_sregs(&regs.sregs, state);
    }

    /// Sets RFLAGS, and the other general registers as they were at the last exit.
    ///
    /// # Errors
    ///
    /// The ioctl fails.
    pub fn set_rflags_at_exit(&mut self, rflags: u64) -> Result<(), KvmError> {
        let mut regs = self.fd.sync_regs().regs;
        regs.rflags = rflags;
        self.synced = false;
        self.step_armed = false;
        self.fd.set_regs(&regs).map_err(ioctl("KVM_SET_REGS"))
    }

    /// Stores the whole state of KVM in `state`. The instruction must be complete.
    ///
    /// # Errors
    ///
    /// An ioctl fails.
    pub fn store(&mut self, state: &mut CpuState) -> Result<(), KvmError> {
        debug_assert!(!self.incomplete, "complete the instruction first");
        let fd = &self.fd;
        let (regs, sregs) = if self.synced {
            let synced = fd.sync_regs();
            (synced.regs, synced.sregs)
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
        self.base_msrs()?.store(state);
        let dr = self.debug_registers()?;
        (state.dr, state.dr6, state.dr7) = (dr.addresses, dr.status, dr.control);
        let events = self.events()?;
        state::import_events(&events, state);
        if hindsight_cpu::page_walk::has_pdptrs(state) {
            state.pdptr = self.page_directory_pointers(state.cr3)?;
        }
        self.loaded = Some(Box::new(LoadedState::of(state, sregs.apic_base)));
        Ok(())
    }

    /// The page-directory pointers of PAE paging: those in use if KVM reports them, otherwise those
    /// in memory.
    fn page_directory_pointers(&self, cr3: u64) -> Result<[u64; 4], KvmError> {
        if !self.vm.has_sregs2() {
            return Ok(self.vm.read_page_directory_pointers(cr3));
        }
        let sregs = ioctls::sregs2(&self.fd).map_err(call("KVM_GET_SREGS2"))?;
        Ok(sregs.pdptrs)
    }
}
