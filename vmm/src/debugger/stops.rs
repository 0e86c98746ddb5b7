//! Stop reports of vCPUs, in the server's terms.

use hindsight_cpu::state::CpuState;
use hindsight_gdb::target::{CrashSignal, GuestCrash, StopCause, TargetError};
use vm_memory::GuestMemoryMmap;

use crate::vcpu::crash::{Crash, CrashCause};
use crate::vcpu::debug::stop::{StopReason, Unsupported};

/// Returns the message about a request that only the interpreter can serve.
pub(super) fn needs_interpreter(unsupported: &Unsupported) -> String {
    format!("this needs --engine auto or interp: {unsupported}")
}

/// Why a vCPU stopped. `state` is its state, which a crash report shows.
pub(super) fn stop_cause(
    vcpu: usize,
    reason: StopReason,
    memory: &GuestMemoryMmap,
    state: impl FnOnce() -> Result<CpuState, TargetError>,
) -> StopCause {
    match reason {
        StopReason::Hit(hit) => StopCause::Hit(hit),
        StopReason::Stepped => StopCause::Stepped,
        StopReason::Begin => StopCause::HistoryBegin,
        StopReason::End(end) => StopCause::RunEnd(end.to_string()),
        StopReason::Unsupported(unsupported) => StopCause::Refused(needs_interpreter(&unsupported)),
        StopReason::Crash(cause) => {
            let signal = match cause {
                CrashCause::Missing(_) => CrashSignal::IllegalInstruction,
                _ => CrashSignal::Abort,
            };
            let summary = match state() {
                Ok(state) => Crash::new(vcpu, cause, state, memory).summary(),
                Err(error) => format!("the guest cannot continue; reading its state: {error}"),
            };
            StopCause::Crash(GuestCrash { summary, signal })
        }
    }
}
