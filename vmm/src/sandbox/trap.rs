//! The handler of SIGSYS: fails a forbidden system call with EPERM, and names it.

#![expect(
    unsafe_code,
    reason = "a signal handler that changes the result of a system call"
)]

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use vmm_sys_util::signal::register_signal_handler;

use super::SandboxError;
use super::names::{LINE_MAX, line};

/// Maximum number of refused calls that are reported: a thread may repeat one endlessly.
const NAMED_MAX: u32 = 16;

/// Refused calls that were reported.
static NAMED: AtomicU32 = AtomicU32::new(0);

/// Handles SIGSYS, which the kernel raises instead of executing the call.
///
/// It calls nothing but async-signal-safe functions that the rules of every thread allow.
extern "C" fn on_refused(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel passes the context of the interrupted thread, a ucontext_t, to a handler
    // with SA_SIGINFO, and nothing else accesses it before the handler returns.
    let registers = unsafe { &mut (*context).uc_mcontext.gregs };
    let rax = usize::try_from(libc::REG_RAX).unwrap_or(0);
    let number = registers[rax];
    registers[rax] = -i64::from(libc::EPERM);
    if NAMED.fetch_add(1, Ordering::Relaxed) < NAMED_MAX {
        let mut thread = [0_u8; 16];
        // SAFETY: PR_GET_NAME writes at most 16 bytes, including the final 0.
        unsafe { libc::prctl(libc::PR_GET_NAME, thread.as_mut_ptr()) };
        let mut text = [0; LINE_MAX];
        let length = line(&mut text, &thread, number);
        // SAFETY: the buffer is a live local of at least this length.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), length) };
    }
}

/// Installs the handler.
pub(super) fn install() -> Result<(), SandboxError> {
    register_signal_handler(libc::SIGSYS, on_refused)
        .map_err(|error| SandboxError::Handler(io::Error::from(error)))
}
