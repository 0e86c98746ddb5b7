//! A stop of the machine, in the client's terms.

use gdbstub::common::{Signal, Tid};
use gdbstub::stub::MultiThreadStopReason;
use gdbstub::target::ext::base::reverse_exec::ReplayLogPosition;
use gdbstub::target::ext::breakpoints::WatchKind;
use hindsight_cpu::stops::StopHit;
use hindsight_regs::vector::Vector;

use crate::breakpoints::ClientBreakpoint;
use crate::debugger::{DebugStop, Debugger};
use crate::registers::RegisterLocation;
use crate::target::{CrashSignal, StopCause};
use crate::thread_id::thread_of;

type GdbStopReason = MultiThreadStopReason<u64>;

fn signal(tid: Tid, signal: Signal) -> GdbStopReason {
    GdbStopReason::SignalWithThread { tid, signal }
}

/// The signal that a Unix program would get for an exception.
fn signal_of(vector: u8) -> Signal {
    match Vector(vector) {
        Vector::DE | Vector::MF | Vector::XM => Signal::SIGFPE,
        Vector::UD => Signal::SIGILL,
        Vector::TS | Vector::NP | Vector::SS | Vector::GP | Vector::PF => Signal::SIGSEGV,
        Vector::AC => Signal::SIGBUS,
        Vector::DF | Vector::MC => Signal::SIGABRT,
        _ => Signal::SIGTRAP,
    }
}

/// The stop as `gdbstub` reports it.
pub(crate) fn gdb_reason(debugger: &Debugger, stop: &DebugStop) -> GdbStopReason {
    let tid = thread_of(stop.vcpu);
    match &stop.cause {
        None => signal(tid, Signal::SIGINT),
        Some(StopCause::HistoryBegin) => GdbStopReason::ReplayLog {
            tid: Some(tid),
            pos: ReplayLogPosition::Begin,
        },
        Some(StopCause::Stepped | StopCause::RunEnd(_) | StopCause::Refused(_)) => {
            signal(tid, Signal::SIGTRAP)
        }
        Some(StopCause::Crash(crash)) => match crash.signal {
            CrashSignal::IllegalInstruction => signal(tid, Signal::SIGILL),
            CrashSignal::Abort => signal(tid, Signal::SIGABRT),
        },
        Some(StopCause::Hit(hit)) => hit_reason(debugger, tid, hit),
    }
}

fn hit_reason(debugger: &Debugger, tid: Tid, hit: &StopHit) -> GdbStopReason {
    match *hit {
        StopHit::Execute(at) => {
            let breakpoint = ClientBreakpoint::Hardware(at);
            match debugger.breakpoints.contains(breakpoint) {
                true => GdbStopReason::HwBreak(tid),
                false => GdbStopReason::SwBreak(tid),
            }
        }
        StopHit::Watchpoint { watchpoint, at, .. } => GdbStopReason::Watch {
            tid,
            kind: match (watchpoint.read, watchpoint.write) {
                (true, true) => WatchKind::ReadWrite,
                (true, false) => WatchKind::Read,
                _ => WatchKind::Write,
            },
            addr: at.max(watchpoint.at),
        },
        StopHit::Exception { vector, .. } => signal(tid, signal_of(vector)),
        StopHit::Port { .. } | StopHit::Msr { .. } | StopHit::Control { .. } => {
            signal(tid, Signal::SIGTRAP)
        }
    }
}

/// One line for the user about a stop for which the client has no words of its own.
pub(crate) fn message(debugger: &mut Debugger, stop: &DebugStop) -> Option<String> {
    let text = match stop.cause.as_ref()? {
        StopCause::Crash(crash) => crash.summary.clone(),
        StopCause::Refused(reason) => reason.clone(),
        StopCause::RunEnd(end) => format!("{end}; `continue` lets it"),
        StopCause::Hit(hit) => hit_message(hit)?,
        StopCause::HistoryBegin | StopCause::Stepped => return None,
    };
    let name = debugger.target().name();
    Some(format!("{name}: cpu {}: {text}\n", stop.vcpu))
}

fn hit_message(hit: &StopHit) -> Option<String> {
    Some(match *hit {
        StopHit::Execute(_) | StopHit::Watchpoint { .. } => return None,
        StopHit::Exception { vector, code } => match code {
            Some(code) => format!("{}, error code {code:#x}", Vector(vector)),
            None => Vector(vector).to_string(),
        },
        StopHit::Port { port, write: true } => format!("write to port {port:#x}"),
        StopHit::Port { port, write: false } => format!("read from port {port:#x}"),
        StopHit::Msr { index, value } => format!("MSR {index:#x} = {value:#x}"),
        StopHit::Control { number, value } => format!("CR{number} = {value:#x}"),
    })
}

/// The registers that a stop reply carries, since every client requests them next: after a step those
/// by which it finds the frame, at a breakpoint all that its condition may name.
pub(crate) fn expedited_registers(
    debugger: &mut Debugger,
    stop: &DebugStop,
) -> Vec<(usize, Vec<u8>)> {
    let general: &[usize] = match stop.cause {
        Some(StopCause::Hit(_)) => &[4, 5, 0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        _ => &[4, 5],
    };
    let general = general.iter().map(|&number| RegisterLocation::Gpr(number));
    let first = [RegisterLocation::LinearPc, RegisterLocation::Flags];
    let mut values = Vec::new();
    for location in first.into_iter().chain(general) {
        let Some(number) = debugger.layout().number(location) else {
            continue;
        };
        let Some(register) = debugger.layout().all().get(number).cloned() else {
            continue;
        };
        if let Ok(value) = debugger.read_register(stop.vcpu, &register) {
            values.push((number, value));
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_have_the_signals_of_unix() {
        for (vector, expected) in [
            (Vector::DE, Signal::SIGFPE),
            (Vector::UD, Signal::SIGILL),
            (Vector::DF, Signal::SIGABRT),
            (Vector::PF, Signal::SIGSEGV),
            (Vector::AC, Signal::SIGBUS),
            (Vector::XM, Signal::SIGFPE),
            (Vector::BP, Signal::SIGTRAP),
            (Vector(31), Signal::SIGTRAP),
        ] {
            assert_eq!(signal_of(vector.0), expected, "{vector}");
        }
    }

    #[test]
    fn messages_name_what_gdb_cannot_show() {
        let exception = |code| StopHit::Exception { vector: 14, code };
        let text = |hit| hit_message(&hit).unwrap();
        assert_eq!(text(exception(Some(2))), "#PF, error code 0x2");
        assert_eq!(text(exception(None)), "#PF");
        let port = StopHit::Port {
            port: 0x80,
            write: true,
        };
        assert_eq!(text(port), "write to port 0x80");
        assert_eq!(hit_message(&StopHit::Execute(1)), None);
    }
}
