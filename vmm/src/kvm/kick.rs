//! Forces a vCPU thread out of KVM_RUN.
//!
//! [`Kicker::kick`] first sets `immediate_exit` in the vCPU's kvm_run page, then signals the thread
//! if it may be inside of KVM_RUN. In every interleaving the thread leaves KVM_RUN, or returns from
//! it at once when it next enters, until [`Kicker::clear`].

#![expect(
    unsafe_code,
    reason = "accesses the kvm_run page from other threads, and signals a thread"
)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Once};

use kvm_ioctls::{KvmRunWrapper, VcpuFd};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::kvm::vcpu::KvmVcpuFd;
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

    fn store(&self, value: u8) {
        // SAFETY: `_mapping` keeps the byte mapped and writable as long as `self` exists; AtomicU8
        // has the layout of u8, and through this mapping the byte is accessed only here.
        unsafe { self.byte.as_ref() }.store(value, Ordering::SeqCst);
    }
}

/// Forces one vCPU thread out of KVM_RUN, from any thread.
#[derive(Debug)]
pub struct Kicker {
    immediate_exit: Arc<ImmediateExit>,
    process: libc::pid_t,
    thread: libc::pid_t,
    in_guest: Arc<AtomicBool>,
}

/// Does nothing: the arrival of the signal alone ends KVM_RUN.
extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl Kicker {
    /// Creates a kicker for the calling thread, which runs `vcpu`.
    pub fn of_this_thread(vcpu: &KvmVcpuFd) -> Self {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            register_signal_handler(SIGRTMIN(), on_kick).expect("SIGRTMIN takes a handler");
        });
        Self {
            immediate_exit: vcpu.immediate_exit().clone(),
            process: rustix::process::getpid().as_raw_nonzero().get(),
            thread: rustix::thread::gettid().as_raw_nonzero().get(),
            in_guest: vcpu.in_guest().clone(),
        }
    }

    /// Makes the thread leave KVM_RUN now, or return from it at once when it next enters.
    ///
    /// It does nothing to a thread that has ended. If the kernel has reused its number, another
    /// thread of this process gets a signal whose handler does nothing.
    pub fn kick(&self) {
        self.immediate_exit.store(1);
        if !self.in_guest.load(Ordering::SeqCst) {
            // The thread has not entered KVM_RUN yet. It stores `in_guest` before it enters, so it
            // meets `immediate_exit` there.
            return;
        }
        // SAFETY: tgkill takes three numbers and accesses no memory of this process. The signal's
        // handler was registered before any kicker existed.
        unsafe { libc::syscall(libc::SYS_tgkill, self.process, self.thread, SIGRTMIN()) };
    }

    /// Lets KVM_RUN enter the guest again.
    pub fn clear(&self) {
        self.immediate_exit.store(0);
    }
}
