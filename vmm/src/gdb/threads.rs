//! Processors as threads: names and states.

use std::fmt::Write as _;

use hindsight_cpu::state::{Activity, CpuState};
use hindsight_regs::cr::Cr0;
use hindsight_regs::rflags::Rflags;

use crate::gdb::debugger::Debugger;

/// What a processor does, in a few words.
pub(super) fn activity(state: &CpuState) -> String {
    let doing = match state.activity {
        Activity::Running => "runs",
        Activity::Halted => "halted",
        Activity::WaitForSipi => "waits for SIPI",
        Activity::Shutdown => "shut down by a triple fault",
    };
    let long = state.is_long_mode();
    let mode = match (state.cr0 & Cr0::PE.bits() != 0, long) {
        (false, _) => "real mode",
        (true, _) if state.rflags & Rflags::VM.bits() != 0 => "virtual-8086 mode",
        (true, true) if state.seg[1].long() => "64-bit",
        (true, true) => "compatibility mode",
        (true, false) if state.seg[1].default_big() => "32-bit",
        (true, false) => "16-bit protected mode",
    };
    format!("{doing}, {mode}, CPL {}", state.cpl())
}

/// The list of threads that `qXfer:threads:read` gives.
pub(super) fn list(debugger: &mut Debugger) -> String {
    let mut xml = "<?xml version=\"1.0\"?>\n<threads>\n".to_owned();
    for cpu in 0..debugger.cpus() {
        let doing = match debugger.state(cpu) {
            Ok(state) => activity(state),
            Err(error) => error.to_string(),
        };
        let _ = writeln!(
            xml,
            "<thread id=\"p1.{:x}\" core=\"{cpu}\" name=\"vCPU {cpu}\">{doing}</thread>",
            cpu + 1
        );
    }
    xml.push_str("</threads>\n");
    xml
}
