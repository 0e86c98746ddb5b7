//! A vCPU that runs under KVM: the loop around KVM_RUN.

mod guest_debug_regs;

use std::sync::Arc;
use std::time::{Duration, Instant};

use hindsight_cpu::armed::Armed;
use hindsight_cpu::msr::{Effect, RdmsrOutcome};
use hindsight_cpu::state::{Activity, CpuState};
use hindsight_cpu::stops::StopConditions;
use hindsight_devices::irq::Pending;
use hindsight_regs::dr::Dr6;
use hindsight_regs::msr as regs;
use kvm_bindings::kvm_regs;

use crate::kvm::KvmError;
use crate::kvm::vcpu::{GuestDebug, KvmVcpuFd};
use crate::vcpu::board::Board;
use crate::vcpu::crash::{Crash, CrashCause, FinalState};
use crate::vcpu::debug::hw_breakpoints::HwBreakpoints;
use crate::vcpu::debug::inspect::{InspectRequest, PausedVcpu};
use crate::vcpu::debug::stop::Unsupported;
use crate::vcpu::debug::stop::{ResumeAction, StopReason, StopReport};
use crate::vcpu::dispatch::{self, ExitAction};
use crate::vcpu::engine::policy::Engine;
use crate::vcpu::kvm::guest_debug_regs::{DebugRegsOwner, ExitAccess, GuestDebugRegs};
use crate::vcpu::model::VcpuModel;
use crate::vcpu::recorder::RecordedKind;
use crate::vcpu::run_control::{Checkpoint, CheckpointState, Doorbell, Outcome, RunLoopEnd};
use crate::vcpu::stats::VcpuStats;

/// RFLAGS.TF.
const FLAG_TF: u64 = 1 << 8;
/// RFLAGS.IF.
const FLAG_IF: u64 = 1 << 9;
/// RFLAGS.RF.
const FLAG_RF: u64 = 1 << 16;
/// How often a step that changed nothing is made again: Bochs stops up to three times at one place, and once for each page
/// that KVM has yet to map, of the tables too.
const STEPS_AGAIN: u8 = 16;
/// #DB.
const DB: u8 = 1;

/// A processor that runs under KVM.
#[derive(Debug)]
pub struct KvmVcpu {
    fd: KvmVcpuFd,
    model: VcpuModel,
    activity: Activity,
    /// What KVM has as CR8.
    cr8: u64,
    /// Whether an interrupt can be injected. `None`: KVM said so at the last exit.
    takes_interrupt: Option<bool>,
    /// The clock's base that KVM's TSC offset was computed from.
    tsc_base: Option<u64>,
    /// The machine is to change its engine, and this processor was not at a place where it can.
    unsettled: bool,
    guest_debug_regs: GuestDebugRegs,
    /// What the debug registers arm, as far as it was seen.
    armed: Armed,
    /// Breakpoints that the instruction under way has met at us, as DR6\[3:0\].
    met: u64,
    /// What a debugger stops for, as far as KVM does it: all, while the guest runs.
    hw_breakpoints: HwBreakpoints,
    /// Registers before the step under way, and how often it was made already.
    before: Option<(kvm_regs, u8)>,
    /// Why the guest cannot go on, while a debugger looks at it.
    crashed: Option<CrashCause>,
}

/// How a turn of the run loop ended.
enum Turn {
    Again,
    /// Sleeps first, with nothing locked.
    Sleep,
    /// The interpreter executes the next instruction.
    Emulate,
    Crash(CrashCause),
}

impl KvmVcpu {
    /// A processor in `state`, which KVM now holds.
    ///
    /// # Errors
    ///
    /// When KVM refuses the state.
    pub fn new(fd: KvmVcpuFd, model: VcpuModel, state: &CpuState) -> Result<Self, KvmError> {
        let mut vcpu = Self {
            fd,
            model,
            activity: state.activity,
            cr8: state.cr8,
            takes_interrupt: None,
            tsc_base: None,
            unsettled: false,
            guest_debug_regs: GuestDebugRegs::new(false, state.dr7),
            armed: Armed::empty(),
            met: 0,
            hw_breakpoints: HwBreakpoints::default(),
            before: None,
            crashed: None,
        };
        vcpu.take_stops();
        vcpu.set_state(state)?;
        vcpu.fd.set_cr8(state.cr8);
        // A KVM without one of these needs no copy of it; the model answers all accesses.
        vcpu.fd.set_msrs(vcpu.model.msrs.mirrored())?;
        Ok(vcpu)
    }

    /// KVM's part, and the models.
    pub fn into_parts(self) -> (KvmVcpuFd, VcpuModel) {
        (self.fd, self.model)
    }

    /// Which processor.
    pub const fn id(&self) -> usize {
        self.model.id
    }

    pub(super) const fn model_mut(&mut self) -> &mut VcpuModel {
        &mut self.model
    }

    pub(super) const fn fd_mut(&mut self) -> &mut KvmVcpuFd {
        &mut self.fd
    }

    /// What a user wants to know of a guest that did not end by itself.
    pub(super) fn final_state(&mut self) -> FinalState {
        let id = self.model.id;
        let state = self.state().unwrap_or_else(|_| CpuState::reset());
        FinalState::new(id, state, &self.model.board.ram.map)
    }

    /// Runs until the machine stops or changes its engine. It has then ended the machine where it
    /// cannot go on.
    pub(super) fn run(&mut self, board: &Arc<Board>, doorbell: &Doorbell) -> RunLoopEnd {
        match self.run_on(board, doorbell) {
            Ok(ended) => ended,
            Err(error) => {
                board.run.finish(error);
                RunLoopEnd::Stopped
            }
        }
    }

    fn run_on(&mut self, board: &Arc<Board>, doorbell: &Doorbell) -> Result<RunLoopEnd, KvmError> {
        // The debug registers may have come from elsewhere.
        self.report_armed();
        if !board.run.engine.can_change()
            && !self.armed.is_empty()
            && !self.hw_breakpoints.is_empty()
        {
            self.model.debug.due = Some(StopReason::Unsupported(Unsupported::Guest));
        }
        self.report_due(board)?;
        if let Some(ended) = self.checkpoint(board)? {
            return Ok(self.ended(board, ended));
        }
        loop {
            match self.turn(doorbell)? {
                Turn::Again => {}
                Turn::Sleep => doorbell.sleep(Duration::from_secs(3600)),
                Turn::Emulate => {
                    if self.model.debug.steps() {
                        self.model.debug.due = Some(StopReason::Stepped);
                    }
                    return Ok(RunLoopEnd::Emulate);
                }
                Turn::Crash(cause) if board.run.stops.requested() => {
                    self.crashed = Some(cause.clone());
                    self.model.debug.due = Some(StopReason::Crash(cause));
                }
                Turn::Crash(cause) => {
                    self.finish(board, cause);
                    return Ok(RunLoopEnd::Stopped);
                }
            }
            self.report_due(board)?;
            if doorbell.is_rung() {
                doorbell.answer();
                if let Some(ended) = self.checkpoint(board)? {
                    return Ok(self.ended(board, ended));
                }
                if let Some(cause) = self.crashed.take() {
                    self.finish(board, cause);
                    return Ok(RunLoopEnd::Stopped);
                }
            }
        }
    }

    /// How the run ends where a checkpoint says so: a guest that cannot go on does so nowhere.
    fn ended(&mut self, board: &Arc<Board>, ended: RunLoopEnd) -> RunLoopEnd {
        match (ended, self.crashed.take()) {
            (RunLoopEnd::Change(..), Some(cause)) => {
                self.finish(board, cause);
                RunLoopEnd::Stopped
            }
            (ended, _) => ended,
        }
    }

    fn finish(&mut self, board: &Arc<Board>, cause: CrashCause) {
        let crash = self.crash(cause);
        board.run.finish(Outcome::Crash(Box::new(crash)));
    }

    /// Tells the debugger if there is something to tell, and has the processor wait at the next
    /// checkpoint.
    fn report_due(&mut self, board: &Board) -> Result<(), KvmError> {
        if self.model.debug.due.is_none() {
            return Ok(());
        }
        self.complete()?;
        self.before = None;
        if let Some(reason) = self.model.debug.due.take() {
            let (id, state) = (self.model.id, Some(Box::new(self.state()?)));
            board.run.vcpus.hold(id);
            board.run.stops.push(StopReport { id, reason, state });
        }
        Ok(())
    }

    /// Comes to a checkpoint, if that is wanted, with the instruction under way complete.
    fn checkpoint(&mut self, board: &Board) -> Result<Option<RunLoopEnd>, KvmError> {
        let (id, control) = (self.model.id, &board.run.vcpus);
        self.unsettled = false;
        if !control.checkpoint_requested(id..id + 1) {
            return Ok(None);
        }
        let since = Instant::now();
        self.complete()?;
        loop {
            let movable = control.switch_requested().then(|| self.is_movable());
            let place = CheckpointState {
                ids: id..id + 1,
                engine: Engine::Kvm,
                movable: movable.transpose()?,
            };
            self.unsettled = place.movable == Some(false);
            let serve = &mut |_, request: InspectRequest| request(self);
            return Ok(match control.checkpoint(place, serve) {
                Checkpoint::Again => continue,
                Checkpoint::Run => None,
                Checkpoint::Stop => Some(RunLoopEnd::Stopped),
                Checkpoint::Change(to) => Some(RunLoopEnd::Change(to, since)),
            });
        }
    }

    fn is_movable(&self) -> Result<bool, KvmError> {
        // A processor that does not run has nothing under way.
        Ok(self.activity != Activity::Running || self.fd.is_movable()?)
    }

    /// Looks for work, runs the guest once, serves the exit.
    fn turn(&mut self, doorbell: &Doorbell) -> Result<Turn, KvmError> {
        if !self.prepare()? {
            return Ok(Turn::Sleep);
        }
        if doorbell.is_rung() {
            // A ring that came before the kicker was in place, or whose `immediate_exit` the
            // completion of an instruction has cleared, throws nobody out; and later rings are
            // silent until this one is answered.
            return Ok(Turn::Again);
        }
        self.program()?;
        self.model.record(RecordedKind::Enter);
        let (cr8, exit) = self.fd.run()?;
        self.model.record(RecordedKind::Exit((&exit).into()));
        self.takes_interrupt = None;
        if cr8 != self.cr8 {
            self.cr8 = cr8;
            self.model.board.buses.irq.set_cr8(self.model.id, cr8);
        }
        tracing::trace!(target: "exit", "cpu {} {exit:x?}", self.model.id);
        let access = ExitAccess::of(&exit);
        match dispatch::serve(exit, &mut self.model) {
            ExitAction::Run => {}
            ExitAction::Poll => {
                doorbell.answer();
                // A ring that was taken here is served by the look round that follows; a wish to
                // pause must not get lost with it.
                let id = self.model.id;
                if self.model.board.run.vcpus.checkpoint_requested(id..id + 1) {
                    doorbell.ring();
                }
            }
            ExitAction::Halt => self.halt(),
            ExitAction::Apply { index, effect } => self.apply(index, effect)?,
            ExitAction::Debug { dr6 } => {
                if !self.debug_exit(dr6)? {
                    return Ok(Turn::Emulate);
                }
            }
            ExitAction::Crash(cause) => {
                if matches!(cause, CrashCause::TripleFault) {
                    self.activity = Activity::Shutdown;
                }
                return Ok(Turn::Crash(cause));
            }
        }
        self.look(access)?;
        let stepped = access.is_some() && self.fd.at_exit().regs.rflags & FLAG_TF != 0;
        if stepped || self.met != 0 {
            self.trap(stepped)?;
        }
        Ok(Turn::Again)
    }

    /// HLT was executed. To a debugger that is a step.
    fn halt(&mut self) {
        self.activity = Activity::Halted;
        if self.model.debug.steps() {
            self.model.debug.due = Some(StopReason::Stepped);
        }
    }

    /// Has KVM debug the guest as it is wanted now: for the debugger, and to see MOV DR. This is the
    /// only place that decides it.
    fn program(&mut self) -> Result<(), KvmError> {
        let step = self.model.debug.steps() || self.edges();
        let mut passed = None;
        if step {
            let general = self.plain_registers()?;
            self.before.get_or_insert((general, 0));
            // A step executes its instruction whatever is set there.
            passed = Some(self.fd.code_address()?);
        }
        let ours =
            self.guest_debug_regs.holder() == DebugRegsOwner::Us || !self.hw_breakpoints.is_empty();
        self.fd.set_guest_debug(&GuestDebug {
            step,
            registers: ours.then(|| self.hw_breakpoints.registers(passed)),
        })
    }

    /// General registers without the flags that stepping changes.
    fn plain_registers(&self) -> Result<kvm_regs, KvmError> {
        let mut registers = self.fd.general()?;
        registers.rflags &= !(FLAG_TF | FLAG_RF);
        Ok(registers)
    }

    /// The machine is to stop for what KVM cannot do, and this processor was not at a place where it
    /// can be moved: it goes there by single steps.
    fn edges(&self) -> bool {
        self.unsettled
            && self.hw_breakpoints.is_empty()
            && self.model.debug.stops != StopConditions::default()
    }

    /// A debug exit was the debugger's, or was seen to. `false`: the instruction is to be executed by
    /// the interpreter, a MOV DR or INT1.
    fn debug_exit(&mut self, dr6: u64) -> Result<bool, KvmError> {
        let trapped = dr6 & Dr6::BS.bits() != 0;
        let steps = self.model.debug.steps() || self.edges();
        let at = self.fd.code_address()?;
        let hit = self.hw_breakpoints.hit(dr6, at);
        if trapped && !steps {
            self.debug_exception(Dr6::BS)?;
        }
        match hit {
            Some(hit) => self.model.debug.due = Some(StopReason::Hit(hit)),
            None if trapped && steps => self.stepped(at)?,
            None => return Ok(trapped),
        }
        Ok(true)
    }

    /// KVM has stepped. Some KVMs stop more than once at one place: a step that changed nothing is made
    /// again, though not for ever, since an instruction may jump to itself.
    fn stepped(&mut self, at: u64) -> Result<(), KvmError> {
        let now = self.plain_registers()?;
        if let Some((before, again)) = &mut self.before
            && *before == now
            && *again < STEPS_AGAIN
        {
            *again += 1;
            return Ok(());
        }
        self.before = None;
        let debug = &mut self.model.debug;
        if !debug.steps() {
            self.model.board.run.vcpus.doorbell(self.model.id).ring();
        } else if !debug.in_range(at) {
            debug.due = Some(StopReason::Stepped);
        }
        Ok(())
    }

    /// Takes over what the debugger stops for. What KVM cannot do of it moves the machine before the
    /// guest runs.
    fn take_stops(&mut self) {
        self.hw_breakpoints = HwBreakpoints::new(&self.model.debug.stops).unwrap_or_default();
    }

    /// Looks at the debug registers where an exit may change what follows from them, and for the
    /// breakpoints that its access meets.
    fn look(&mut self, access: Option<ExitAccess>) -> Result<(), KvmError> {
        // Not asked for more often than needed: it is a copy of all registers.
        if self.guest_debug_regs.holder() == DebugRegsOwner::Us {
            return Ok(());
        }
        let cr4 = self.fd.at_exit().sregs.cr4;
        if !self.guest_debug_regs.looks(access, cr4) {
            return Ok(());
        }
        let registers = self.fd.debug_registers()?;
        let armed = Armed::by_dr7(registers.control, cr4);
        if armed != self.armed {
            self.armed = armed;
            self.report_armed();
        }
        // What follows from it is for `program`.
        self.guest_debug_regs
            .looked(registers.control, Instant::now());
        let translate = |linear| self.fd.translate(linear);
        self.met |= access.map_or(0, |access| access.meets(&registers, cr4, translate));
        Ok(())
    }

    /// The instruction of the last exit is to be followed by a #DB: for the breakpoints it met at us,
    /// and, `stepped`, for RFLAGS.TF, unless KVM sees to that.
    fn trap(&mut self, stepped: bool) -> Result<(), KvmError> {
        self.complete()?;
        let mut conditions = Dr6::from_bits_retain(std::mem::take(&mut self.met));
        match self.fd.waiting_exception()? {
            Some(DB) if conditions.is_empty() => return Ok(()),
            Some(DB) | None => {}
            // It was not completed.
            Some(_) => return Ok(()),
        }
        if stepped {
            conditions |= Dr6::BS;
        }
        self.debug_exception(conditions)
    }

    /// Delivers a #DB.
    fn debug_exception(&mut self, conditions: Dr6) -> Result<(), KvmError> {
        let mut registers = self.fd.debug_registers()?;
        registers.report(conditions.bits());
        registers.enter(false);
        self.fd.set_debug_registers(&registers)?;
        self.fd.inject_debug_exception()?;
        self.takes_interrupt = Some(false);
        Ok(())
    }

    /// Brings events to the processor. `false`: it has nothing to run and sleeps.
    fn prepare(&mut self) -> Result<bool, KvmError> {
        let (id, board) = (self.model.id, self.model.board.clone());
        let irq = &board.buses.irq;
        self.follow_clock(&board);
        let pending = irq.pending(id);
        if pending.init && irq.take_init(id) {
            self.init()?;
        }
        if let Some(vector) = pending.sipi.and_then(|_| irq.take_sipi(id)) {
            self.start_up(vector)?;
        }
        if matches!(self.activity, Activity::WaitForSipi | Activity::Shutdown) {
            board.time.poll_window(id, false);
            return Ok(false);
        }
        if self.model.debug.masks_interrupts() {
            board.time.poll_window(id, false);
            return Ok(self.activity == Activity::Running);
        }
        if pending.nmi && irq.take_nmi(id) {
            tracing::trace!(target: "irq", "cpu {id} NMI");
            self.fd.nmi()?;
            self.activity = Activity::Running;
        }
        self.offer_interrupt(pending, &board)?;
        let cr8 = irq.cr8(id);
        if cr8 != self.cr8 {
            self.cr8 = cr8;
            self.fd.set_cr8(cr8);
        }
        Ok(self.activity == Activity::Running)
    }

    fn offer_interrupt(&mut self, pending: Pending, board: &Board) -> Result<(), KvmError> {
        let (id, waiting) = (self.model.id, pending.interrupt);
        let mut window = false;
        if waiting && self.takes_interrupt() {
            // An instruction that is half done may still fault, and its handler may run with
            // interrupts off: complete it, which also tells anew whether KVM takes an interrupt.
            self.complete()?;
        }
        if waiting && self.takes_interrupt() {
            if let Some(vector) = board.buses.irq.acknowledge(id) {
                tracing::trace!(target: "irq", "cpu {id} interrupt {vector:#x}");
                self.model.record(RecordedKind::Interrupt { vector });
                self.fd.interrupt(vector)?;
                // KVM takes no second one before it runs.
                self.takes_interrupt = Some(false);
                self.activity = Activity::Running;
            }
            window = board.buses.irq.pending(id).interrupt;
        } else if waiting {
            window = true;
        }
        // A halted processor opens no window: where it cannot be interrupted now, it never can.
        let runs = self.activity == Activity::Running;
        self.fd.request_interrupt_window(window && runs);
        // Some KVMs do not tell when CR8 is lowered either.
        board
            .time
            .poll_window(id, runs && (window || pending.held || self.unsettled));
        Ok(())
    }

    fn takes_interrupt(&mut self) -> bool {
        self.takes_interrupt
            .unwrap_or_else(|| self.fd.ready_for_interrupt())
    }

    /// The machine's clock starts and is paused: KVM's TSC offset follows.
    fn follow_clock(&mut self, board: &Board) {
        let base = board.time.clock.host_base();
        if base != self.tsc_base {
            self.tsc_base = base;
            self.set_native_tsc(board);
        }
    }

    fn set_native_tsc(&mut self, board: &Board) {
        let Some(base) = board.time.clock.host_base() else {
            return;
        };
        let offset = self.model.msrs.tsc().offset().wrapping_sub(base);
        if let Err(error) = self.fd.set_tsc_offset(offset) {
            tracing::debug!("cpu {}: {error}", self.model.id);
        }
    }

    fn apply(&mut self, index: u32, effect: Effect) -> Result<(), KvmError> {
        self.complete()?;
        match effect {
            Effect::None => {}
            // The change of engine has the other processors look.
            Effect::Armed | Effect::PackageArmed => self.report_armed(),
            Effect::TscMoved => self.set_native_tsc(&self.model.board.clone()),
            Effect::Mirror(value) => {
                if !self.fd.set_msr(index, value)? {
                    tracing::debug!("this KVM does not take {value:#x} for MSR {index:#x}");
                }
                if index == regs::IA32_APIC_BASE {
                    self.cr8 = self.fd.cr8();
                }
            }
        }
        Ok(())
    }

    /// Completes an instruction that an exit left half done, serving what it still does.
    fn complete(&mut self) -> Result<(), KvmError> {
        while let Some(exit) = self.fd.complete()? {
            let access = ExitAccess::of(&exit);
            match dispatch::serve(exit, &mut self.model) {
                ExitAction::Apply { index, effect } => {
                    while self.fd.complete()?.is_some() {}
                    return self.apply(index, effect);
                }
                ExitAction::Halt => self.halt(),
                // With this a step is over.
                ExitAction::Debug { dr6 } => _ = self.debug_exit(dr6)?,
                // What else can come of completing one instruction shows again at the next run.
                ExitAction::Run | ExitAction::Poll | ExitAction::Crash(_) => {}
            }
            self.look(access)?;
        }
        Ok(())
    }

    /// The whole state, with the instruction under way complete.
    pub(super) fn state(&mut self) -> Result<CpuState, KvmError> {
        self.complete()?;
        let mut state = CpuState::reset();
        self.fd.store(&mut state)?;
        state.activity = self.activity;
        if self.activity != Activity::Running {
            // Some KVMs keep the shadow of the STI before a HLT: it is over.
            (state.events.sti_shadow, state.events.mov_ss_shadow) = (false, false);
        }
        let now = self.model.now();
        if let RdmsrOutcome::Value(mask) = self.model.msrs.read(regs::IA32_FMASK, now) {
            state.msrs.fmask = mask;
        }
        Ok(state)
    }

    /// Tells the machine what is armed.
    fn report_armed(&self) {
        let board = &self.model.board;
        board
            .run
            .engine
            .arm(self.model.id, self.model.msrs.armed() | self.armed);
    }

    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError> {
        // KVM puts the TF of its own steps into the state that it takes.
        self.fd.set_guest_debug(&GuestDebug::default())?;
        self.fd
            .load(state, self.model.board.buses.irq.apic_base(self.model.id))?;
        self.activity = state.activity;
        self.guest_debug_regs =
            GuestDebugRegs::new(self.model.board.run.engine.intercepts_mov_dr(), state.dr7);
        self.armed = Armed::by_dr7(state.dr7, state.cr4);
        let events = &state.events;
        let open = !events.sti_shadow && !events.mov_ss_shadow && events.interrupt.is_none();
        self.takes_interrupt = Some(open && state.rflags & FLAG_IF != 0);
        Ok(())
    }

    /// INIT: the boot processor starts again at the reset vector, the others wait for SIPI.
    fn init(&mut self) -> Result<(), KvmError> {
        tracing::trace!(target: "irq", "cpu {} INIT", self.model.id);
        let mut state = self.state()?;
        state.init();
        state.activity = if self.model.id == 0 {
            Activity::Running
        } else {
            Activity::WaitForSipi
        };
        self.model.msrs.init();
        self.report_armed();
        self.set_state(&state)
    }

    fn start_up(&mut self, vector: u8) -> Result<(), KvmError> {
        if self.activity != Activity::WaitForSipi {
            return Ok(());
        }
        tracing::trace!(target: "irq", "cpu {} SIPI {vector:#x}", self.model.id);
        let mut state = self.state()?;
        state.start_up(vector);
        self.set_state(&state)
    }

    /// Its exits: KVM counts no more.
    pub(super) fn stats(&self) -> VcpuStats {
        VcpuStats {
            cpu: self.model.id,
            exits: self.model.exits,
            interpreter: None,
            mix: Vec::new(),
        }
    }

    fn crash(&mut self, cause: CrashCause) -> Crash {
        let id = self.model.id;
        let state = self.state().unwrap_or_else(|_| CpuState::reset());
        Crash::new(id, cause, state, &self.model.board.ram.map)
    }
}

impl PausedVcpu for KvmVcpu {
    fn engine(&self) -> Engine {
        Engine::Kvm
    }

    fn state(&mut self) -> Result<CpuState, KvmError> {
        KvmVcpu::state(self)
    }

    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError> {
        KvmVcpu::set_state(self, state)
    }

    fn model(&mut self) -> &mut VcpuModel {
        &mut self.model
    }

    fn set_resume_action(&mut self, action: ResumeAction) {
        self.model.debug.action = action;
    }

    fn set_stops(&mut self, stops: &StopConditions) {
        self.model.debug.stops.clone_from(stops);
        self.take_stops();
    }

    fn write_msr(&mut self, index: u32, value: u64) -> Result<bool, KvmError> {
        match self.model.wrmsr(index, value) {
            Ok(Some(effect)) => self.apply(index, effect).map(|()| true),
            _ => Ok(false),
        }
    }

    fn memory_written(&mut self, _: u64, _: u64) {}

    fn go_to(&mut self, _: u64) -> Option<bool> {
        None
    }

    fn retired(&self) -> Option<u64> {
        None
    }

    fn stats(&mut self) -> VcpuStats {
        KvmVcpu::stats(self)
    }
}
