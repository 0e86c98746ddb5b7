//! KVM's side: a virtual machine with one vCPU that runs system batches.

#![expect(
    unsafe_code,
    reason = "KVM gets the address of guest memory, and a signal handler is installed"
)]

use crate::mapping::SharedRam;
use crate::system::batch::SystemBatch;
use crate::system::kernel64::MEMORY;
use crate::system::ram::{BatchEnd, BatchRam};
use anyhow::{Context, Result, bail};
use hindsight_cpu::state::{CpuState, DescriptorTable, Segment};
use hindsight_regs::dr::{Dr6, Dr7};
use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, kvm_dtable, kvm_regs, kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

/// Seconds after which a batch in KVM is taken for one without an end, even in an emulator.
const TIME_LIMIT: u32 = 30;
/// Address of the TSS that KVM needs on Intel processors without unrestricted guest.
const KVM_TSS: usize = 0xfffb_d000;

/// The host's KVM with one vCPU.
#[derive(Debug)]
pub(super) struct KvmRunner {
    vcpu: VcpuFd,
    _vm: VmFd,
    ram: BatchRam,
}

/// Handles SIGALRM. Without SA_RESTART the signal ends KVM_RUN.
extern "C" fn on_alarm(_: libc::c_int) {}

impl KvmRunner {
    /// A new virtual machine.
    ///
    /// # Errors
    /// If KVM cannot be used, or memory cannot be mapped.
    pub(super) fn new() -> Result<Self> {
        // SAFETY: zeros are a valid sigaction, and the handler does nothing, so that it may
        // interrupt any code.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_alarm as *const () as usize;
            libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut());
        }
        let kvm = Kvm::new().context("cannot use KVM: is /dev/kvm present and writable?")?;
        let vm = kvm.create_vm()?;
        vm.set_tss_address(KVM_TSS).ok();
        let ram = SharedRam::new(MEMORY)?;
        let slot = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: ram.pointer().addr() as u64,
        };
        // SAFETY: the mapping has this length. The runner drops the machine before the RAM, and
        // accesses the RAM only while the vCPU does not run, because both need the runner mutably.
        unsafe { vm.set_user_memory_region(slot) }?;
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
        Ok(Self {
            vcpu,
            _vm: vm,
            ram: BatchRam::new(ram),
        })
    }

    /// The guest's memory.
    pub(super) fn ram(&self) -> &BatchRam {
        &self.ram
    }

    /// Runs a batch. If it does not end with [`BatchEnd::Done`], a new runner must replace this
    /// one.
    ///
    /// # Errors
    /// If KVM fails, exits for another reason, or the batch takes longer than [`TIME_LIMIT`].
    pub(super) fn run(&mut self, batch: &SystemBatch) -> Result<BatchEnd> {
        self.ram.load(batch);
        self.set_state(&batch.kernel.start(batch))?;
        // SAFETY: `new` installed a handler for SIGALRM, so the signal only ends KVM_RUN.
        unsafe { libc::alarm(TIME_LIMIT) };
        let exit = self.vcpu.run();
        // SAFETY: it cancels the alarm.
        unsafe { libc::alarm(0) };
        match exit.context("KVM did not come to the end of the batch")? {
            VcpuExit::IoOut(0xf4, _) => {}
            VcpuExit::Shutdown => return Ok(BatchEnd::Shutdown),
            other => bail!("KVM ended the batch with {other:?}"),
        }
        // KVM completes the OUT when it is entered again. It must not run the guest then, and the
        // next batch sets all state anew.
        self.vcpu.set_kvm_immediate_exit(1);
        let _ = self.vcpu.run();
        self.vcpu.set_kvm_immediate_exit(0);
        Ok(BatchEnd::Done)
    }

    fn set_state(&self, state: &CpuState) -> Result<()> {
        let mut sregs = self.vcpu.get_sregs()?;
        let segments = state.seg.each_ref().map(kvm_segment_of);
        [sregs.es, sregs.cs, sregs.ss, sregs.ds, sregs.fs, sregs.gs] = segments;
        (sregs.tr, sregs.ldt) = (kvm_segment_of(&state.tr), kvm_segment_of(&state.ldtr));
        let table = |t: DescriptorTable| kvm_dtable {
            base: t.base,
            limit: t.limit,
            padding: [0; 3],
        };
        (sregs.gdt, sregs.idt) = (table(state.gdtr), table(state.idtr));
        (sregs.cr0, sregs.cr2) = (state.cr0, state.cr2);
        (sregs.cr3, sregs.cr4) = (state.cr3, state.cr4);
        (sregs.cr8, sregs.efer) = (0, state.efer);
        self.vcpu.set_sregs(&sregs)?;
        self.vcpu.set_regs(&kvm_regs {
            rsp: state.gpr[4],
            rip: state.rip,
            rflags: state.rflags,
            ..kvm_regs::default()
        })?;
        let mut debug = self.vcpu.get_debug_regs()?;
        (debug.db, debug.dr6, debug.dr7) = ([0; 4], Dr6::RESET, Dr7::RESET.0);
        self.vcpu.set_debug_regs(&debug)?;
        Ok(())
    }
}

fn kvm_segment_of(s: &Segment) -> kvm_segment {
    let bit = |n: u16| u8::from(s.access >> n & 1 != 0);
    kvm_segment {
        base: s.base,
        limit: s.limit,
        selector: s.selector,
        type_: s.access.to_le_bytes()[0] & 15,
        present: bit(7),
        dpl: s.dpl(),
        db: bit(14),
        s: bit(4),
        l: bit(13),
        g: bit(15),
        avl: bit(12),
        unusable: u8::from(s.unusable),
        padding: 0,
    }
}
