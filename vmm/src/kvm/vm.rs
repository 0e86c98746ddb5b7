//! One virtual machine in KVM: memory slots and the MSR filter.

#![expect(unsafe_code, reason = "hands guest memory to KVM")]

use std::sync::Arc;

use kvm_bindings::{KVM_CAP_SREGS2, kvm_enable_cap, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::kvm::vcpu::KvmVcpuFd;
use crate::kvm::{Host, KvmError, filter, ioctl};

/// KVM_MSR_EXIT_REASON_INVAL, _UNKNOWN and _FILTER.
const MSR_EXITS: u64 = 0b111;
/// Three pages for the TSS that some Intel hosts need in real mode, above all memory and devices
/// that we place below 4 GiB.
const TSS_ADDRESS: usize = 0xfffb_d000;
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// A virtual machine. Guest memory stays mapped for as long as it exists.
#[derive(Debug)]
pub struct KvmVm {
    fd: VmFd,
    xsave_layout: crate::kvm::state::XsaveLayout,
    has_sregs2: bool,
    memory: GuestMemoryMmap,
}

impl KvmVm {
    /// Creates the machine, gives it `memory`, and installs the MSR filter.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn new(host: &Host, memory: &GuestMemoryMmap) -> Result<Arc<Self>, KvmError> {
        let fd = host.kvm().create_vm().map_err(ioctl("KVM_CREATE_VM"))?;
        // Only some Intel hosts need these; a KVM without them does not.
        let _ = fd.set_identity_map_address(IDENTITY_MAP_ADDRESS);
        let _ = fd.set_tss_address(TSS_ADDRESS);
        for (slot, region) in (0..).zip(memory.iter()) {
            let host_address = region
                .get_host_address(vm_memory::MemoryRegionAddress(0))
                .map_err(|_| KvmError::Lacks("host-addressable guest memory"))?;
            let slot = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: host_address as u64,
            };
            // SAFETY: the region is a live mapping of that size; `memory` keeps it alive for as
            // long as `fd`, and slots do not overlap because regions do not.
            unsafe { fd.set_user_memory_region(slot) }
                .map_err(ioctl("KVM_SET_USER_MEMORY_REGION"))?;
        }
        let cap = kvm_enable_cap {
            cap: Cap::X86UserSpaceMsr as u32,
            args: [MSR_EXITS, 0, 0, 0],
            ..Default::default()
        };
        fd.enable_cap(&cap)
            .map_err(ioctl("KVM_ENABLE_CAP (user-space MSRs)"))?;
        filter::install(&fd)?;
        let xsave_layout = crate::kvm::state::XsaveLayout::of_host(host);
        Ok(Arc::new(Self {
            fd,
            xsave_layout,
            has_sregs2: host.kvm().check_extension_raw(KVM_CAP_SREGS2.into()) > 0,
            memory: memory.clone(),
        }))
    }

    /// Whether KVM tells the page-directory pointers of PAE paging.
    pub(super) const fn has_sregs2(&self) -> bool {
        self.has_sregs2
    }

    /// The page-directory pointers at `cr3`; 0, which is not present, where there is no memory.
    pub(super) fn read_page_directory_pointers(&self, cr3: u64) -> [u64; 4] {
        let table = (cr3 & 0xffff_ffff) & !0x1f;
        [0, 8, 16, 24].map(|at| {
            let entry = self.memory.read_obj(GuestAddress(table + at));
            entry.unwrap_or(0)
        })
    }

    /// Creates processor `id`. It needs [`KvmVcpuFd::set_cpuid`] before it runs.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn create_vcpu(self: &Arc<Self>, id: u32) -> Result<KvmVcpuFd, KvmError> {
        let fd = self
            .fd
            .create_vcpu(u64::from(id))
            .map_err(ioctl("KVM_CREATE_VCPU"))?;
        Ok(KvmVcpuFd::new(fd, self.clone(), self.xsave_layout))
    }
}
