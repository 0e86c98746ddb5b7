//! Why the machine stopped, in the client's words.

use gdbstub::common::{Signal, Tid};
use gdbstub::stub::MultiThreadStopReason;
use gdbstub::target::ext::base::reverse_exec::ReplayLogPosition;
use gdbstub::target::ext::breakpoints::WatchKind;
use hindsight_cpu::stops::StopHit;

use crate::gdb::breakpoints::Breakpoint;
use crate::gdb::debugger::{DebugError, Debugger, Reason, tid};
use crate::vcpu::crash::Crash;
use crate::vcpu::crash::CrashCause;
use crate::vcpu::debug::stop::StopReason;

type GdbStop = MultiThreadStopReason<u64>;

fn signal(tid: Tid, signal: Signal) -> GdbStop {
    GdbStop::SignalWithThread { tid, signal }
}

/// The signal that a Unix program would get for an exception.
fn signal_of(vector: u8) -> Signal {
    match vector {
        0 | 16 | 19 => Signal::SIGFPE,
        6 => Signal::SIGILL,
        10..=14 => Signal::SIGSEGV,
        17 => Signal::SIGBUS,
        8 | 18 => Signal::SIGABRT,
        _ => Signal::SIGTRAP,
    }
}

/// What the client is told.
pub(super) fn stop_reason(debugger: &Debugger, reason: &Reason) -> GdbStop {
    let tid = tid(reason.cpu);
    match &reason.stop {
        None => signal(tid, Signal::SIGINT),
        Some(StopReason::Begin) => GdbStop::ReplayLog {
            tid: Some(tid),
            pos: ReplayLogPosition::Begin,
        },
        Some(StopReason::Stepped | StopReason::End(_) | StopReason::Unsupported(_)) => {
            signal(tid, Signal::SIGTRAP)
        }
        Some(StopReason::Crash(CrashCause::Missing(_))) => signal(tid, Signal::SIGILL),
        Some(StopReason::Crash(_)) => signal(tid, Signal::SIGABRT),
        Some(StopReason::Hit(hit)) => match *hit {
            StopHit::Execute(at) if debugger.breakpoints.has(Breakpoint::Hardware(at)) => {
                GdbStop::HwBreak(tid)
            }
            StopHit::Execute(_) => GdbStop::SwBreak(tid),
            StopHit::Watchpoint {
                watchpoint: watch,
                at,
                ..
            } => GdbStop::Watch {
                tid,
                kind: match (watch.read, watch.write) {
                    (true, true) => WatchKind::ReadWrite,
                    (true, false) => WatchKind::Read,
                    _ => WatchKind::Write,
                },
                addr: at.max(watch.at),
            },
            StopHit::Exception { vector, .. } => signal(tid, signal_of(vector)),
            StopHit::Port { .. } | StopHit::Msr { .. } | StopHit::Control { .. } => {
                signal(tid, Signal::SIGTRAP)
            }
        },
    }
}

/// The names of the exceptions. SDM Vol. 3A, "Exception and Interrupt Reference".
pub(super) const EXCEPTIONS: [&str; 22] = [
    "#DE", "#DB", "NMI", "#BP", "#OF", "#BR", "#UD", "#NM", "#DF", "9", "#TS", "#NP", "#SS", "#GP",
    "#PF", "15", "#MF", "#AC", "#MC", "#XM", "#VE", "#CP",
];

/// One line for the user on what the client has no words for.
pub(super) fn remark(debugger: &mut Debugger, reason: &Reason) -> Option<String> {
    let cpu = reason.cpu;
    let text = match reason.stop.as_ref()? {
        StopReason::Crash(cause) => {
            let memory = debugger.board().ram.map.clone();
            let state = debugger.state(cpu).ok()?.clone();
            Crash::new(cpu, cause.clone(), state, &memory).summary()
        }
        StopReason::Unsupported(beyond) => DebugError::NeedsInterpreter(beyond.clone()).to_string(),
        StopReason::End(end) => format!("{end}; `continue` lets it"),
        StopReason::Begin
        | StopReason::Stepped
        | StopReason::Hit(StopHit::Execute(_) | StopHit::Watchpoint { .. }) => {
            return None;
        }
        StopReason::Hit(StopHit::Exception { vector, code }) => {
            let name = EXCEPTIONS.get(usize::from(*vector)).unwrap_or(&"?");
            match code {
                Some(code) => format!("{name}, error code {code:#x}"),
                None => (*name).to_owned(),
            }
        }
        StopReason::Hit(StopHit::Port { port, write }) => {
            let way = if *write { "write to" } else { "read from" };
            format!("{way} port {port:#x}")
        }
        StopReason::Hit(StopHit::Msr { index, value }) => format!("MSR {index:#x} = {value:#x}"),
        StopReason::Hit(StopHit::Control { number, value }) => format!("CR{number} = {value:#x}"),
    };
    Some(format!("hindsight: cpu {cpu}: {text}\n"))
}
