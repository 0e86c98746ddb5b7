//! A virtual machine of one vCPU and one range of memory at guest-physical 0, for probes of this
//! host's KVM.

#![expect(unsafe_code, reason = "hands guest memory to KVM")]

use std::io;

use kvm_bindings::{
    KVM_CAP_MULTI_ADDRESS_SPACE, kvm_enable_cap, kvm_msi, kvm_run, kvm_sync_regs,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, MsrFilterDefaultAction, MsrFilterRange, SyncReg, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vm_memory::{GuestMemoryError, MemoryRegionAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::kvm::vm::{IDENTITY_MAP_ADDRESS, TSS_ADDRESS};

/// The first memory slot of the address space that system-management mode uses.
const SMM_SLOT: u32 = 1 << 16;

/// A virtual machine with one vCPU.
///
/// Its descriptors never leave it, so that KVM cannot use the memory after it was unmapped. The
/// fields drop in this order: the descriptors first.
#[derive(Debug)]
pub struct TinyVm {
    vcpu: VcpuFd,
    vm: VmFd,
    memory: GuestMemoryMmap,
}

/// A [`TinyVm`] before its vCPU exists: what can be configured then.
#[derive(Debug)]
pub struct TinyVmSetup<'a>(&'a VmFd);

impl TinyVmSetup<'_> {
    /// KVM_ENABLE_CAP.
    ///
    /// # Errors
    ///
    /// KVM refuses the capability.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<(), kvm_ioctls::Error> {
        self.0.enable_cap(cap)
    }

    /// KVM_X86_SET_MSR_FILTER.
    ///
    /// # Errors
    ///
    /// KVM refuses the filter.
    pub fn set_msr_filter(
        &self,
        default: MsrFilterDefaultAction,
        ranges: &[MsrFilterRange<'_>],
    ) -> Result<(), kvm_ioctls::Error> {
        self.0.set_msr_filter(default, ranges)
    }

    /// KVM_CREATE_IRQCHIP.
    ///
    /// # Errors
    ///
    /// KVM refuses.
    pub fn create_irq_chip(&self) -> Result<(), kvm_ioctls::Error> {
        self.0.create_irq_chip()
    }
}

impl TinyVm {
    /// Creates a machine with `size` bytes of zeroed memory. `setup` runs before the vCPU exists.
    ///
    /// # Errors
    ///
    /// KVM or the kernel refuses a step.
    pub fn new(
        kvm: &Kvm,
        size: usize,
        setup: impl FnOnce(&TinyVmSetup<'_>) -> Result<(), kvm_ioctls::Error>,
    ) -> io::Result<Self> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)])
            .map_err(|error| io::Error::other(error.to_string()))?;
        let vm = kvm.create_vm()?;
        // Some Intel hosts need these before the first vCPU; other hosts lack the calls.
        let _ = vm.set_identity_map_address(IDENTITY_MAP_ADDRESS);
        let _ = vm.set_tss_address(TSS_ADDRESS);
        let spaces = vm.check_extension_raw(u64::from(KVM_CAP_MULTI_ADDRESS_SPACE));
        let slot_ids = if spaces > 1 {
            &[0, SMM_SLOT][..]
        } else {
            &[0][..]
        };
        for region in memory.iter() {
            let host = region
                .get_host_address(MemoryRegionAddress(0))
                .map_err(|error| io::Error::other(error.to_string()))?;
            for &slot in slot_ids {
                let slot = kvm_userspace_memory_region {
                    slot,
                    flags: 0,
                    guest_phys_addr: 0,
                    memory_size: region.len(),
                    userspace_addr: host.addr() as u64,
                };
                // SAFETY: the range is a mapping that `memory` owns. `memory` is dropped after the
                // descriptors, which stay in `self`, and is accessed only by volatile accesses.
                unsafe { vm.set_user_memory_region(slot) }?;
            }
        }
        setup(&TinyVmSetup(&vm))?;
        let vcpu = vm.create_vcpu(0)?;
        Ok(Self { vcpu, vm, memory })
    }

    /// The vCPU, for the calls that do not run it.
    pub const fn vcpu(&self) -> &VcpuFd {
        &self.vcpu
    }

    /// KVM_RUN.
    ///
    /// # Errors
    ///
    /// KVM_RUN fails; EINTR if a signal arrived.
    pub fn run(&mut self) -> Result<VcpuExit<'_>, kvm_ioctls::Error> {
        self.vcpu.run()
    }

    /// The kvm_run page.
    pub fn kvm_run(&mut self) -> &mut kvm_run {
        self.vcpu.get_kvm_run()
    }

    /// Sets `immediate_exit`: with `true`, KVM_RUN completes the pending exit and returns EINTR.
    pub fn set_immediate_exit(&mut self, on: bool) {
        self.vcpu.set_kvm_immediate_exit(u8::from(on));
    }

    /// Makes KVM_RUN store these registers in the kvm_run page.
    pub fn sync_at_exit(&mut self, registers: SyncReg) {
        self.vcpu.set_sync_valid_reg(registers);
    }

    /// The registers that KVM_RUN stored in the kvm_run page.
    pub fn sync_regs(&self) -> kvm_sync_regs {
        self.vcpu.sync_regs()
    }

    /// KVM_IRQFD.
    ///
    /// # Errors
    ///
    /// KVM refuses, for example because it has no in-kernel interrupt controller.
    pub fn register_irqfd(&self, event: &EventFd, gsi: u32) -> Result<(), kvm_ioctls::Error> {
        self.vm.register_irqfd(event, gsi)
    }

    /// KVM_SIGNAL_MSI. Returns a positive number if the interrupt was delivered, 0 if it was
    /// blocked.
    ///
    /// # Errors
    ///
    /// KVM refuses, for example because it has no in-kernel interrupt controller.
    pub fn signal_msi(&self, msi: kvm_msi) -> Result<i32, kvm_ioctls::Error> {
        self.vm.signal_msi(msi)
    }

    /// Copies `bytes` into guest memory.
    ///
    /// # Errors
    ///
    /// The range is not all in guest memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(not_in_memory)
    }

    /// Reads eight bytes of guest memory.
    ///
    /// # Errors
    ///
    /// They are not all in guest memory.
    pub fn read_u64(&self, address: u64) -> io::Result<u64> {
        self.memory
            .read_obj(GuestAddress(address))
            .map_err(not_in_memory)
    }
}

fn not_in_memory(error: GuestMemoryError) -> io::Error {
    io::Error::other(error.to_string())
}
