//! The machine as `gdbstub` sees it.
//!
//! What `gdbstub` lacks, or takes for fatal, the [filter](super::filter) in front of it answers.

use std::fmt::Write as _;
use std::num::NonZeroUsize;

use gdbstub::arch::{Arch, RegId, Registers};
use gdbstub::common::{Signal, Tid};
use gdbstub::target::ext::base::BaseOps;
use gdbstub::target::ext::base::multithread::{
    MultiThreadBase, MultiThreadRangeStepping, MultiThreadRangeSteppingOps, MultiThreadResume,
    MultiThreadResumeOps, MultiThreadSchedulerLocking, MultiThreadSchedulerLockingOps,
    MultiThreadSingleStep, MultiThreadSingleStepOps,
};
use gdbstub::target::ext::base::reverse_exec::{
    ReverseCont, ReverseContOps, ReverseStep, ReverseStepOps,
};
use gdbstub::target::ext::base::single_register_access::{
    SingleRegisterAccess, SingleRegisterAccessOps,
};
use gdbstub::target::ext::breakpoints::{
    Breakpoints, BreakpointsOps, HwBreakpoint, HwBreakpointOps, HwWatchpoint, HwWatchpointOps,
    SwBreakpoint, SwBreakpointOps, WatchKind,
};
use gdbstub::target::ext::host_io::HostIoOps;
use gdbstub::target::ext::monitor_cmd::{ConsoleOutput, MonitorCmd, MonitorCmdOps};
use gdbstub::target::ext::target_description_xml_override::{
    TargetDescriptionXmlOverride, TargetDescriptionXmlOverrideOps,
};
use gdbstub::target::{Target, TargetError, TargetResult};
use hindsight_cpu::stops::Watchpoint;

use crate::gdb::breakpoints::Breakpoint;
use crate::gdb::debugger::{DebugError, Debugger, cpu_of, tid};
use crate::gdb::monitor;
use crate::vcpu::debug::stop::ResumeAction;

/// A processor of any mode: its registers are those of the layout that the client was given, so
/// here they are only bytes.
#[derive(Debug)]
pub(super) enum X86 {}

/// The contents of a `g` packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GeneralRegisters(Vec<u8>);

impl Registers for GeneralRegisters {
    type ProgramCounter = u64;

    fn pc(&self) -> u64 {
        // Only asked for by conveniences of `gdbstub` that are not used here.
        0
    }

    fn gdb_serialize(&self, mut write_byte: impl FnMut(Option<u8>)) {
        for &byte in &self.0 {
            write_byte(Some(byte));
        }
    }

    fn gdb_deserialize(&mut self, bytes: &[u8]) -> Result<(), ()> {
        self.0 = bytes.to_vec();
        Ok(())
    }
}

/// The number of a register.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegisterNumber(pub(super) usize);

impl RegId for RegisterNumber {
    fn from_raw_id(id: usize) -> Option<(Self, Option<NonZeroUsize>)> {
        Some((Self(id), None))
    }

    fn to_raw_id(&self) -> Option<usize> {
        Some(self.0)
    }
}

impl Arch for X86 {
    type Usize = u64;
    type Registers = GeneralRegisters;
    type RegId = RegisterNumber;
    type BreakpointKind = usize;
}

/// What the client is told, as an `errno`.
pub(super) fn errno(error: &DebugError) -> u8 {
    tracing::debug!(target: "gdb", "{error}");
    match error {
        DebugError::NoMemory(_) => 14,
        DebugError::Gone => 3,
        DebugError::Running => 16,
        DebugError::NeedsInterpreter(_) => 95,
        _ => 22,
    }
}

fn refuse(error: &DebugError) -> TargetError<DebugError> {
    TargetError::Errno(errno(error))
}

impl Target for Debugger {
    type Arch = X86;
    type Error = DebugError;

    fn base_ops(&mut self) -> BaseOps<'_, X86, DebugError> {
        BaseOps::MultiThread(self)
    }

    fn use_no_ack_mode(&self) -> bool {
        // The filter sees to acknowledgements.
        false
    }

    fn use_rle(&self) -> bool {
        false
    }

    fn use_fork_stop_reason(&self) -> bool {
        false
    }

    fn use_vfork_stop_reason(&self) -> bool {
        false
    }

    fn use_vforkdone_stop_reason(&self) -> bool {
        false
    }

    fn use_lldb_register_info(&self) -> bool {
        // lldb reads the target description.
        false
    }

    fn support_breakpoints(&mut self) -> Option<BreakpointsOps<'_, Self>> {
        Some(self)
    }

    fn support_host_io(&mut self) -> Option<HostIoOps<'_, Self>> {
        Some(self)
    }

    fn support_monitor_cmd(&mut self) -> Option<MonitorCmdOps<'_, Self>> {
        Some(self)
    }

    fn support_target_description_xml_override(
        &mut self,
    ) -> Option<TargetDescriptionXmlOverrideOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadBase for Debugger {
    fn read_registers(
        &mut self,
        registers: &mut GeneralRegisters,
        tid: Tid,
    ) -> TargetResult<(), Self> {
        let general = self.layout().general().to_vec();
        registers.0.clear();
        for register in &general {
            let value = self.read_register(cpu_of(tid), register);
            registers.0.extend(value.map_err(|error| refuse(&error))?);
        }
        Ok(())
    }

    fn write_registers(
        &mut self,
        registers: &GeneralRegisters,
        tid: Tid,
    ) -> TargetResult<(), Self> {
        let general = self.layout().general().to_vec();
        let controls = self.controls;
        let mut rest = registers.0.as_slice();
        self.change(cpu_of(tid), |state| {
            for register in &general {
                let (value, after) = rest
                    .split_at_checked(register.bytes())
                    .ok_or(DebugError::Length)?;
                rest = after;
                crate::gdb::registers::write(state, &controls, register.place, value)?;
            }
            Ok::<_, DebugError>(())
        })
        .map_err(|error| refuse(&error))
    }

    fn support_single_register_access(&mut self) -> Option<SingleRegisterAccessOps<'_, Tid, Self>> {
        Some(self)
    }

    fn read_addrs(&mut self, at: u64, data: &mut [u8], tid: Tid) -> TargetResult<usize, Self> {
        let bytes = self.read_memory(cpu_of(tid), at, data.len());
        let bytes = bytes.map_err(|error| refuse(&error))?;
        let len = bytes.len().min(data.len());
        data[..len].copy_from_slice(&bytes[..len]);
        Ok(len)
    }

    fn write_addrs(&mut self, at: u64, data: &[u8], tid: Tid) -> TargetResult<(), Self> {
        self.write_memory(cpu_of(tid), at, data)
            .map_err(|error| refuse(&error))
    }

    fn list_active_threads(&mut self, each: &mut dyn FnMut(Tid)) -> Result<(), DebugError> {
        (0..self.cpus()).map(tid).for_each(each);
        Ok(())
    }

    fn support_resume(&mut self) -> Option<MultiThreadResumeOps<'_, Self>> {
        Some(self)
    }
}

impl SingleRegisterAccess<Tid> for Debugger {
    fn read_register(
        &mut self,
        tid: Tid,
        number: RegisterNumber,
        buffer: &mut [u8],
    ) -> TargetResult<usize, Self> {
        let Some(register) = self.layout().all().get(number.0).cloned() else {
            return Err(refuse(&DebugError::NoRegister));
        };
        let value = Debugger::read_register(self, cpu_of(tid), &register);
        let value = value.map_err(|error| refuse(&error))?;
        let len = value.len().min(buffer.len());
        buffer[..len].copy_from_slice(&value[..len]);
        Ok(len)
    }

    fn write_register(
        &mut self,
        tid: Tid,
        number: RegisterNumber,
        value: &[u8],
    ) -> TargetResult<(), Self> {
        let Some(register) = self.layout().all().get(number.0).cloned() else {
            return Err(refuse(&DebugError::NoRegister));
        };
        if value.len() != register.bytes() {
            return Err(refuse(&DebugError::Length));
        }
        Debugger::write_register(self, cpu_of(tid), register.place, value)
            .map_err(|error| refuse(&error))
    }
}

impl Debugger {
    fn step_plan(&self, range: Option<(u64, u64)>) -> ResumeAction {
        ResumeAction::Step {
            mask_interrupts: !self.options.step_irq,
            range,
        }
    }
}

impl MultiThreadResume for Debugger {
    fn resume(&mut self) -> Result<(), DebugError> {
        Debugger::resume(self)
    }

    fn clear_resume_actions(&mut self) -> Result<(), DebugError> {
        self.begin_plans();
        Ok(())
    }

    fn set_resume_action_continue(
        &mut self,
        tid: Tid,
        _: Option<Signal>,
    ) -> Result<(), DebugError> {
        self.plan(cpu_of(tid), ResumeAction::Run);
        Ok(())
    }

    fn support_single_step(&mut self) -> Option<MultiThreadSingleStepOps<'_, Self>> {
        Some(self)
    }

    fn support_range_step(&mut self) -> Option<MultiThreadRangeSteppingOps<'_, Self>> {
        Some(self)
    }

    fn support_reverse_step(&mut self) -> Option<ReverseStepOps<'_, Tid, Self>> {
        self.goes_back().then_some(self)
    }

    fn support_reverse_cont(&mut self) -> Option<ReverseContOps<'_, Tid, Self>> {
        self.goes_back().then_some(self)
    }

    fn support_scheduler_locking(&mut self) -> Option<MultiThreadSchedulerLockingOps<'_, Self>> {
        Some(self)
    }
}

impl ReverseStep<Tid> for Debugger {
    fn reverse_step(&mut self, tid: Tid) -> Result<(), DebugError> {
        let cpu = self.steps_back.take().unwrap_or_else(|| cpu_of(tid));
        self.begin_plans();
        let mask_interrupts = !self.options.step_irq;
        self.plan(cpu, ResumeAction::StepBack { mask_interrupts });
        Debugger::resume(self)
    }
}

impl ReverseCont<Tid> for Debugger {
    fn reverse_cont(&mut self) -> Result<(), DebugError> {
        self.begin_plans();
        self.plan(self.current, ResumeAction::RunBack);
        Debugger::resume(self)
    }
}

impl MultiThreadSingleStep for Debugger {
    fn set_resume_action_step(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), DebugError> {
        let plan = self.step_plan(None);
        self.plan(cpu_of(tid), plan);
        Ok(())
    }
}

impl MultiThreadRangeStepping for Debugger {
    fn set_resume_action_range_step(
        &mut self,
        tid: Tid,
        start: u64,
        end: u64,
    ) -> Result<(), DebugError> {
        let plan = self.step_plan(Some((start, end)));
        self.plan(cpu_of(tid), plan);
        Ok(())
    }
}

impl MultiThreadSchedulerLocking for Debugger {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), DebugError> {
        self.hold_unplanned();
        Ok(())
    }
}

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
        Ok(self.breakpoints.add(Breakpoint::Software(at)))
    }

    fn remove_sw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        self.breakpoints.remove(Breakpoint::Software(at));
        Ok(true)
    }
}

impl HwBreakpoint for Debugger {
    fn add_hw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.breakpoints.add(Breakpoint::Hardware(at)))
    }

    fn remove_hw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        self.breakpoints.remove(Breakpoint::Hardware(at));
        Ok(true)
    }
}

/// A watch of the client: of reads, of writes, or of both, each exactly.
fn watch(at: u64, len: u64, kind: WatchKind) -> Breakpoint {
    Breakpoint::Watch(Watchpoint {
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
        Ok(self.breakpoints.add(watch(at, len, kind)))
    }

    fn remove_hw_watchpoint(
        &mut self,
        at: u64,
        len: u64,
        kind: WatchKind,
    ) -> TargetResult<bool, Self> {
        self.breakpoints.remove(watch(at, len, kind));
        Ok(true)
    }
}

impl TargetDescriptionXmlOverride for Debugger {
    fn target_description_xml(
        &self,
        annex: &[u8],
        offset: u64,
        length: usize,
        buffer: &mut [u8],
    ) -> TargetResult<usize, Self> {
        if annex != b"target.xml" {
            return Err(TargetError::NonFatal);
        }
        let xml = self.layout().description();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(xml.len());
        let part = &xml.as_bytes()[from..];
        let len = part.len().min(length).min(buffer.len());
        buffer[..len].copy_from_slice(&part[..len]);
        Ok(len)
    }
}

impl MonitorCmd for Debugger {
    fn handle_monitor_cmd(
        &mut self,
        command: &[u8],
        mut out: ConsoleOutput<'_>,
    ) -> Result<(), DebugError> {
        let command = String::from_utf8_lossy(command);
        let answer = monitor::run(self, &command);
        // Written to a client that is there: it cannot fail.
        let _ = out.write_str(&answer);
        Ok(())
    }
}
