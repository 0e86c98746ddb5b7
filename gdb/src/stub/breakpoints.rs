//! Breakpoints and watchpoints.

use gdbstub::target::TargetResult;
use gdbstub::target::ext::breakpoints::{
    Breakpoints, HwBreakpoint, HwBreakpointOps, HwWatchpoint, HwWatchpointOps, SwBreakpoint,
    SwBreakpointOps, WatchKind,
};
use hindsight_cpu::stops::Watchpoint;

use crate::breakpoints::ClientBreakpoint;
use crate::debugger::Debugger;

impl Breakpoints for Debugger {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_breakpoint(&mut self) -> Option<HwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_watchpoint(&mut self) -> Option<HwWatchpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for Debugger {
    fn add_sw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.breakpoints.add(ClientBreakpoint::Software(at)))
    }

    fn remove_sw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        self.breakpoints.remove(ClientBreakpoint::Software(at));
        Ok(true)
    }
}

impl HwBreakpoint for Debugger {
    fn add_hw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.breakpoints.add(ClientBreakpoint::Hardware(at)))
    }

    fn remove_hw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        self.breakpoints.remove(ClientBreakpoint::Hardware(at));
        Ok(true)
    }
}

/// A watchpoint on exactly the accesses that the client names: reads, writes, or both.
fn watchpoint(at: u64, len: u64, kind: WatchKind) -> ClientBreakpoint {
    ClientBreakpoint::Watch(Watchpoint {
        at,
        len: len.max(1),
        read: kind != WatchKind::Write,
        write: kind != WatchKind::Read,
    })
}

impl HwWatchpoint for Debugger {
    fn add_hw_watchpoint(
        &mut self,
        at: u64,
        len: u64,
        kind: WatchKind,
    ) -> TargetResult<bool, Self> {
        Ok(self.breakpoints.add(watchpoint(at, len, kind)))
    }

    fn remove_hw_watchpoint(
        &mut self,
        at: u64,
        len: u64,
        kind: WatchKind,
    ) -> TargetResult<bool, Self> {
        self.breakpoints.remove(watchpoint(at, len, kind));
        Ok(true)
    }
}
