//! What all probes share: the opened KVM, and the calls that it refused.

use std::cell::Cell;
use std::io;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::Kvm;
use thiserror::Error;

use crate::kvm::kick_timer::KickTimer;
use crate::kvm::{KvmError, call, ioctl, open_device};
use crate::probe::guest::image::guest_image;

/// What all probes share.
#[derive(Debug)]
pub(crate) struct ProbeContext {
    /// The opened device.
    pub(crate) kvm: Kvm,
    /// The CPUID that KVM supports.
    pub(crate) cpuid: CpuId,
    /// Ends KVM_RUN of a guest that hangs.
    pub(super) kick_timer: KickTimer,
    /// The tables and handlers of every guest.
    pub(super) image: Vec<u8>,
    /// A guest has hung since the flag was cleared.
    pub(crate) hung: Cell<bool>,
}

impl ProbeContext {
    /// Opens `/dev/kvm`, and checks that it can create a virtual machine.
    pub(crate) fn open() -> Result<Self, KvmError> {
        let kvm = open_device()?;
        // Another hypervisor that occupies the hardware is detected only here.
        drop(kvm.create_vm().map_err(|error| match error.errno() {
            libc::EBUSY => KvmError::Busy,
            _ => ioctl("KVM_CREATE_VM")(error),
        })?);
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(ioctl("KVM_GET_SUPPORTED_CPUID"))?;
        Ok(Self {
            kvm,
            cpuid,
            kick_timer: KickTimer::new().map_err(call("timer_create"))?,
            image: guest_image(),
            hung: Cell::new(false),
        })
    }

    /// One register (EAX, EBX, ECX, EDX as 0 to 3) of a supported CPUID leaf; 0 if the leaf is not
    /// supported.
    pub(crate) fn supported(&self, leaf: u32, subleaf: u32, register: usize) -> u32 {
        self.cpuid
            .as_slice()
            .iter()
            .find(|e| e.function == leaf && e.index == subleaf)
            .map_or(0, |e| [e.eax, e.ebx, e.ecx, e.edx][register & 3])
    }
}

/// A call that KVM or the kernel refused.
#[derive(Debug, Error)]
#[error("{call}: {source}")]
pub(crate) struct RefusedCall {
    call: &'static str,
    source: io::Error,
}

/// Adds the name of the call to an error.
pub(crate) trait NameCall<T> {
    /// See the trait.
    fn named(self, call: &'static str) -> Result<T, RefusedCall>;
}

impl<T, E: Into<io::Error>> NameCall<T> for Result<T, E> {
    fn named(self, call: &'static str) -> Result<T, RefusedCall> {
        self.map_err(|error| RefusedCall {
            call,
            source: error.into(),
        })
    }
}
