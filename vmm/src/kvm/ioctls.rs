//! The vCPU ioctls that kvm-ioctls lacks, and what it leaves unread in the kvm_run page.
//!
//! Follows "The Definitive KVM API Documentation" of the Linux kernel. Nothing here keeps state.

#![expect(unsafe_code, reason = "raw ioctls, and the union in the kvm_run page")]

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;

use kvm_bindings::{
    KVM_EXIT_INTERNAL_ERROR, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr,
    kvm_interrupt, kvm_pre_fault_memory, kvm_run, kvm_sregs2,
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

/// KVM_INTERNAL_ERROR_EMULATION.
pub const SUBERROR_EMULATION: u32 = 1;
/// KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES.
const FLAG_INSTRUCTION_BYTES: u64 = 1;
/// Signals the kernel knows, in bytes of a mask.
const SIGSET_BYTES: u32 = 8;

/// The fixed part of `struct kvm_signal_mask`: what its ioctl number is made from.
#[repr(C)]
struct SignalMaskHead {
    len: u32,
}

/// `struct kvm_signal_mask` with the mask behind it.
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

/// KVM_INTERRUPT: queues external interrupt `vector`. Only without an in-kernel interrupt
/// controller.
///
/// # Errors
///
/// EEXIST when one is queued already, ENXIO with an in-kernel interrupt controller.
pub fn interrupt(vcpu: &VcpuFd, vector: u8) -> io::Result<()> {
    let interrupt = kvm_interrupt {
        irq: u32::from(vector),
    };
    // SAFETY: a vCPU fd, and a structure of the type the ioctl reads.
    check(unsafe { ioctl_with_ref(vcpu, KVM_INTERRUPT(), &interrupt) })
}

/// KVM_GET_SREGS2: segment and control registers, with the page-directory pointers in use.
///
/// # Errors
///
/// ENOTTY where this KVM does not have it.
pub fn sregs2(vcpu: &VcpuFd) -> io::Result<kvm_sregs2> {
    let mut sregs = kvm_sregs2::default();
    // SAFETY: a vCPU fd, and a structure of the type the ioctl writes.
    check(unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_SREGS2(), &mut sregs) })?;
    Ok(sregs)
}

/// KVM_SET_SREGS2: unlike KVM_SET_SREGS, it need not load the page-directory pointers from memory.
///
/// # Errors
///
/// ENOTTY where this KVM does not have it, EINVAL for impossible values.
pub fn set_sregs2(vcpu: &VcpuFd, sregs: &kvm_sregs2) -> io::Result<()> {
    // SAFETY: a vCPU fd, and a structure of the type the ioctl reads.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_SREGS2(), sregs) })
}

/// KVM_SET_SIGNAL_MASK: the signals blocked while KVM_RUN runs; bit n-1 is signal n.
/// `None` keeps the thread's own mask.
///
/// # Errors
///
/// When the kernel refuses the mask.
pub fn set_signal_mask(vcpu: &VcpuFd, blocked: Option<u64>) -> io::Result<()> {
    let Some(sigset) = blocked else {
        // SAFETY: a vCPU fd; a null pointer means "no mask of its own" to this ioctl.
        return check(unsafe {
            vmm_sys_util::ioctl::ioctl_with_val(vcpu, KVM_SET_SIGNAL_MASK(), 0)
        });
    };
    let mask = SignalMask {
        len: SIGSET_BYTES,
        sigset,
    };
    // SAFETY: a vCPU fd; the kernel reads the head, then `len` bytes behind it, all in `mask`.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_SIGNAL_MASK(), &mask) })
}

/// Whether KVM has the TSC offset attribute for this vCPU. That it is honoured is another matter.
pub fn has_tsc_offset(vcpu: &VcpuFd) -> bool {
    let attr = tsc_offset_attr(0);
    // SAFETY: a vCPU fd, and a structure of the type the ioctl reads; `addr` is not followed.
    unsafe { ioctl_with_ref(vcpu, KVM_HAS_DEVICE_ATTR(), &attr) == 0 }
}

/// The guest's TSC minus the host's, modulo 2^64, in guest TSC ticks.
///
/// # Errors
///
/// ENXIO when this KVM has no such attribute.
pub fn tsc_offset(vcpu: &VcpuFd) -> io::Result<u64> {
    let mut offset = 0_u64;
    let attr = tsc_offset_attr((&raw mut offset).addr() as u64);
    // SAFETY: a vCPU fd; the kernel writes eight bytes to `addr`, which is `offset`, alive here and
    // not otherwise referred to.
    check(unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attr) })?;
    Ok(offset)
}

/// Sets the guest's TSC minus the host's, modulo 2^64, in guest TSC ticks.
///
/// # Errors
///
/// ENXIO when this KVM has no such attribute.
pub fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> io::Result<()> {
    let attr = tsc_offset_attr((&raw const offset).addr() as u64);
    // SAFETY: a vCPU fd; the kernel reads eight bytes from `addr`, which is `offset`, alive here.
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
/// When this KVM keeps none.
pub fn stats_fd(vcpu: &VcpuFd) -> io::Result<File> {
    // SAFETY: a vCPU fd; the ioctl takes no argument.
    let fd = unsafe { ioctl(vcpu, KVM_GET_STATS_FD()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// KVM_PRE_FAULT_MEMORY: maps guest-physical memory before the guest touches it. Returns the bytes
/// that are left to do.
///
/// # Errors
///
/// ENOTTY where this KVM does not have it.
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

/// What KVM_EXIT_INTERNAL_ERROR says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InternalError {
    /// Why: [`SUBERROR_EMULATION`] is an instruction that KVM's emulator does not know.
    pub suberror: u32,
    /// Bytes from RIP on; the first [`len`](Self::len) are valid.
    bytes: [u8; 15],
    /// How many bytes KVM had fetched; 0 when it gives none.
    len: usize,
}

impl InternalError {
    /// The bytes at RIP that KVM had fetched: the instruction and perhaps more. Empty when unknown.
    pub fn instruction_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Reads the kvm_run page after an exit. `None` when the exit was no internal error.
pub fn internal_error(run: &kvm_run) -> Option<InternalError> {
    if run.exit_reason != KVM_EXIT_INTERNAL_ERROR {
        return None;
    }
    // SAFETY: the exit reason, which the kernel set, selects this member; all of it is plain data.
    let internal = unsafe { run.__bindgen_anon_1.internal };
    let mut error = InternalError {
        suberror: internal.suberror,
        bytes: [0; 15],
        len: 0,
    };
    let has_bytes = internal.suberror == SUBERROR_EMULATION
        && internal.ndata >= 3
        && internal.data[0] & FLAG_INSTRUCTION_BYTES != 0;
    if has_bytes {
        // data[0] is the flags; from data[1] on: one byte length, 15 bytes of instruction.
        let [len, first @ ..] = internal.data[1].to_le_bytes();
        error.bytes[..7].copy_from_slice(&first);
        error.bytes[7..].copy_from_slice(&internal.data[2].to_le_bytes());
        error.len = usize::from(len).min(error.bytes.len());
    }
    Some(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn emulation_failure(flags: u64, len: u8) -> kvm_run {
        let mut run = kvm_run {
            exit_reason: KVM_EXIT_INTERNAL_ERROR,
            ..Default::default()
        };
        // SAFETY: all members of the union are plain data, so any of them may be written.
        let internal = unsafe { &mut run.__bindgen_anon_1.internal };
        internal.suberror = SUBERROR_EMULATION;
        internal.ndata = 3;
        internal.data[0] = flags;
        internal.data[1] = u64::from_le_bytes([len, 1, 2, 3, 4, 5, 6, 7]);
        internal.data[2] = u64::from_le_bytes([8, 9, 10, 11, 12, 13, 14, 15]);
        run
    }

    // Numbers by hand, from the API documentation's _IOW(KVMIO, nr, size).
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

    #[test]
    fn internal_error_with_bytes_gives_them() {
        let error = internal_error(&emulation_failure(1, 3)).unwrap();
        assert_eq!(error.instruction_bytes(), [1, 2, 3]);
        let error = internal_error(&emulation_failure(1, 15)).unwrap();
        assert_eq!(
            error.instruction_bytes(),
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
        );
    }

    #[test]
    fn internal_error_with_impossible_length_is_cut() {
        let error = internal_error(&emulation_failure(1, 200)).unwrap();
        assert_eq!(error.instruction_bytes().len(), 15);
    }

    #[test]
    fn internal_error_without_the_flag_has_no_bytes() {
        let error = internal_error(&emulation_failure(0, 3)).unwrap();
        assert_eq!(error.instruction_bytes(), [0_u8; 0]);
    }

    #[test]
    fn internal_error_of_another_exit_is_none() {
        let run = kvm_run {
            exit_reason: kvm_bindings::KVM_EXIT_HLT,
            ..Default::default()
        };
        assert_eq!(internal_error(&run), None);
    }
}
