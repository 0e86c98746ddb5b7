//! A timer that forces the thread that made it out of KVM_RUN.

#![expect(unsafe_code, reason = "a POSIX timer that signals one thread")]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::Duration;

use vmm_sys_util::signal::register_signal_handler;

/// A timer that signals the thread that made it, so that KVM_RUN returns EINTR there.
///
/// It repeats: a signal that arrives just before KVM_RUN costs one more period and is never lost.
/// Its thread cannot hand it to another one.
#[derive(Debug)]
pub struct KickTimer {
    /// A raw pointer, which keeps the type on its thread: it is neither `Send` nor `Sync`.
    timer: libc::timer_t,
}

/// Does nothing: the arrival of the signal alone ends KVM_RUN.
extern "C" fn on_timer(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl KickTimer {
    /// Creates a disarmed timer for the calling thread.
    ///
    /// # Errors
    ///
    /// The kernel has no timer left.
    pub fn new() -> io::Result<Self> {
        let signal = libc::SIGRTMIN() + 7;
        register_signal_handler(signal, on_timer)?;
        // SAFETY: sigevent is plain data, for which all zeros is valid.
        let mut event: libc::sigevent = unsafe { MaybeUninit::zeroed().assume_init() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal;
        event.sigev_notify_thread_id = rustix::thread::gettid().as_raw_nonzero().get();
        let mut timer: libc::timer_t = ptr::null_mut();
        // SAFETY: both pointers are to live locals of the types that the call expects.
        let result =
            unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
        if result == 0 {
            Ok(Self { timer })
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Signals after `delay`, and then every millisecond. Zero disarms.
    pub fn arm(&self, delay: Duration) {
        let period = if delay.is_zero() {
            Duration::ZERO
        } else {
            Duration::from_millis(1)
        };
        let spec = libc::itimerspec {
            it_value: timespec(delay),
            it_interval: timespec(period),
        };
        // SAFETY: `new` created the timer and only `drop` deletes it; the pointer is to a live
        // local.
        unsafe { libc::timer_settime(self.timer, 0, &raw const spec, ptr::null_mut()) };
    }

    /// Stops the signals.
    pub fn disarm(&self) {
        self.arm(Duration::ZERO);
    }
}

impl Drop for KickTimer {
    fn drop(&mut self) {
        // SAFETY: `new` created the timer, and no method can be called after this.
        unsafe { libc::timer_delete(self.timer) };
    }
}

fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(duration.subsec_nanos()),
    }
}
