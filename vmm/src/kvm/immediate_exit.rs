//! The `immediate_exit` flag of a vCPU, which makes KVM_RUN return at once.

#![expect(unsafe_code, reason = "accesses the kvm_run page from other threads")]

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_ioctls::{KvmRunWrapper, VcpuFd};

use crate::kvm::{KvmError, ioctl};

/// Bytes of the kvm_run page to map: the page that holds the structure, without the data area.
const PAGE: usize = 0x1000;

/// The `immediate_exit` byte of one vCPU, for any thread.
///
/// It owns a mapping of the kvm_run page, so it may outlive the vCPU.
pub(super) struct ImmediateExit {
    byte: NonNull<AtomicU8>,
    _mapping: KvmRunWrapper,
}

// SAFETY: the byte is only accessed atomically, and `_mapping` keeps it mapped; a mapping does not
// belong to a thread.
unsafe impl Send for ImmediateExit {}
// SAFETY: as for Send.
unsafe impl Sync for ImmediateExit {}

impl fmt::Debug for ImmediateExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImmediateExit").finish_non_exhaustive()
    }
}

impl ImmediateExit {
    /// Maps the kvm_run page of `vcpu` a second time.
    ///
    /// # Errors
    ///
    /// The page cannot be mapped.
    pub(super) fn of_vcpu(vcpu: &mut VcpuFd) -> Result<Self, KvmError> {
        let mut mapping =
            KvmRunWrapper::mmap_from_fd(vcpu, PAGE).map_err(ioctl("mmap (kvm_run)"))?;
        let byte = &raw mut mapping.as_mut_ref().immediate_exit;
        let byte = NonNull::new(byte.cast()).expect("a field of a mapped structure is not null");
        Ok(Self {
            byte,
            _mapping: mapping,
        })
    }

    /// Stores the flag: 1 makes KVM_RUN return at once.
    pub(super) fn store(&self, value: u8) {
        // SAFETY: `_mapping` keeps the byte mapped and writable as long as `self` exists; AtomicU8
        // has the layout of u8, and through this mapping the byte is accessed only here.
        unsafe { self.byte.as_ref() }.store(value, Ordering::SeqCst);
    }
}
