//! Forces a vCPU thread out of KVM_RUN.
//!
//! [`KvmKicker::kick`] first sets `immediate_exit` in the vCPU's kvm_run page, then signals the
//! thread if it may be inside of KVM_RUN. In every interleaving the thread leaves KVM_RUN, or
//! returns from it immediately when it next enters, until [`KvmKicker::clear`].

#![expect(unsafe_code, reason = "signals a thread")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::kvm::immediate_exit::ImmediateExit;
use crate::kvm::vcpu::KvmVcpuFd;

/// Forces one vCPU thread out of KVM_RUN, from any thread.
#[derive(Debug)]
pub struct KvmKicker {
    immediate_exit: Arc<ImmediateExit>,
    process: libc::pid_t,
    thread: libc::pid_t,
    in_guest: Arc<AtomicBool>,
}

/// Does nothing: the arrival of the signal alone ends KVM_RUN.
extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl KvmKicker {
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
