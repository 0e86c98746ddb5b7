//! Why KVM could not do what was requested.

use std::io;

use thiserror::Error;

/// Why KVM could not do what was requested.
#[derive(Debug, Error)]
pub enum KvmError {
    /// There is no `/dev/kvm`.
    #[error(
        "/dev/kvm does not exist: load the kvm_intel or kvm_amd module, enable virtualization in \
         the firmware, or pass the device to this machine or container"
    )]
    Missing,
    /// The user has no permission to open the device.
    #[error(
        "/dev/kvm cannot be opened by this user: add the user to the group that owns it (often \
         `kvm`), or run as root"
    )]
    NotPermitted,
    /// Another hypervisor occupies the virtualization hardware.
    #[error(
        "/dev/kvm is busy: another hypervisor on this host uses the virtualization hardware; stop \
         it first"
    )]
    Busy,
    /// Opening the device failed for another reason.
    #[error("/dev/kvm cannot be opened")]
    Open(#[source] io::Error),
    /// This KVM lacks a capability that Hindsight requires.
    #[error("this host's KVM lacks {0}")]
    Lacks(&'static str),
    /// An ioctl or another system call failed.
    #[error("{call} failed")]
    Ioctl {
        /// The call's name.
        call: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Turns a kvm-ioctls error into a [`KvmError`] that names the ioctl.
pub(crate) fn ioctl(call: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> KvmError {
    move |error| KvmError::Ioctl {
        call,
        source: io::Error::from_raw_os_error(error.errno()),
    }
}

/// Turns an I/O error into a [`KvmError`] that names the ioctl or system call.
pub(crate) fn call(call: &'static str) -> impl FnOnce(io::Error) -> KvmError {
    move |source| KvmError::Ioctl { call, source }
}
