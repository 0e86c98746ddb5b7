//! `/dev/kvm`, and what it supports.

use std::io;

use hindsight_cpu::cpuid::CpuidRegs;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};

use crate::kvm::error::{KvmError, ioctl};

/// Opens `/dev/kvm`.
///
/// # Errors
///
/// The error says whether the device is missing, not permitted or busy.
pub fn open_device() -> Result<Kvm, KvmError> {
    Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => KvmError::Missing,
        libc::EACCES | libc::EPERM => KvmError::NotPermitted,
        libc::EBUSY => KvmError::Busy,
        code => KvmError::Open(io::Error::from_raw_os_error(code)),
    })
}

/// The host's KVM, with every capability that Hindsight requires.
#[derive(Debug)]
pub struct KvmDevice {
    kvm: Kvm,
    supported_cpuid: CpuId,
}

impl KvmDevice {
    /// Opens `/dev/kvm` and checks its capabilities.
    ///
    /// # Errors
    ///
    /// The error says whether the device is missing, not permitted or busy, or which capability
    /// it lacks.
    pub fn open() -> Result<Self, KvmError> {
        let kvm = open_device()?;
        for (cap, name) in [
            (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
            (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
            (Cap::X86UserSpaceMsr, "KVM_CAP_X86_USER_SPACE_MSR"),
            (Cap::X86MsrFilter, "KVM_CAP_X86_MSR_FILTER"),
        ] {
            if !kvm.check_extension(cap) {
                return Err(KvmError::Lacks(name));
            }
        }
        let supported_cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(ioctl("KVM_GET_SUPPORTED_CPUID"))?;
        Ok(Self {
            kvm,
            supported_cpuid,
        })
    }

    /// The opened device.
    pub const fn kvm(&self) -> &Kvm {
        &self.kvm
    }

    /// What KVM can report to a guest in a CPUID leaf; zeros for an unsupported leaf.
    pub fn supported_cpuid(&self, leaf: u32, subleaf: u32) -> CpuidRegs {
        const SIGNIFICANT_INDEX: u32 = 1;
        self.supported_cpuid
            .as_slice()
            .iter()
            .find(|e| {
                let indexed = e.flags & SIGNIFICANT_INDEX != 0;
                e.function == leaf && (!indexed || e.index == subleaf)
            })
            .map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
    }
}
