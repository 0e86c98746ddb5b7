//! A vCPU that runs in the interpreter, and its run loop.

mod deliveries;
mod host_random;
mod platform;
mod process_stops;
pub(crate) mod run_log;

use std::sync::Arc;
use std::time::{Duration, Instant};

use hindsight_cpu::armed::Armed;
use hindsight_cpu::state::{Activity, CpuState, seg};
use hindsight_cpu::stops::StopConditions;
use hindsight_interp::{Exit, Memory, MsrHandler, Vcpu};

use crate::kvm::KvmError;
use crate::vcpu::board::Board;
use crate::vcpu::crash::{Crash, CrashCause, FinalState};
use crate::vcpu::debug::inspect::{InspectRequest, PausedVcpu};
use crate::vcpu::debug::stop::{ResumeAction, StopReason, StopReport};
use crate::vcpu::engine::policy::Engine;
use crate::vcpu::model::VcpuModel;
use crate::vcpu::recorder::ExitKind;
use crate::vcpu::run_control::{Checkpoint, CheckpointState, Doorbell, Outcome, RunLoopEnd};
use crate::vcpu::stats::VcpuStats;
use platform::InterpPlatform;

/// Maximum number of instructions before the run loop checks the doorbell again.
const BUDGET: u64 = 1 << 24;

/// A vCPU that runs in the interpreter.
#[derive(Debug)]
pub struct InterpVcpu {
    pub(crate) vcpu: Vcpu,
    pub(crate) platform: InterpPlatform,
    /// The armed facilities that were last reported to the machine; `None` before the first report.
    armed: Option<Armed>,
    /// The machine waits to change engines until this vCPU reaches a clean instruction boundary.
    unsettled: bool,
    /// Why the guest cannot continue, while a debugger inspects it.
    pub(crate) crashed: Option<CrashCause>,
}

impl InterpVcpu {
    /// A vCPU in `state`.
    pub fn new(memory: Arc<Memory>, model: VcpuModel, state: &CpuState) -> Self {
        Self::from_parts(Vcpu::new(memory), model, state)
    }

    /// A vCPU in `state`, in an interpreter that has run before.
    pub fn from_parts(mut vcpu: Vcpu, mut model: VcpuModel, state: &CpuState) -> Self {
        vcpu.load(state);
        vcpu.take_flushed();
        vcpu.set_stops(&model.debug.stops);
        let bytes = usize::try_from(model.translation.memory).unwrap_or(usize::MAX);
        vcpu.set_translation(model.translation.after.runs(), bytes);
        if state.activity == Activity::Running {
            model.wake();
        }
        Self {
            vcpu,
            platform: InterpPlatform::new(model),
            armed: None,
            unsettled: false,
            crashed: None,
        }
    }

    /// Splits the vCPU into its interpreter and its models.
    pub fn into_parts(self) -> (Vcpu, VcpuModel) {
        (self.vcpu, self.platform.model)
    }

    /// The number of the vCPU.
    pub const fn id(&self) -> usize {
        self.platform.model.id
    }

    pub(crate) const fn model_mut(&mut self) -> &mut VcpuModel {
        &mut self.platform.model
    }

    /// Runs until the machine stops or changes its engine. Ends the machine if the guest cannot
    /// continue and no debugger holds it.
    pub(crate) fn run(&mut self, board: &Arc<Board>, doorbell: &Doorbell) -> RunLoopEnd {
        if let Some(ended) = self.checkpoint(board) {
            return ended;
        }
        loop {
            board.buses.serve_backlog();
            self.start_signals();
            let exit = match self.platform.model.debug.action {
                // An interrupt shadow or a pending trap ends with the next instruction, unless that
                // instruction begins another.
                ResumeAction::Run if self.unsettled => self.run_tracked(1),
                ResumeAction::Run | ResumeAction::StepBack { .. } | ResumeAction::RunBack => {
                    self.run_tracked(BUDGET)
                }
                ResumeAction::Step {
                    mask_interrupts, ..
                } => self.vcpu.step(&mut self.platform, mask_interrupts),
            };
            match exit {
                Exit::Budget | Exit::Kicked | Exit::Leave => {}
                Exit::Halted => self.sleep(board, doorbell),
                exit => {
                    if let Some(stop) = self.why_stopped(&exit)
                        && !self.report(board, stop)
                    {
                        return RunLoopEnd::Stopped;
                    }
                }
            }
            self.report_armed();
            if doorbell.is_rung() || self.unsettled {
                doorbell.answer();
                if let Some(ended) = self.checkpoint(board) {
                    return ended;
                }
                if let Some(cause) = self.crashed.take() {
                    self.crash(board, cause);
                    return RunLoopEnd::Stopped;
                }
            }
        }
    }

    /// Sleeps until the doorbell rings.
    fn sleep(&mut self, board: &Board, doorbell: &Doorbell) {
        let id = self.id();
        if !self.vcpu.interrupts_enabled() {
            let halted = self.state().activity != Activity::WaitForSipi;
            board.sleeps_without_interrupts(id, halted.then(|| self.vcpu.rip()));
        }
        self.platform.served(ExitKind::Halt, |model| {
            model.halt();
            doorbell.sleep(Duration::from_secs(3600));
        });
        board.run.halts.leave(id);
    }

    /// Executes one instruction and delivers the events that it raises. If an INIT or a start-up
    /// IPI is pending, it may return earlier, with that event still pending.
    pub(crate) fn run_one(&mut self, board: &Arc<Board>) {
        loop {
            let exit = self.vcpu.step(&mut self.platform, true);
            if let Some(StopReason::Crash(cause)) = self.why_stopped(&exit) {
                if board.run.reset_after(&cause) {
                    return;
                }
                self.crash(board, cause);
                return;
            }
            if exit != Exit::Stepped || self.vcpu.at_clean_boundary() {
                return;
            }
        }
    }

    /// The stop to report to a debugger for an exit; `None` if the vCPU continues.
    fn why_stopped(&mut self, exit: &Exit) -> Option<StopReason> {
        match exit {
            Exit::Budget | Exit::Kicked | Exit::Leave | Exit::Halted => None,
            Exit::Shutdown => Some(StopReason::Crash(CrashCause::TripleFault)),
            Exit::Missing { bytes, .. } => {
                Some(StopReason::Crash(CrashCause::Missing(bytes.to_vec())))
            }
            Exit::Stop(hit) => Some(StopReason::Hit(*hit)),
            Exit::Stepped => {
                let at = self.vcpu.code_address();
                (!self.platform.model.debug.in_range(at)).then_some(StopReason::Stepped)
            }
        }
    }

    /// Reports a stop to the debugger, and holds the vCPU at its next checkpoint. Returns `false`
    /// if the guest cannot continue and there is no debugger.
    fn report(&mut self, board: &Arc<Board>, stop: StopReason) -> bool {
        if let StopReason::Crash(cause) = &stop {
            if board.run.reset_after(cause) {
                return true;
            }
            if !board.run.stops.requested() {
                self.crash(board, cause.clone());
                return false;
            }
            self.crashed = Some(cause.clone());
        }
        let id = self.platform.model.id;
        board.run.vcpus.hold(id);
        let state = PausedVcpu::state(self).ok().map(Box::new);
        board.run.stops.push(StopReport {
            id,
            reason: stop,
            state,
        });
        true
    }

    /// Reports the armed facilities to the machine if they have changed. MSR writes, debug
    /// exceptions and the debug registers change them.
    fn report_armed(&mut self) {
        let mut armed = self.platform.model.msrs.armed() | self.vcpu.armed();
        // The handler of a single-step trap runs with RFLAGS.TF clear.
        if self.platform.take_debug_exception() {
            armed |= Armed::SINGLE_STEP;
        }
        if self.armed != Some(armed) {
            self.armed = Some(armed);
            let model = &self.platform.model;
            model.board.run.engine.arm(model.id, armed);
        }
    }

    /// Stops at a checkpoint if one is requested. Returns how the run loop ends, if it does.
    fn checkpoint(&mut self, board: &Board) -> Option<RunLoopEnd> {
        let (id, control) = (self.platform.model.id, &board.run.vcpus);
        self.unsettled = false;
        if !control.checkpoint_requested(id..id + 1) {
            return None;
        }
        let since = Instant::now();
        // Reported first: an armed facility may require the machine to stay in the interpreter.
        self.report_armed();
        loop {
            let movable = control
                .switch_requested()
                .then(|| self.vcpu.at_clean_boundary());
            let state = CheckpointState {
                ids: id..id + 1,
                engine: Engine::Interp,
                movable,
            };
            self.unsettled = movable == Some(false);
            let serve = &mut |_, request: InspectRequest| request(self);
            return match control.checkpoint(state, serve) {
                Checkpoint::Again => continue,
                Checkpoint::Run => None,
                Checkpoint::Stop => Some(RunLoopEnd::Stopped),
                Checkpoint::Change(to) => Some(RunLoopEnd::Change(to, since)),
            };
        }
    }

    pub(crate) fn final_state(&mut self, board: &Board) -> FinalState {
        let state = self.state();
        FinalState::new(self.platform.model.id, state, &board.ram.map)
    }

    pub(crate) fn stats(&self) -> VcpuStats {
        VcpuStats {
            cpu: self.platform.model.id,
            exits: self.platform.model.exits,
            interpreter: Some(self.vcpu.stats()),
            mix: self.vcpu.mix(),
        }
    }

    /// Delivers a pending INIT or start-up IPI.
    pub(crate) fn start_signals(&mut self) {
        let (id, board) = (self.platform.model.id, self.platform.model.board.clone());
        let pending = board.buses.irq.pending(id);
        // INIT waits for the end of system-management mode.
        if pending.init && !self.platform.model.msrs.in_smm() && board.buses.irq.take_init(id) {
            let mut state = self.state();
            state.init();
            if id != 0 {
                state.activity = Activity::WaitForSipi;
            }
            self.platform.model.wake();
            self.platform.model.msrs.init();
            self.vcpu.load(&state);
        }
        if let Some(vector) = pending.sipi.and_then(|_| board.buses.irq.take_sipi(id)) {
            let mut state = self.state();
            if state.activity == Activity::WaitForSipi {
                state.start_up(vector);
                if let Some(history) = &mut self.platform.model.history {
                    history.restart(state.seg[seg::CS].base);
                }
                if let Some(tracer) = &mut self.platform.model.tracer {
                    tracer.restart(state.seg[seg::CS].base);
                }
                self.platform.model.wake();
                self.vcpu.load(&state);
            }
        }
    }

    pub(crate) fn state(&mut self) -> CpuState {
        let mut state = CpuState::reset();
        self.vcpu.store(&mut state);
        state
    }

    pub(crate) fn crash(&mut self, board: &Arc<Board>, cause: CrashCause) {
        let state = self.state();
        let crash = Crash::new(self.platform.model.id, cause, state, &board.ram.map);
        let crash = crash.after(self.platform.deliveries.chain());
        board.run.finish(Outcome::Crash(Box::new(crash)));
    }
}

impl PausedVcpu for InterpVcpu {
    fn engine(&self) -> Engine {
        Engine::Interp
    }

    fn state(&mut self) -> Result<CpuState, KvmError> {
        let mut state = InterpVcpu::state(self);
        state.cr8 = self
            .platform
            .model
            .board
            .buses
            .irq
            .cr8(self.platform.model.id);
        Ok(state)
    }

    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError> {
        let model = &self.platform.model;
        model.board.buses.irq.set_cr8(model.id, state.cr8);
        self.vcpu.load(state);
        Ok(())
    }

    fn model(&mut self) -> &mut VcpuModel {
        &mut self.platform.model
    }

    fn set_resume_action(&mut self, action: ResumeAction) {
        self.platform.model.debug.action = action;
    }

    fn set_stops(&mut self, stops: &StopConditions) {
        self.vcpu.set_stops(stops);
        self.platform.model.debug.stops.clone_from(stops);
    }

    fn write_msr(&mut self, index: u32, value: u64) -> Result<bool, KvmError> {
        let done = MsrHandler::wrmsr(&mut self.platform, index, value).is_ok();
        // Reloading the state recomputes what the interpreter derives from MSRs.
        let state = InterpVcpu::state(self);
        self.vcpu.load(&state);
        Ok(done)
    }

    fn memory_written(&mut self, at: u64, len: u64) {
        self.vcpu.code_changed(at, len);
    }

    fn go_to(&mut self, _: u64) -> Option<bool> {
        None
    }

    fn retired(&self) -> Option<u64> {
        Some(self.vcpu.stats().retired)
    }

    fn stats(&mut self) -> VcpuStats {
        InterpVcpu::stats(self)
    }
}
