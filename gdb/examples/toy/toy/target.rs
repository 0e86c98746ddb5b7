//! What a monitor implements.

use std::ops::Range;
use std::sync::Arc;

use hindsight_cpu::cpuid::CpuidRegs;
use hindsight_cpu::state::CpuState;
use hindsight_cpu::stops::ResumeAction;
use hindsight_gdb::DebugTarget;
use hindsight_gdb::monitor::no_arguments;
use hindsight_gdb::target::{
    BranchTrace, CommandError, CommandHelp, MachineCommands, PhysicalMemory, RecordedBranches,
    ResumeError, ReverseExecution, TargetError, Unavailable, VcpuResume, VcpuStop,
};
use rustix::fd::{AsFd, BorrowedFd};

use super::cpu::RAM_BYTES;
use super::machine::{Inner, Phase, Shared, ToyTrace};

/// The toy's RAM.
struct ToyMemory(Arc<Shared>);

impl PhysicalMemory for ToyMemory {
    fn ram(&self) -> &[Range<u64>] {
        const RAM: Range<u64> = 0..RAM_BYTES as u64;
        std::slice::from_ref(&RAM)
    }

    fn read(&self, gpa: u64, buffer: &mut [u8]) -> usize {
        let inner = self.0.lock();
        let from = usize::try_from(gpa).unwrap_or(usize::MAX);
        let rest = inner.cpu.ram.get(from..).unwrap_or(&[]);
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        len
    }
}

/// The toy, for a debugger.
pub struct ToyTarget {
    shared: Arc<Shared>,
    memory: ToyMemory,
}

impl ToyTarget {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let memory = ToyMemory(shared.clone());
        Self { shared, memory }
    }

    fn set_phase(&self, inner: &mut Inner, phase: Phase) {
        inner.phase = phase;
        self.shared.changed.notify_all();
    }
}

fn require_alive(inner: &Inner) -> Result<(), TargetError> {
    match inner.phase {
        Phase::Ended(_) => Err(TargetError::Ended),
        _ => Ok(()),
    }
}

impl DebugTarget for ToyTarget {
    fn name(&self) -> &str {
        "toy"
    }

    fn vcpu_count(&self) -> usize {
        1
    }

    fn cpuid(&self, leaf: u32, _: u32) -> CpuidRegs {
        match leaf {
            // 64-bit mode.
            0x8000_0001 => [0, 0, 0, 1 << 29],
            _ => [0; 4],
        }
    }

    fn memory(&self) -> &dyn PhysicalMemory {
        &self.memory
    }

    fn write_memory(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), TargetError> {
        let mut inner = self.shared.lock();
        require_alive(&inner)?;
        let from = usize::try_from(gpa).unwrap_or(usize::MAX);
        if let Some(ram) = inner.cpu.ram.get_mut(from..from + bytes.len()) {
            ram.copy_from_slice(bytes);
        }
        inner.forget_past();
        Ok(())
    }

    fn pause(&mut self) -> Result<(), TargetError> {
        let mut inner = self.shared.lock();
        require_alive(&inner)?;
        // The vCPU's thread does not run while this one holds the lock.
        self.set_phase(&mut inner, Phase::Paused);
        Ok(())
    }

    fn resume(&mut self, vcpus: &[Option<VcpuResume>]) -> Result<(), ResumeError> {
        let mut inner = self.shared.lock();
        require_alive(&inner)?;
        let [Some(resume)] = vcpus else {
            // The only vCPU stays where it is.
            return Ok(());
        };
        if resume.stops.exceptions != 0 {
            return Err(ResumeError::Refused {
                vcpu: 0,
                reason: "the toy has no exceptions; type `monitor catch off`".to_owned(),
            });
        }
        inner.action = resume.action;
        inner.stops = resume.stops.clone();
        let forwards = matches!(resume.action, ResumeAction::Run | ResumeAction::Step { .. });
        // The debugger resumes although the end was reported to it.
        let phase = match inner.end_reported && forwards {
            true => Phase::Ended(Some(0)),
            false => Phase::Running,
        };
        inner.end_reported = false;
        self.set_phase(&mut inner, phase);
        Ok(())
    }

    fn stop_event(&self) -> BorrowedFd<'_> {
        self.shared.stop_event.as_fd()
    }

    fn take_stops(&mut self) -> Result<Vec<VcpuStop>, TargetError> {
        let mut inner = self.shared.lock();
        self.shared.stop_event.clear();
        require_alive(&inner)?;
        // A vCPU that stops has paused this machine: it is the only one.
        Ok(std::mem::take(&mut inner.reports))
    }

    fn kill(&mut self) {
        self.shared.end(None);
    }

    fn state(&mut self, _: usize) -> Result<Box<CpuState>, TargetError> {
        let inner = self.shared.lock();
        require_alive(&inner)?;
        Ok(Box::new(inner.cpu.state.clone()))
    }

    fn set_state(&mut self, _: usize, state: &CpuState) -> Result<(), TargetError> {
        let mut inner = self.shared.lock();
        require_alive(&inner)?;
        inner.cpu.state = state.clone();
        inner.forget_past();
        Ok(())
    }

    fn read_msrs(&mut self, _: usize, indices: &[u32]) -> Result<Vec<Option<u64>>, TargetError> {
        // The toy has no MSRs but those in its state.
        Ok(vec![None; indices.len()])
    }

    fn write_msr(&mut self, _: usize, _: u32, _: u64) -> Result<bool, TargetError> {
        Ok(false)
    }

    fn reverse(&mut self) -> Result<&mut dyn ReverseExecution, Unavailable> {
        Ok(self)
    }

    fn branch_trace(&mut self) -> Option<&mut dyn BranchTrace> {
        Some(self)
    }

    fn commands(&mut self) -> Option<&mut dyn MachineCommands> {
        Some(self)
    }
}

impl ReverseExecution for ToyTarget {
    fn icount(&mut self) -> Result<u64, TargetError> {
        Ok(self.shared.lock().cpu.icount)
    }

    fn go_to(&mut self, icount: u64) -> Result<bool, TargetError> {
        Ok(self.shared.lock().go_to(icount))
    }
}

impl BranchTrace for ToyTarget {
    fn start(&mut self, _: usize, limit: usize) -> Result<(), TargetError> {
        let mut inner = self.shared.lock();
        let start = inner.cpu.state.rip;
        inner.trace.get_or_insert_with(|| ToyTrace {
            limit,
            branches: Default::default(),
            total: 0,
            start,
        });
        Ok(())
    }

    fn stop(&mut self, _: usize) -> Result<(), TargetError> {
        self.shared.lock().trace = None;
        Ok(())
    }

    fn limit(&mut self, _: usize) -> Result<Option<usize>, TargetError> {
        Ok(self.shared.lock().trace.as_ref().map(|trace| trace.limit))
    }

    fn branches(&mut self, _: usize) -> Result<Option<RecordedBranches>, TargetError> {
        let inner = self.shared.lock();
        Ok(inner.trace.as_ref().map(|trace| RecordedBranches {
            branches: trace.branches.iter().copied().collect(),
            total: trace.total,
            start: trace.start,
            ..RecordedBranches::default()
        }))
    }
}

impl MachineCommands for ToyTarget {
    fn list(&self) -> &'static [CommandHelp] {
        &[CommandHelp {
            name: "toy",
            arguments: "",
            help: "print how many instructions the toy has executed",
        }]
    }

    fn run(&mut self, _: &str, _: usize, arguments: &[&str]) -> Result<String, CommandError> {
        no_arguments(arguments)?;
        Ok(format!("{} instructions", self.shared.lock().cpu.icount))
    }
}
