//! A vCPU that runs under KVM: the loop around KVM_RUN.
//!
//! This file has the loop, `events` what interrupts the vCPU, `debugging` what its debug
//! registers and a debugger require, and `guest_debug_regs` who owns the debug registers.

mod debugging;
mod events;
mod guest_debug_regs;

use std::sync::Arc;
use std::time::{Duration, Instant};

use hindsight_cpu::armed::Armed;
use hindsight_cpu::msr::{MsrEffect, RdmsrOutcome, WrmsrOutcome};
use hindsight_cpu::state::{Activity, CpuState};
use hindsight_cpu::stops::StopConditions;

use hindsight_regs::msr as regs;
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::GpFault;
use kvm_bindings::kvm_regs;

use guest_debug_regs::{ExitAccess, GuestDebugRegs};

use crate::kvm::KvmError;
use crate::kvm::vcpu::{GuestDebug, KvmVcpuFd};
use crate::log_limit::LogLimit;
use crate::vcpu::board::Board;
use crate::vcpu::crash::{Crash, CrashCause, FinalState};
use crate::vcpu::debug::hw_breakpoints::HwBreakpoints;
use crate::vcpu::debug::inspect::{InspectRequest, PausedVcpu};
use crate::vcpu::debug::stop::{ResumeAction, StopReason, StopReport, Unsupported};
use crate::vcpu::dispatch::{self, ExitAction};
use crate::vcpu::engine::Engine;
use crate::vcpu::model::VcpuModel;
use crate::vcpu::recorder::RecordedKind;
use crate::vcpu::run_control::{Checkpoint, CheckpointState, Doorbell, Outcome, RunLoopEnd};
use crate::vcpu::stats::VcpuStats;

/// Bound of a sleep that only the doorbell should end.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// A vCPU that runs under KVM.
#[derive(Debug)]
pub struct KvmVcpu {
    fd: KvmVcpuFd,
    model: VcpuModel,
    activity: Activity,
    /// The CR8 that KVM has.
    cr8: u64,
    /// Whether an interrupt can be injected. `None`: as KVM reported at the last exit.
    accepts_interrupt: Option<bool>,
    /// The clock's base that KVM's TSC offset was computed from.
    tsc_base: Option<u64>,
    /// An engine change is requested, and this vCPU could not be moved at its last checkpoint.
    unsettled: bool,
    guest_debug_regs: GuestDebugRegs,
    /// What the debug registers arm, as far as exits have shown it.
    armed: Armed,
    /// Breakpoints that the accesses of the current instruction hit in the monitor, as DR6\[3:0\].
    hits: u64,
    /// The debugger's breakpoints, in the debug registers of this vCPU.
    hw_breakpoints: HwBreakpoints,
    /// Registers before the current single step, and how often it was repeated.
    step_start: Option<(kvm_regs, u8)>,
    /// Why the guest cannot continue, while a debugger examines it.
    crashed: Option<CrashCause>,
}

/// How a turn of the run loop ended.
enum Turn {
    Again,
    /// The thread sleeps first, with no lock held.
    Sleep,
    /// The interpreter executes the next instruction.
    Emulate,
    Crash(CrashCause),
}

impl KvmVcpu {
    /// A vCPU in `state`, which KVM takes over.
    ///
    /// # Errors
    ///
    /// When KVM refuses the state.
    pub fn new(fd: KvmVcpuFd, model: VcpuModel, state: &CpuState) -> Result<Self, KvmError> {
        let mut vcpu = Self {
            hw_breakpoints: breakpoints_of(&model.debug.stops),
            fd,
            model,
            activity: state.activity,
            cr8: state.cr8,
            accepts_interrupt: None,
            tsc_base: None,
            unsettled: false,
            guest_debug_regs: GuestDebugRegs::new(false, state.dr7),
            armed: Armed::empty(),
            hits: 0,
            step_start: None,
            crashed: None,
        };
        vcpu.set_state(state)?;
        vcpu.fd.set_cr8(state.cr8);
        // A KVM without one of these needs no copy of it; the model answers all accesses.
        vcpu.fd.set_msrs(vcpu.model.msrs.mirrored())?;
        Ok(vcpu)
    }

    /// KVM's vCPU, and the model.
    pub fn into_parts(self) -> (KvmVcpuFd, VcpuModel) {
        (self.fd, self.model)
    }

    /// The vCPU's number.
    pub const fn id(&self) -> usize {
        self.model.id
    }

    pub(super) const fn model_mut(&mut self) -> &mut VcpuModel {
        &mut self.model
    }

    pub(super) const fn fd_mut(&mut self) -> &mut KvmVcpuFd {
        &mut self.fd
    }

    /// The state to report of a guest that did not end by itself.
    pub(super) fn final_state(&mut self) -> FinalState {
        let id = self.model.id;
        let state = self.state().unwrap_or_else(|_| CpuState::reset());
        FinalState::new(id, state, &self.model.board.ram.map)
    }

    /// Runs until the machine stops or changes its engine. Ends the machine where the guest or the
    /// monitor cannot continue.
    pub(super) fn run(&mut self, board: &Arc<Board>, doorbell: &Doorbell) -> RunLoopEnd {
        self.run_loop(board, doorbell).unwrap_or_else(|error| {
            board.run.finish(error);
            RunLoopEnd::Stopped
        })
    }

    fn run_loop(
        &mut self,
        board: &Arc<Board>,
        doorbell: &Doorbell,
    ) -> Result<RunLoopEnd, KvmError> {
        // The debug registers may come from the other engine.
        self.report_armed();
        if !board.run.engine.can_change()
            && !self.armed.is_empty()
            && !self.hw_breakpoints.is_empty()
        {
            self.model.debug.due = Some(StopReason::Unsupported(Unsupported::GuestBreakpoints));
        }
        self.report_due_stop(board)?;
        if let Some(end) = self.checkpoint(board)? {
            return Ok(self.end_loop(board, end));
        }
        loop {
            board.buses.serve_backlog();
            match self.turn(doorbell)? {
                Turn::Again => {}
                Turn::Sleep => self.sleep(board, doorbell),
                Turn::Emulate => {
                    if self.model.debug.steps() {
                        self.model.debug.due = Some(StopReason::Stepped);
                    }
                    return Ok(RunLoopEnd::Emulate);
                }
                Turn::Crash(cause) if board.run.reset_after(&cause) => {}
                Turn::Crash(cause) if board.run.stops.requested() => {
                    self.crashed = Some(cause.clone());
                    self.model.debug.due = Some(StopReason::Crash(cause));
                }
                Turn::Crash(cause) => {
                    self.finish(board, cause);
                    return Ok(RunLoopEnd::Stopped);
                }
            }
            self.report_due_stop(board)?;
            if doorbell.is_rung() {
                doorbell.answer();
                if let Some(end) = self.checkpoint(board)? {
                    return Ok(self.end_loop(board, end));
                }
                if let Some(cause) = self.crashed.take() {
                    self.finish(board, cause);
                    return Ok(RunLoopEnd::Stopped);
                }
            }
        }
    }

    /// How the loop ends where a checkpoint ends it: a guest that cannot continue does so in no
    /// engine.
    fn end_loop(&mut self, board: &Arc<Board>, end: RunLoopEnd) -> RunLoopEnd {
        match (end, self.crashed.take()) {
            (RunLoopEnd::Change(..), Some(cause)) => {
                self.finish(board, cause);
                RunLoopEnd::Stopped
            }
            (end, _) => end,
        }
    }

    fn finish(&mut self, board: &Arc<Board>, cause: CrashCause) {
        let crash = self.crash(cause);
        board.run.finish(Outcome::Crash(Box::new(crash)));
    }

    /// Reports a stop to the debugger, if one is due, and makes the vCPU wait at its next
    /// checkpoint.
    fn report_due_stop(&mut self, board: &Board) -> Result<(), KvmError> {
        if self.model.debug.due.is_none() {
            return Ok(());
        }
        self.complete()?;
        self.step_start = None;
        if let Some(reason) = self.model.debug.due.take() {
            let (id, state) = (self.model.id, Some(Box::new(self.state()?)));
            board.run.vcpus.hold(id);
            board.run.stops.push(StopReport { id, reason, state });
        }
        Ok(())
    }

    /// Comes to a checkpoint, if one is requested, with the current instruction complete.
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
            let state = CheckpointState {
                ids: id..id + 1,
                engine: Engine::Kvm,
                movable: movable.transpose()?,
            };
            self.unsettled = state.movable == Some(false);
            let serve = &mut |_, request: InspectRequest| request(self);
            return Ok(match control.checkpoint(state, serve) {
                Checkpoint::Again => continue,
                Checkpoint::Run => None,
                Checkpoint::Stop => Some(RunLoopEnd::Stopped),
                Checkpoint::Change(to) => Some(RunLoopEnd::Change(to, since)),
            });
        }
    }

    fn is_movable(&self) -> Result<bool, KvmError> {
        // A vCPU that is not running has no event in delivery.
        Ok(self.activity != Activity::Running || self.fd.is_movable()?)
    }

    /// Delivers events, runs the guest once, serves the exit.
    fn turn(&mut self, doorbell: &Doorbell) -> Result<Turn, KvmError> {
        if !self.deliver_events()? {
            return Ok(Turn::Sleep);
        }
        if doorbell.is_rung() {
            // A ring that came before the kicker was installed, or whose `immediate_exit` was
            // cleared by the completion of an instruction, kicks no thread; and later rings are
            // silent until this one is answered.
            return Ok(Turn::Again);
        }
        self.program_guest_debug()?;
        self.model.record(RecordedKind::Enter);
        let (cr8, exit) = self.fd.run()?;
        self.model.record(RecordedKind::Exit((&exit).into()));
        self.accepts_interrupt = None;
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
                // The next turn serves the ring that was answered here; a requested checkpoint must
                // not be lost with it.
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
        self.check_debug_regs(access)?;
        let trap_flag = self.fd.regs_at_exit().regs.rflags & Rflags::TF.bits() != 0;
        let stepped = access.is_some() && trap_flag;
        if stepped || self.hits != 0 {
            self.trap(stepped)?;
        }
        if trap_flag && !self.monitor_steps() {
            self.arm_single_step();
        }
        Ok(Turn::Again)
    }

    /// Sleeps until the doorbell rings.
    fn sleep(&self, board: &Board, doorbell: &Doorbell) {
        let regs = self.fd.regs_at_exit().regs;
        let waits = self.activity == Activity::WaitForSipi;
        if waits || regs.rflags & Rflags::IF.bits() == 0 {
            board.sleeps_without_interrupts(self.model.id, (!waits).then_some(regs.rip));
        }
        doorbell.sleep(SLEEP_MAX);
        board.run.halts.leave(self.model.id);
    }

    /// HLT was executed. To a debugger that completes a step.
    fn halt(&mut self) {
        self.activity = Activity::Halted;
        if self.model.debug.steps() {
            self.model.debug.due = Some(StopReason::Stepped);
        }
    }

    /// Applies the effect of an MSR write to KVM.
    fn apply(&mut self, index: u32, effect: MsrEffect) -> Result<(), KvmError> {
        self.complete()?;
        let MsrEffect {
            tsc_moved,
            armed,
            mirror,
        } = effect;
        if armed.is_some() {
            // An engine change makes the other vCPUs check as well.
            self.report_armed();
        }
        if tsc_moved {
            self.set_tsc_offset(&self.model.board.clone());
        }
        if let Some(value) = mirror {
            if !self.fd.set_msr(index, value)? {
                static LIMIT: LogLimit = LogLimit::new();
                if let Some(suppressed) = LIMIT.admit() {
                    tracing::warn!(
                        "this KVM refuses {value:#x} for MSR {index:#x}, which the guest wrote\
                         {suppressed}"
                    );
                }
            }
            if index == regs::IA32_APIC_BASE {
                self.cr8 = self.fd.cr8();
            }
        }
        Ok(())
    }

    /// Completes an instruction that an exit left half done, and serves its further exits.
    fn complete(&mut self) -> Result<(), KvmError> {
        while let Some(exit) = self.fd.complete()? {
            let access = ExitAccess::of(&exit);
            match dispatch::serve(exit, &mut self.model) {
                ExitAction::Apply { index, effect } => {
                    while self.fd.complete()?.is_some() {}
                    return self.apply(index, effect);
                }
                ExitAction::Halt => self.halt(),
                // This completes a step.
                ExitAction::Debug { dr6 } => _ = self.debug_exit(dr6)?,
                // Any other result of completing one instruction shows again at the next run.
                ExitAction::Run | ExitAction::Poll | ExitAction::Crash(_) => {}
            }
            self.check_debug_regs(access)?;
        }
        Ok(())
    }

    /// The whole state, with the current instruction complete.
    pub(super) fn state(&mut self) -> Result<CpuState, KvmError> {
        self.complete()?;
        let mut state = CpuState::reset();
        self.fd.store(&mut state)?;
        state.activity = self.activity;
        if self.activity != Activity::Running {
            // Some KVMs keep the shadow of the STI before a HLT, which has ended.
            (state.events.sti_shadow, state.events.mov_ss_shadow) = (false, false);
        }
        let now = self.model.now();
        if let RdmsrOutcome::Value(mask) = self.model.msrs.read(regs::IA32_FMASK, now) {
            state.msrs.fmask = mask;
        }
        Ok(state)
    }

    /// Reports what is armed to the engine switch.
    fn report_armed(&self) {
        let armed = self.model.msrs.armed() | self.armed;
        self.model.board.run.engine.arm(self.model.id, armed);
    }

    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError> {
        // KVM adds the TF of its own single steps to the state that it takes over.
        self.fd.set_guest_debug(&GuestDebug::default())?;
        let board = &self.model.board;
        let apic_base = board.buses.irq.apic_base(self.model.id);
        let intercepts_mov_dr = board.run.engine.intercepts_mov_dr();
        self.fd.load(state, apic_base)?;
        self.activity = state.activity;
        self.guest_debug_regs = GuestDebugRegs::new(intercepts_mov_dr, state.dr7);
        self.armed = Armed::from_dr7(state.dr7, state.cr4);
        let events = &state.events;
        let open = !events.sti_shadow && !events.mov_ss_shadow && events.interrupt.is_none();
        self.accepts_interrupt = Some(open && state.rflags & Rflags::IF.bits() != 0);
        Ok(())
    }

    /// Returns the vCPU's exits. KVM counts nothing else.
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
        let hint = "--engine interp shows the exceptions that led to it";
        Crash::new(id, cause, state, &self.model.board.ram.map).after(vec![hint.to_owned()])
    }
}

/// The breakpoints for a debugger's stops. Stops that KVM cannot do change the engine before the
/// guest runs.
fn breakpoints_of(stops: &StopConditions) -> HwBreakpoints {
    HwBreakpoints::new(stops).unwrap_or_default()
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
        self.hw_breakpoints = breakpoints_of(stops);
    }

    fn write_msr(&mut self, index: u32, value: u64) -> Result<bool, KvmError> {
        let effect = match self.model.wrmsr(index, value) {
            WrmsrOutcome::Done(effect) => effect,
            WrmsrOutcome::Apic => match self.model.wrmsr_apic(index, value) {
                Ok(effect) => effect,
                Err(GpFault) => return Ok(false),
            },
            WrmsrOutcome::Processor | WrmsrOutcome::Fault | WrmsrOutcome::Unclaimed => {
                return Ok(false);
            }
        };
        self.apply(index, effect).map(|()| true)
    }

    fn was_reset(&mut self) -> Result<(), KvmError> {
        self.fd.set_msrs(self.model.msrs.mirrored())?;
        (self.cr8, self.tsc_base) = (0, None);
        self.fd.set_cr8(self.cr8);
        self.hits = 0;
        self.report_armed();
        Ok(())
    }

    /// KVM decodes guest code anew by itself.
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
