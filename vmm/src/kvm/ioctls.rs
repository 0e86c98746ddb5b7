//! The vCPU ioctls that kvm-ioctls lacks.
//!
//! They follow "The Definitive KVM API Documentation" of the Linux kernel, and keep no state.

#![expect(unsafe_code, reason = "raw ioctls")]

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;

use kvm_bindings::{
    KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr, kvm_interrupt, kvm_pre_fault_memory,
    kvm_sregs2,
};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ref, ioctl_with_ref};

use nr::{
    KVM_GET_DEVICE_ATTR, KVM_GET_SREGS2, KVM_GET_STATS_FD, KVM_HAS_DEVICE_ATTR, KVM_INTERRUPT,
    KVM_PRE_FAULT_MEMORY, KVM_SET_DEVICE_ATTR, KVM_SET_SIGNAL_MASK, KVM_SET_SREGS2,
};

/// Ioctl numbers.
mod nr {
    use kvm_bindings::{KVMIO, kvm_device_attr, kvm_interrupt, kvm_pre_fault_memory, kvm_sregs2};
    use vmm_sys_util::{ioctl_io_nr, ioctl_ior_nr, ioctl_iow_nr, ioctl_iowr_nr};

    use super::SignalMaskHead;

    ioctl_iow_nr!(KVM_INTERRUPT, KVMIO, 0x86, kvm_interrupt);
    ioctl_iow_nr!(KVM_SET_SIGNAL_MASK, KVMIO, 0x8b, SignalMaskHead);
    ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
    ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);
    ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
    ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xd5, kvm_pre_fault_memory);
    ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
    ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);
    ioctl_iow_nr!(KVM_HAS_DEVICE_ATTR, KVMIO, 0xe3, kvm_device_attr);
}

/// Size of the kernel's signal mask in bytes.
const SIGSET_BYTES: u32 = 8;

/// The fixed part of `struct kvm_signal_mask`; the ioctl number encodes its size.
#[repr(C)]
struct SignalMaskHead {
    len: u32,
}

/// `struct kvm_signal_mask`, followed by the mask.
#[repr(C, packed)]
struct SignalMask {
    len: u32,
    sigset: u64,
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// KVM_INTERRUPT: queues external interrupt `vector`.
///
/// # Errors
///
/// EEXIST if one is queued already, ENXIO with an in-kernel interrupt controller.
pub fn interrupt(vcpu: &VcpuFd, vector: u8) -> io::Result<()> {
    let interrupt = kvm_interrupt {
        irq: u32::from(vector),
    };
    // SAFETY: a vCPU fd, and a structure of the type the ioctl reads.
    check(unsafe { ioctl_with_ref(vcpu, KVM_INTERRUPT(), &interrupt) })
}

/// KVM_GET_SREGS2: segment and control registers, and the page-directory pointers in use.
///
/// # Errors
///
/// ENOTTY if this KVM lacks the call.
pub fn sregs2(vcpu: &VcpuFd) -> io::Result<kvm_sregs2> {
    let mut sregs = kvm_sregs2::default();
    // SAFETY: a vCPU fd, and a structure of the type the ioctl writes.
    check(unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_SREGS2(), &mut sregs) })?;
    Ok(sregs)
}

/// KVM_SET_SREGS2: sets segment and control registers.
///
/// Unlike KVM_SET_SREGS, it can set the page-directory pointers instead of loading them from
/// memory.
///
/// # Errors
///
/// ENOTTY if this KVM lacks the call, EINVAL for impossible values.
pub fn set_sregs2(vcpu: &VcpuFd, sregs: &kvm_sregs2) -> io::Result<()> {
    // SAFETY: a vCPU fd, and a structure of the type the ioctl reads.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_SREGS2(), sregs) })
}

/// KVM_SET_SIGNAL_MASK: sets the signals that are blocked during KVM_RUN; bit n-1 is signal n.
///
/// With `None`, the thread's own mask stays in force.
///
/// # Errors
///
/// The kernel refuses the mask.
pub fn set_signal_mask(vcpu: &VcpuFd, blocked: Option<u64>) -> io::Result<()> {
    let Some(sigset) = blocked else {
        // SAFETY: a vCPU fd; a null pointer removes the vCPU's mask.
        return check(unsafe {
            vmm_sys_util::ioctl::ioctl_with_val(vcpu, KVM_SET_SIGNAL_MASK(), 0)
        });
    };
    let mask = SignalMask {
        len: SIGSET_BYTES,
        sigset,
    };
    // SAFETY: a vCPU fd; the kernel reads the head and the `len` bytes that follow, all in `mask`.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_SIGNAL_MASK(), &mask) })
}

/// Whether KVM has the TSC offset attribute for this vCPU. Some KVMs accept and ignore it.
pub fn has_tsc_offset(vcpu: &VcpuFd) -> bool {
    let attr = tsc_offset_attr(0);
    // SAFETY: a vCPU fd, and a structure of the type the ioctl reads; `addr` is not followed.
    unsafe { ioctl_with_ref(vcpu, KVM_HAS_DEVICE_ATTR(), &attr) == 0 }
}

/// The guest's TSC minus the host's, modulo 2^64, in guest TSC ticks.
///
/// # Errors
///
/// ENXIO if this KVM lacks the attribute.
pub fn tsc_offset(vcpu: &VcpuFd) -> io::Result<u64> {
    let mut offset = 0_u64;
    let attr = tsc_offset_attr((&raw mut offset).addr() as u64);
    // SAFETY: a vCPU fd; the kernel writes eight bytes to `addr`, which is `offset`: alive, and not
    // referenced otherwise during the call.
    check(unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attr) })?;
    Ok(offset)
}

/// Sets the guest's TSC minus the host's, modulo 2^64, in guest TSC ticks.
///
/// # Errors
///
/// ENXIO if this KVM lacks the attribute.
pub fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> io::Result<()> {
    let attr = tsc_offset_attr((&raw const offset).addr() as u64);
    // SAFETY: a vCPU fd; the kernel reads eight bytes from `addr`, which is the live `offset`.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attr) })
}

fn tsc_offset_attr(addr: u64) -> kvm_device_attr {
    kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr,
    }
}

/// KVM_GET_STATS_FD: the vCPU's binary statistics.
///
/// # Errors
///
/// This KVM keeps no statistics.
pub fn stats_fd(vcpu: &VcpuFd) -> io::Result<File> {
    // SAFETY: a vCPU fd; the ioctl takes no argument.
    let fd = unsafe { ioctl(vcpu, KVM_GET_STATS_FD()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, so it has no other owner.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// KVM_PRE_FAULT_MEMORY: maps guest-physical memory before the guest accesses it.
///
/// Returns the number of bytes that are not mapped yet.
///
/// # Errors
///
/// ENOTTY if this KVM lacks the call.
pub fn pre_fault_memory(vcpu: &VcpuFd, address: u64, size: u64) -> io::Result<u64> {
    let mut range = kvm_pre_fault_memory {
        gpa: address,
        size,
        ..Default::default()
    };
    // SAFETY: a vCPU fd, and a structure of the type the ioctl reads and writes.
    check(unsafe { ioctl_with_mut_ref(vcpu, KVM_PRE_FAULT_MEMORY(), &mut range) })?;
    Ok(range.size)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Numbers computed by hand from the API documentation's _IOW(KVMIO, nr, size).
    #[test]
    fn ioctl_numbers_match_the_kernel() {
        assert_eq!(KVM_INTERRUPT(), 0x4004_ae86);
        assert_eq!(KVM_SET_SIGNAL_MASK(), 0x4004_ae8b);
        assert_eq!(KVM_GET_SREGS2(), 0x8140_aecc);
        assert_eq!(KVM_SET_SREGS2(), 0x4140_aecd);
        assert_eq!(KVM_GET_STATS_FD(), 0xaece);
        assert_eq!(KVM_PRE_FAULT_MEMORY(), 0xc040_aed5);
        assert_eq!(KVM_SET_DEVICE_ATTR(), 0x4018_aee1);
        assert_eq!(KVM_GET_DEVICE_ATTR(), 0x4018_aee2);
        assert_eq!(KVM_HAS_DEVICE_ATTR(), 0x4018_aee3);
    }
}
