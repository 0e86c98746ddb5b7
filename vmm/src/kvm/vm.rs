//! One virtual machine in KVM: memory slots and the MSR filter.

#![expect(unsafe_code, reason = "hands guest memory to KVM")]

use std::sync::Arc;

use kvm_bindings::{KVM_CAP_SREGS2, KVM_MEM_READONLY, kvm_enable_cap, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::kvm::state::XsaveLayout;
use crate::kvm::{KvmDevice, KvmError, filter, ioctl};

/// KVM_MSR_EXIT_REASON_INVAL, _UNKNOWN and _FILTER.
const MSR_EXITS: u64 = 0b111;
/// Three pages for the TSS that some Intel hosts need in real mode, between the devices that the
/// machines place below 4 GiB and the largest firmware.
pub(super) const TSS_ADDRESS: usize = 0xfeff_d000;
/// One page for the identity map that the same hosts need.
pub(super) const IDENTITY_MAP_ADDRESS: u64 = 0xfeff_c000;

/// A virtual machine. Its guest memory stays mapped as long as it exists.
///
/// The fields drop in this order, so that KVM releases the memory before it is unmapped.
#[derive(Debug)]
pub struct KvmVm {
    fd: VmFd,
    xsave_layout: XsaveLayout,
    has_sregs2: bool,
    memory: GuestMemoryMmap,
}

impl KvmVm {
    /// Creates the machine, maps `memory` into it, and installs the MSR filter.
    ///
    /// # Errors
    ///
    /// KVM refuses a step.
    pub fn new(device: &KvmDevice, memory: &GuestMemoryMmap) -> Result<Arc<Self>, KvmError> {
        Self::with_rom(device, memory, |_| false)
    }

    /// Like [`KvmVm::new`]. Regions whose first address satisfies `is_rom` are read-only: a guest's
    /// write to them is an MMIO exit.
    ///
    /// # Errors
    ///
    /// KVM refuses a step.
    pub fn with_rom(
        device: &KvmDevice,
        memory: &GuestMemoryMmap,
        is_rom: impl Fn(u64) -> bool,
    ) -> Result<Arc<Self>, KvmError> {
        let fd = device.kvm().create_vm().map_err(ioctl("KVM_CREATE_VM"))?;
        // Some Intel hosts need these before the first vCPU; other hosts lack the calls.
        let _ = fd.set_identity_map_address(IDENTITY_MAP_ADDRESS);
        let _ = fd.set_tss_address(TSS_ADDRESS);
        for (slot, region) in (0..).zip(memory.iter()) {
            let host_address = region
                .get_host_address(vm_memory::MemoryRegionAddress(0))
                .map_err(|_| KvmError::Lacks("host-addressable guest memory"))?;
            debug_assert!(
                (region.start_addr().0 | region.len()).is_multiple_of(0x1000),
                "KVM takes whole pages"
            );
            let slot = kvm_userspace_memory_region {
                slot,
                flags: if is_rom(region.start_addr().0) {
                    KVM_MEM_READONLY
                } else {
                    0
                },
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: host_address as u64,
            };
            // SAFETY: the region is a live mapping of that size. `memory` keeps it mapped longer
            // than `fd` exists, and `fd` never leaves `self`. Slots do not overlap because the
            // regions do not.
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
        Ok(Arc::new(Self {
            fd,
            xsave_layout: XsaveLayout::of_host(device),
            has_sregs2: device.kvm().check_extension_raw(KVM_CAP_SREGS2.into()) > 0,
            memory: memory.clone(),
        }))
    }

    /// Whether KVM reports and sets the page-directory pointers of PAE paging.
    pub(super) const fn has_sregs2(&self) -> bool {
        self.has_sregs2
    }

    /// This host's layout of the XSAVE image.
    pub(super) const fn xsave_layout(&self) -> XsaveLayout {
        self.xsave_layout
    }

    /// The page-directory pointers at `cr3`; 0 (not present) for those outside of memory.
    pub(super) fn read_page_directory_pointers(&self, cr3: u64) -> [u64; 4] {
        let table = (cr3 & 0xffff_ffff) & !0x1f;
        [0, 8, 16, 24].map(|at| {
            let entry = self.memory.read_obj(GuestAddress(table + at));
            entry.unwrap_or(0)
        })
    }

    /// KVM_CREATE_VCPU. The caller keeps `self` alive longer than the descriptor.
    pub(super) fn create_vcpu_fd(&self, id: u32) -> Result<VcpuFd, KvmError> {
        self.fd
            .create_vcpu(u64::from(id))
            .map_err(ioctl("KVM_CREATE_VCPU"))
    }
}
