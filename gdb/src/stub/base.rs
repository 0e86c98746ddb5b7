//! Registers, memory and the target description.

use std::fmt::Write as _;

use gdbstub::common::Tid;
use gdbstub::target::ext::base::BaseOps;
use gdbstub::target::ext::base::multithread::{MultiThreadBase, MultiThreadResumeOps};
use gdbstub::target::ext::base::single_register_access::{
    SingleRegisterAccess, SingleRegisterAccessOps,
};
use gdbstub::target::ext::breakpoints::BreakpointsOps;
use gdbstub::target::ext::host_io::HostIoOps;
use gdbstub::target::ext::monitor_cmd::{ConsoleOutput, MonitorCmd, MonitorCmdOps};
use gdbstub::target::ext::target_description_xml_override::{
    TargetDescriptionXmlOverride, TargetDescriptionXmlOverrideOps,
};
use gdbstub::target::{Target, TargetError as StubError, TargetResult};

use super::arch::{GeneralRegisterBytes, RegisterNumber, X86Arch};
use crate::debugger::{DebugError, Debugger};
use crate::monitor;
use crate::registers::RegisterInfo;
use crate::thread_id::{thread_of, vcpu_of};

impl Target for Debugger {
    type Arch = X86Arch;
    type Error = DebugError;

    fn base_ops(&mut self) -> BaseOps<'_, X86Arch, DebugError> {
        BaseOps::MultiThread(self)
    }

    fn use_no_ack_mode(&self) -> bool {
        // The filter handles acknowledgements.
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
        registers: &mut GeneralRegisterBytes,
        tid: Tid,
    ) -> TargetResult<(), Self> {
        let read = self.read_general(vcpu_of(tid));
        registers.0 = read.map_err(|error| self.refuse(error))?;
        Ok(())
    }

    fn write_registers(
        &mut self,
        registers: &GeneralRegisterBytes,
        tid: Tid,
    ) -> TargetResult<(), Self> {
        let written = self.write_general(vcpu_of(tid), &registers.0);
        written.map_err(|error| self.refuse(error))
    }

    fn support_single_register_access(&mut self) -> Option<SingleRegisterAccessOps<'_, Tid, Self>> {
        Some(self)
    }

    fn read_addrs(&mut self, at: u64, data: &mut [u8], tid: Tid) -> TargetResult<usize, Self> {
        let bytes = self.read_memory(vcpu_of(tid), at, data.len());
        let bytes = bytes.map_err(|error| self.refuse(error))?;
        Ok(copy_prefix(data, &bytes))
    }

    fn write_addrs(&mut self, at: u64, data: &[u8], tid: Tid) -> TargetResult<(), Self> {
        let written = self.write_memory(vcpu_of(tid), at, data);
        written.map_err(|error| self.refuse(error))
    }

    fn list_active_threads(&mut self, each: &mut dyn FnMut(Tid)) -> Result<(), DebugError> {
        (0..self.vcpu_count()).map(thread_of).for_each(each);
        Ok(())
    }

    fn support_resume(&mut self) -> Option<MultiThreadResumeOps<'_, Self>> {
        Some(self)
    }
}

/// Copies as much of `from` as fits, and returns how much that is.
fn copy_prefix(to: &mut [u8], from: &[u8]) -> usize {
    let len = from.len().min(to.len());
    to[..len].copy_from_slice(&from[..len]);
    len
}

/// The register with this number.
fn register(debugger: &Debugger, number: RegisterNumber) -> Result<RegisterInfo, DebugError> {
    let register = debugger.layout().all().get(number.0).cloned();
    register.ok_or_else(|| DebugError::NoRegister(number.0.to_string()))
}

impl SingleRegisterAccess<Tid> for Debugger {
    fn read_register(
        &mut self,
        tid: Tid,
        number: RegisterNumber,
        buffer: &mut [u8],
    ) -> TargetResult<usize, Self> {
        let value = register(self, number).and_then(|register| {
            let vcpu = vcpu_of(tid);
            Debugger::read_register(self, vcpu, &register)
        });
        let value = value.map_err(|error| self.refuse(error))?;
        Ok(copy_prefix(buffer, &value))
    }

    fn write_register(
        &mut self,
        tid: Tid,
        number: RegisterNumber,
        value: &[u8],
    ) -> TargetResult<(), Self> {
        let written = register(self, number).and_then(|register| {
            let (expected, given) = (register.bytes(), value.len());
            if given != expected {
                return Err(DebugError::Length { expected, given });
            }
            Debugger::write_register(self, vcpu_of(tid), register.location, value)
        });
        written.map_err(|error| self.refuse(error))
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
            return Err(StubError::NonFatal);
        }
        let xml = self.layout().description();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(xml.len());
        let rest = &xml.as_bytes()[from..];
        Ok(copy_prefix(buffer, &rest[..rest.len().min(length)]))
    }
}

impl MonitorCmd for Debugger {
    fn handle_monitor_cmd(
        &mut self,
        command: &[u8],
        mut out: ConsoleOutput<'_>,
    ) -> Result<(), DebugError> {
        let command = String::from_utf8_lossy(command);
        let text = monitor::run(self, &command);
        // The output goes to a buffer, which does not fail.
        let _ = out.write_str(&text);
        Ok(())
    }
}
