//! The debugger's hold on the machine: pausing it, looking into it, letting it run on.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Instant;

use hindsight_cpu::control::ControlMasks;
use hindsight_cpu::state::CpuState;
use hindsight_regs::msr;
use thiserror::Error;

use crate::gdb::breakpoints::Breakpoints;
use crate::gdb::btrace::Tracing;
use crate::gdb::memory;
use crate::gdb::registers::{self, Available, Layout, Mode, Place, Register};
use crate::kvm::KvmError;
use crate::kvm::host_support::HwBreakpointSupport;
use crate::probe::host::measure_hw_breakpoints;
use crate::vcpu::board::Board;
use crate::vcpu::debug::hw_breakpoints;
use crate::vcpu::debug::inspect::PausedVcpu;
use crate::vcpu::debug::stop::Unsupported;
use crate::vcpu::debug::stop::{ResumeAction, StopReason};
use crate::vcpu::engine::policy::{self, Engine};
use crate::vcpu::run_control::Outcome;
use hindsight_interp::{Hit, MsrStops, Stops};

/// Why something could not be done.
#[derive(Debug, Error)]
pub(super) enum DebugError {
    /// The machine has ended.
    #[error("the machine has ended")]
    Gone,
    /// The machine runs.
    #[error("the machine runs")]
    Running,
    /// There is no such processor.
    #[error("there is no such processor")]
    NoProcessor,
    /// There is no such register.
    #[error("there is no such register")]
    NoRegister,
    /// The value is not as long as the register.
    #[error("the value is not as long as the register")]
    Length,
    /// The value is refused.
    #[error(transparent)]
    Register(#[from] registers::RegisterError),
    /// The guest would get #GP.
    #[error("the processor refuses this value for the MSR")]
    MsrRefused,
    /// Not memory.
    #[error("{0:#x} is not mapped to memory")]
    NoMemory(u64),
    /// KVM failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM alone may run the guest, and cannot do this.
    #[error("this needs --engine auto or interp: {0}")]
    NeedsInterpreter(Unsupported),
}

/// Settings that the user changes by monitor commands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Options {
    /// Addresses are guest-physical.
    pub(super) physical: bool,
    /// Steps enter interrupt handlers.
    pub(super) step_irq: bool,
    /// What the client thinks in.
    pub(super) mode: Mode,
}

/// Why the machine last stopped, for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reason {
    /// Which processor stopped.
    pub(super) cpu: usize,
    /// `None`: the debugger itself paused the machine.
    pub(super) stop: Option<StopReason>,
}

/// The debugger's side of a machine.
pub(super) struct Debugger {
    board: Arc<Board>,
    cpus: usize,
    paused: bool,
    /// The states of the processors, read once a pause.
    states: Vec<Option<Box<CpuState>>>,
    pub(super) breakpoints: Breakpoints,
    /// What KVM can do for us, once that is of interest.
    able: Option<HwBreakpointSupport>,
    /// What each processor was last told to stop for.
    applied: Vec<Stops>,
    /// What each processor does next; `None` stays where it is.
    plans: Vec<Option<ResumeAction>>,
    /// Processors that the client gave a plan, a bit each.
    planned: u64,
    pub(super) options: Options,
    pub(super) tracing: Tracing,
    available: Available,
    layout: Layout,
    /// What control registers take.
    pub(super) controls: ControlMasks,
    /// Stops that were not yet told.
    pending: VecDeque<(usize, StopReason)>,
    pub(super) reason: Reason,
    /// The processor that the client looks at.
    pub(super) current: usize,
    /// Whom the next step back is for, where that is not the thread that `gdbstub` takes it to be.
    pub(super) steps_back: Option<usize>,
    /// `resume` has no effect: see [`crate::gdb::filter`].
    pub(super) pretend: bool,
    /// The file that the client has open: see [`crate::gdb::kernel`].
    pub(super) file: Option<Vec<u8>>,
    /// When the machine was made.
    pub(super) since: Instant,
}

impl std::fmt::Debug for Debugger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Debugger")
            .field("paused", &self.paused)
            .finish_non_exhaustive()
    }
}

/// A processor's number as the protocol has it: they count from 1.
pub(super) fn tid(cpu: usize) -> NonZeroUsize {
    NonZeroUsize::MIN.saturating_add(cpu)
}

/// The processor of a thread.
pub(super) fn cpu_of(tid: NonZeroUsize) -> usize {
    tid.get() - 1
}

/// Whether what was stopped for is among `stops`.
fn is_wanted(stops: &Stops, stop: &StopReason) -> bool {
    match stop {
        StopReason::Hit(Hit::Watch { watch, .. }) => stops.watch.contains(watch),
        StopReason::Hit(Hit::Port { port, write }) => stops.ports.iter().any(|watch| {
            let kind = if *write { watch.write } else { watch.read };
            kind && (watch.first..=watch.last).contains(port)
        }),
        StopReason::Hit(Hit::Exception { vector, .. }) => stops.exceptions >> vector & 1 != 0,
        StopReason::Hit(Hit::Msr { index, .. }) => match &stops.msrs {
            MsrStops::None => false,
            MsrStops::These(these) => these.contains(index),
            MsrStops::All => true,
        },
        StopReason::Hit(Hit::Control { number, .. }) => stops.controls >> number & 1 != 0,
        _ => true,
    }
}

impl Debugger {
    pub(super) fn new(board: Arc<Board>) -> Self {
        let cpus = board.run.vcpus.cpus();
        let xcr0 = board.package.cpuid.query(0xd, 0, 0, 0, 0);
        let available = Available {
            xcr0: u64::from(xcr0[3]) << 32 | u64::from(xcr0[0]),
            msrs: Vec::new(),
        };
        let layout = Layout::new(Mode::default(), &available);
        let controls = ControlMasks::from_cpuid(|leaf, subleaf| {
            board.package.cpuid.query(leaf, subleaf, 0, 0, 0)
        });
        Self {
            board,
            cpus,
            paused: false,
            states: vec![None; cpus],
            breakpoints: Breakpoints::default(),
            able: None,
            applied: vec![Stops::default(); cpus],
            plans: vec![Some(ResumeAction::Run); cpus],
            planned: 0,
            options: Options::default(),
            tracing: Tracing::default(),
            available,
            layout,
            controls,
            pending: VecDeque::new(),
            reason: Reason { cpu: 0, stop: None },
            current: 0,
            steps_back: None,
            pretend: false,
            file: None,
            since: Instant::now(),
        }
    }

    pub(super) const fn board(&self) -> &Arc<Board> {
        &self.board
    }

    pub(super) const fn cpus(&self) -> usize {
        self.cpus
    }

    pub(super) const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Shows registers as code of this kind has them.
    pub(super) fn set_mode(&mut self, mode: Mode) {
        self.options.mode = mode;
        self.layout = Layout::new(mode, &self.available);
    }

    /// The run can go back.
    pub(super) fn goes_back(&self) -> bool {
        self.board.time.clock.is_virtual()
    }

    /// Goes to an instruction of a deterministic run; `None` in others.
    pub(super) fn go_to(&mut self, place: u64) -> Result<Option<bool>, DebugError> {
        let there = self.ask(0, move |cpu| cpu.go_to(place))?;
        self.states.fill(None);
        Ok(there)
    }

    /// Stops all processors.
    pub(super) fn pause(&mut self) -> Result<(), DebugError> {
        if !self.board.pause() {
            return Err(DebugError::Gone);
        }
        self.paused = true;
        if self.available.msrs.is_empty() {
            self.find_msrs()?;
        }
        Ok(())
    }

    pub(super) const fn is_paused(&self) -> bool {
        self.paused
    }

    /// Asks which MSRs the processors have.
    fn find_msrs(&mut self) -> Result<(), DebugError> {
        let candidates = registers::msr_candidates();
        self.available.msrs = self.ask(0, move |cpu| {
            let model = cpu.model();
            candidates
                .iter()
                .map(|row| row.0)
                .filter(|&index| model.peek_msr(index).is_some())
                .collect()
        })?;
        self.set_mode(self.options.mode);
        Ok(())
    }

    /// Takes what the processors reported, stops the others, and says what the client hears of it:
    /// `None` if nothing was reported.
    pub(super) fn collect(&mut self) -> Result<Option<Reason>, DebugError> {
        let mut reports = self.board.run.stops.take();
        if reports.is_empty() && self.pending.is_empty() {
            return Ok(None);
        }
        self.pause()?;
        reports.append(&mut self.board.run.stops.take());
        for report in reports {
            // It has not run on since.
            if let (Some(place), Some(state)) = (self.states.get_mut(report.id), report.state) {
                *place = Some(state);
            }
            self.pending.push_back((report.id, report.reason));
        }
        Ok(self.next_reason())
    }

    fn next_reason(&mut self) -> Option<Reason> {
        let (cpu, stop) = self.pending.pop_front()?;
        // What reaches its breakpoint at the same time as another will reach it again.
        self.pending.retain(|(_, stop)| {
            !matches!(stop, StopReason::Stepped | StopReason::Hit(Hit::Execute(_)))
        });
        self.reason = Reason {
            cpu,
            stop: Some(stop),
        };
        Some(self.reason.clone())
    }

    /// Stops the machine because the user wants it.
    pub(super) fn interrupt(&mut self) -> Result<Reason, DebugError> {
        if let Some(reason) = self.collect()? {
            return Ok(reason);
        }
        self.pause()?;
        // What came while the processors stopped counts more.
        if let Some(reason) = self.collect()? {
            return Ok(reason);
        }
        let cpu = self.reason.cpu.min(self.cpus - 1);
        self.reason = Reason { cpu, stop: None };
        Ok(self.reason.clone())
    }

    /// Has a paused processor's own thread do something.
    pub(super) fn ask<R: Send + 'static>(
        &self,
        cpu: usize,
        what: impl FnOnce(&mut dyn PausedVcpu) -> R + Send + 'static,
    ) -> Result<R, DebugError> {
        if !self.paused {
            return Err(DebugError::Running);
        }
        if cpu >= self.cpus {
            return Err(DebugError::NoProcessor);
        }
        let (answer, answered) = mpsc::sync_channel(1);
        let request = Box::new(move |attended: &mut dyn PausedVcpu| {
            // Nobody else holds the receiver: it waits below.
            let _ = answer.send(what(attended));
        });
        if !self.board.run.vcpus.request(cpu, request) {
            return Err(DebugError::Gone);
        }
        answered.recv().map_err(|_| DebugError::Gone)
    }

    /// The state of a processor.
    pub(super) fn state(&mut self, cpu: usize) -> Result<&CpuState, DebugError> {
        if !self.paused {
            return Err(DebugError::Running);
        }
        let known = self.states.get(cpu).ok_or(DebugError::NoProcessor)?;
        if known.is_none() {
            let state = self.ask(cpu, |cpu| cpu.state().map(Box::new))??;
            self.states[cpu] = Some(state);
        }
        self.states
            .get(cpu)
            .and_then(Option::as_deref)
            .ok_or(DebugError::NoProcessor)
    }

    /// Changes the state of a processor.
    pub(super) fn change<E>(
        &mut self,
        cpu: usize,
        change: impl FnOnce(&mut CpuState) -> Result<(), E>,
    ) -> Result<(), DebugError>
    where
        DebugError: From<E>,
    {
        let mut state = Box::new(self.state(cpu)?.clone());
        change(&mut state)?;
        let wanted = state.clone();
        self.ask(cpu, move |cpu| cpu.set_state(&wanted))??;
        self.states[cpu] = Some(state);
        Ok(())
    }

    /// Reads one register.
    pub(super) fn read_register(
        &mut self,
        cpu: usize,
        register: &Register,
    ) -> Result<Vec<u8>, DebugError> {
        let state = self.state(cpu)?;
        if let Some(value) = registers::read(state, register.place, register.bytes()) {
            return Ok(value);
        }
        let Place::Msr(index) = register.place else {
            return Err(DebugError::NoRegister);
        };
        let value = self.read_msr(cpu, index)?.ok_or(DebugError::NoRegister)?;
        Ok(value.to_le_bytes().to_vec())
    }

    /// Writes one register.
    pub(super) fn write_register(
        &mut self,
        cpu: usize,
        place: Place,
        value: &[u8],
    ) -> Result<(), DebugError> {
        if let Place::Msr(index) = place {
            let mut wide = [0; 8];
            let len = value.len().min(8);
            wide[..len].copy_from_slice(&value[..len]);
            return self.write_msr(cpu, index, u64::from_le_bytes(wide));
        }
        let controls = self.controls;
        let memory = self.board.ram.map.clone();
        self.change(cpu, |state| {
            registers::write(state, &controls, place, value)?;
            if place == Place::Control(3) && crate::memory::page_walk::has_pdptrs(state) {
                let pdptrs = crate::memory::page_walk::pdptrs(&memory, state.cr3);
                state.pdptr = pdptrs.ok_or(DebugError::NoMemory(state.cr3))?;
            }
            Ok::<_, DebugError>(())
        })
    }

    /// An MSR as RDMSR shows it, without what reading it does.
    pub(super) fn read_msr(&mut self, cpu: usize, index: u32) -> Result<Option<u64>, DebugError> {
        let state = self.state(cpu)?;
        if let Some(value) = memory::msr_of_state(state, index) {
            return Ok(Some(value));
        }
        self.ask(cpu, move |cpu| cpu.model().peek_msr(index))
    }

    /// Writes an MSR as WRMSR does.
    pub(super) fn write_msr(
        &mut self,
        cpu: usize,
        index: u32,
        value: u64,
    ) -> Result<(), DebugError> {
        if index == msr::IA32_EFER {
            // Its bits depend on others.
            return self.write_register(cpu, Place::Efer, &value.to_le_bytes());
        }
        let in_state = memory::msr_of_state(self.state(cpu)?, index).is_some();
        if in_state {
            return self.change(cpu, |state| {
                memory::set_msr_of_state(state, index, value).ok_or(DebugError::MsrRefused)
            });
        }
        let written = self.ask(cpu, move |cpu| cpu.write_msr(index, value))?;
        self.forget(cpu);
        match written? {
            true => Ok(()),
            false => Err(DebugError::MsrRefused),
        }
    }

    /// The state of a processor was changed by its own thread.
    fn forget(&mut self, cpu: usize) {
        if let Some(state) = self.states.get_mut(cpu) {
            *state = None;
        }
    }

    /// Reads memory, as far as it goes: at a linear address of a processor, or at a physical one if
    /// the user wants that.
    pub(super) fn read_memory(
        &mut self,
        cpu: usize,
        at: u64,
        len: usize,
    ) -> Result<Vec<u8>, DebugError> {
        let physical = self.options.physical;
        let memory = self.board.ram.map.clone();
        let state = self.state(cpu)?;
        let bytes = if physical {
            memory::read_physical(&memory, at, len)
        } else {
            crate::memory::page_walk::read_linear(&memory, state, at, len)
        };
        if bytes.is_empty() && len != 0 {
            return Err(DebugError::NoMemory(at));
        }
        Ok(bytes)
    }

    /// Writes memory: all of it, or none.
    pub(super) fn write_memory(
        &mut self,
        cpu: usize,
        at: u64,
        bytes: &[u8],
    ) -> Result<(), DebugError> {
        let physical = self.options.physical;
        let memory = self.board.ram.map.clone();
        let state = self.state(cpu)?;
        let pieces = if physical {
            memory::physical_pieces(&memory, at, bytes.len())
        } else {
            memory::pieces(&memory, state, at, bytes.len())
        };
        let pieces = pieces.ok_or(DebugError::NoMemory(at))?;
        let written: Vec<_> = pieces
            .iter()
            .map(|p| (p.at, p.range.len() as u64))
            .collect();
        memory::write(&memory, &pieces, bytes).ok_or(DebugError::NoMemory(at))?;
        self.ask(0, move |cpu| {
            for (at, len) in written {
                cpu.memory_written(at, len);
            }
        })
    }

    /// Every processor runs, unless told otherwise.
    pub(super) fn begin_plans(&mut self) {
        self.plans.fill(Some(ResumeAction::Run));
        self.planned = 0;
    }

    /// What one processor does next.
    pub(super) fn plan(&mut self, cpu: usize, plan: ResumeAction) {
        if let Some(place) = self.plans.get_mut(cpu) {
            *place = Some(plan);
            self.planned |= 1 << cpu;
        }
    }

    /// Processors without a plan of their own stay where they are.
    pub(super) fn hold_unplanned(&mut self) {
        for (cpu, plan) in self.plans.iter_mut().enumerate() {
            if self.planned >> cpu & 1 == 0 {
                *plan = None;
            }
        }
    }

    /// Lets the machine run on as planned.
    pub(super) fn resume(&mut self) -> Result<(), DebugError> {
        if self.pretend {
            return Ok(());
        }
        if !self.paused {
            return Err(DebugError::Running);
        }
        self.forget_stale();
        if !self.pending.is_empty() {
            // Told already: the client hears of it at once.
            self.board.run.stops.signal();
            return Ok(());
        }
        if let Some(refused) = self.choose_engine()? {
            self.pending.push_back(refused);
            self.board.run.stops.signal();
            return Ok(());
        }
        for cpu in 0..self.cpus {
            self.prepare(cpu)?;
        }
        let held = self.plans.iter().enumerate();
        let held = held.filter(|(_, plan)| plan.is_none());
        let held: u64 = held.map(|(cpu, _)| 1 << cpu).sum();
        self.states.fill(None);
        self.paused = false;
        self.board.run.vcpus.hold_only(held);
        self.board.resume();
        Ok(())
    }

    /// Forgets what processors that run on stopped for where that is not stopped for any more. Clients take
    /// all breakpoints away to step one processor over one of them, while the others stay where they are.
    fn forget_stale(&mut self) {
        let stops = self.breakpoints.stops();
        let plans = &self.plans;
        let runs = |cpu: usize| plans.get(cpu).is_some_and(Option::is_some);
        self.pending
            .retain(|(cpu, stop)| !runs(*cpu) || is_wanted(&stops, stop));
    }

    /// The machine may change its engine, or runs in KVM for good.
    pub(super) fn has_kvm(&self) -> bool {
        self.board.run.engine.can_change() || self.board.run.vcpus.engine() == Engine::Kvm
    }

    /// Has the machine run on in the engine that can do what is planned. Where that is not to be had,
    /// the processor that stays, and why.
    fn choose_engine(&mut self) -> Result<Option<(usize, StopReason)>, DebugError> {
        if !self.has_kvm() {
            return Ok(None);
        }
        let changes = self.board.run.engine.can_change();
        let mut wanted = policy::DebuggerDemand::Nothing;
        for cpu in 0..self.cpus {
            match self.fit(cpu)? {
                Ok(true) if wanted == policy::DebuggerDemand::Nothing => {
                    wanted = policy::DebuggerDemand::HwBreakpoints
                }
                Ok(_) => {}
                Err(_) if changes => wanted = policy::DebuggerDemand::BeyondKvm,
                Err(beyond) => return Ok(Some((cpu, StopReason::Unsupported(beyond)))),
            }
        }
        self.board.run.engine.demand(wanted);
        Ok(None)
    }

    /// Whether KVM can do what is planned for a processor; and, if so, whether that takes debug
    /// registers.
    fn fit(&mut self, cpu: usize) -> Result<Result<bool, Unsupported>, DebugError> {
        if self.tracing.any() {
            return Ok(Err(Unsupported::Branches));
        }
        let Some(plan) = self.plans[cpu] else {
            return Ok(Ok(false));
        };
        let stops = self.stops(cpu, plan);
        if plan == ResumeAction::Run && stops == Stops::default() {
            return Ok(Ok(false));
        }
        let standing = self.state(cpu)?.into();
        let changes = self.board.run.engine.can_change();
        let able = self
            .able
            .get_or_insert_with(|| measure_hw_breakpoints(changes));
        Ok(hw_breakpoints::allocate(&stops, plan, standing, able)
            .map(|hw_breakpoints| !hw_breakpoints.is_empty()))
    }

    /// What a processor stops for on its way.
    fn stops(&self, cpu: usize, plan: ResumeAction) -> Stops {
        let mut stops = self.breakpoints.stops();
        let quiet_step = ResumeAction::Step {
            mask_interrupts: true,
            range: None,
        };
        if plan == quiet_step {
            // A step executes its instruction whatever is set there. Clients take all breakpoints
            // away for it and put them back after it: nothing has to follow that. In a deterministic
            // run those are met that the handler of an interrupt has.
            if stops.execute.is_empty() || !self.goes_back() {
                stops.execute.clone_from(&self.applied[cpu].execute);
            }
        }
        stops
    }

    /// Tells a processor how to run on, where that is new.
    fn prepare(&mut self, cpu: usize) -> Result<(), DebugError> {
        let Some(plan) = self.plans[cpu] else {
            return Ok(());
        };
        let stops = self.stops(cpu, plan);
        let fresh = (stops != self.applied[cpu]).then(|| stops.clone());
        let order = Box::new(move |cpu: &mut dyn PausedVcpu| {
            cpu.set_resume_action(plan);
            if let Some(stops) = fresh {
                cpu.set_stops(&stops);
            }
        });
        if !self.board.run.vcpus.queue_request(cpu, order) {
            return Err(DebugError::Gone);
        }
        self.applied[cpu] = stops;
        Ok(())
    }

    /// The client goes: nothing of it stays, and the machine runs on.
    pub(super) fn detach(&mut self) {
        self.breakpoints = Breakpoints::default();
        self.options = Options::default();
        self.set_mode(Mode::default());
        self.begin_plans();
        self.pending.clear();
        if !self.paused && self.pause().is_err() {
            return;
        }
        // What stopped meanwhile runs on.
        self.board.run.stops.take();
        for cpu in 0..self.cpus {
            if self.stop_trace(cpu).is_err() {
                return;
            }
        }
        self.tracing = Tracing::default();
        self.file = None;
        // A machine that has ended needs nothing.
        let _ = self.resume();
    }

    /// Ends the machine.
    pub(super) fn kill(&self) {
        self.board.run.finish(Outcome::Quit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_interp::Watch;

    #[test]
    fn what_is_stopped_for_no_more_is_not_told() {
        let watch = |at| Watch {
            at,
            len: 8,
            read: false,
            write: true,
        };
        let hit = |at| {
            StopReason::Hit(Hit::Watch {
                watch: watch(at),
                at,
                write: true,
            })
        };
        let stops = Stops {
            watch: vec![watch(1)],
            exceptions: 1 << 14,
            controls: 1 << 3,
            msrs: MsrStops::These(vec![0x10]),
            ..Stops::default()
        };
        let exception = |vector| StopReason::Hit(Hit::Exception { vector, code: None });
        let control = |number| StopReason::Hit(Hit::Control { number, value: 0 });
        let msr = |index| StopReason::Hit(Hit::Msr { index, value: 0 });
        for wanted in [
            hit(1),
            exception(14),
            control(3),
            msr(0x10),
            StopReason::Stepped,
        ] {
            assert!(is_wanted(&stops, &wanted), "{wanted:?}");
        }
        let port = StopReason::Hit(Hit::Port {
            port: 1,
            write: true,
        });
        for other in [hit(2), exception(6), control(0), msr(0x11), port] {
            assert!(!is_wanted(&stops, &other), "{other:?}");
        }
    }
}
