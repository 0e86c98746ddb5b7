//! Throwing a thread out of KVM_RUN.

#![expect(unsafe_code, reason = "sends a signal to a thread")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::kvm::vcpu::{ImmediateExit, KvmVcpuFd};

/// Interrupts one vCPU thread.
#[derive(Debug)]
pub struct Kicker {
    immediate: ImmediateExit,
    thread: libc::pthread_t,
    in_guest: Arc<AtomicBool>,
}

/// The handler has nothing to do: the signal only has to arrive.
extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl Kicker {
    /// A kicker of the calling thread while it runs `vcpu`. It must be dropped before either ends.
    pub fn of_this_thread(vcpu: &mut KvmVcpuFd) -> Self {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            register_signal_handler(SIGRTMIN(), on_kick).expect("SIGRTMIN takes a handler");
        });
        // SAFETY: pthread_self cannot fail.
        let thread = unsafe { libc::pthread_self() };
        Self {
            immediate: vcpu.immediate_exit(),
            thread,
            in_guest: vcpu.in_guest(),
        }
    }

    /// The thread leaves KVM_RUN, now or at once when it next enters.
    pub fn kick(&self) {
        self.immediate.set();
        if !self.in_guest.load(Ordering::SeqCst) {
            // It has not entered yet, and `immediate_exit` will meet it there.
            return;
        }
        // SAFETY: the thread drops this kicker before it ends, so the handle is valid.
        unsafe { libc::pthread_kill(self.thread, SIGRTMIN()) };
    }

    /// KVM_RUN runs again.
    pub fn clear(&self) {
        self.immediate.clear();
    }
}
