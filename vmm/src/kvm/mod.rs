//! KVM: the only module with ioctls.
//!
//! [`Host`] is `/dev/kvm`, [`vm::KvmVm`] one virtual machine with our MSR filter, and
//! [`vcpu::KvmVcpuFd`] one virtual processor that runs until something needs us ([`crate::kvm::exit`]).
//! No in-kernel interrupt controller is ever created.

pub mod exit;
pub mod filter;
pub mod host_support;
pub mod ioctls;
pub mod kick;
mod run;
mod state;
pub mod tiny;
pub mod vcpu;
pub mod vm;

use std::io;

use hindsight_cpu::cpuid::CpuidRegs;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};
use thiserror::Error;

/// Why KVM could not do what we asked.
#[derive(Debug, Error)]
pub enum KvmError {
    /// There is no `/dev/kvm`.
    #[error(
        "/dev/kvm does not exist: load the kvm_intel or kvm_amd module, switch virtualization on in \
         the firmware, or give this machine or container the device"
    )]
    Missing,
    /// The user may not open it.
    #[error(
        "/dev/kvm may not be opened: add the user to the group that owns it (often `kvm`), or run \
         as root"
    )]
    NotPermitted,
    /// Another hypervisor holds the hardware.
    #[error("/dev/kvm is busy: another hypervisor on this host uses the virtualization hardware")]
    Busy,
    /// Opening failed in another way.
    #[error("/dev/kvm cannot be opened")]
    Open(#[source] io::Error),
    /// This KVM lacks something we cannot do without.
    #[error("this host's KVM lacks {0}")]
    Lacks(&'static str),
    /// An ioctl failed.
    #[error("{call} failed")]
    Ioctl {
        /// The ioctl's name.
        call: &'static str,
        /// What the kernel answered.
        #[source]
        source: io::Error,
    },
}

/// Names the ioctl behind an error.
pub(crate) fn ioctl(call: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> KvmError {
    move |error| KvmError::Ioctl {
        call,
        source: io::Error::from_raw_os_error(error.errno()),
    }
}

/// Opens `/dev/kvm`.
///
/// # Errors
///
/// Says whether it is missing, not permitted or busy.
pub fn open_device() -> Result<Kvm, KvmError> {
    Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => KvmError::Missing,
        libc::EACCES | libc::EPERM => KvmError::NotPermitted,
        libc::EBUSY => KvmError::Busy,
        code => KvmError::Open(io::Error::from_raw_os_error(code)),
    })
}

/// The host's KVM.
#[derive(Debug)]
pub struct Host {
    kvm: Kvm,
    supported: CpuId,
}

impl Host {
    /// Opens `/dev/kvm`.
    ///
    /// # Errors
    ///
    /// Says whether it is missing, not permitted or busy, and which capability is lacking.
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
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(ioctl("KVM_GET_SUPPORTED_CPUID"))?;
        Ok(Self { kvm, supported })
    }

    /// The opened device.
    pub const fn kvm(&self) -> &Kvm {
        &self.kvm
    }

    /// What KVM can show a guest in a CPUID leaf; zeros where it has none.
    pub fn supported_cpuid(&self, leaf: u32, subleaf: u32) -> CpuidRegs {
        const SIGNIFICANT_INDEX: u32 = 1;
        self.supported
            .as_slice()
            .iter()
            .find(|e| {
                let indexed = e.flags & SIGNIFICANT_INDEX != 0;
                e.function == leaf && (!indexed || e.index == subleaf)
            })
            .map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
    }
}
