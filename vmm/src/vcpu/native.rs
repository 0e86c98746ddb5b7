//! The native way to run: the loop round KVM_RUN.

use std::sync::Arc;
use std::time::Duration;

use hindsight_cpu::msr::Effect;
use hindsight_cpu::state::{Activity, CpuState};
use hindsight_devices::irq::Pending;
use hindsight_interp::Stops;
use hindsight_regs::msr as regs;

use super::attend::{Attended, Plan, Request};
use super::control::{Checkpoint, Doorbell};
use super::dispatch::{self, CrashCause, Next};
use super::guard::LoopGuard;
use super::mode::Engine;
use super::models::Models;
use super::record::{Recorder, What};
use super::report::{Crash, LastState};
use super::stats::VcpuStats;
use crate::kvm::KvmError;
use crate::kvm::kick::Kicker;
use crate::kvm::vcpu::KvmVcpu;
use crate::machine::{Board, Outcome};

/// A processor that runs under KVM.
#[derive(Debug)]
pub struct NativeVcpu {
    kvm: KvmVcpu,
    models: Models,
    activity: Activity,
    /// What KVM has as CR8.
    cr8: u64,
    /// An interrupt was injected since the last exit: KVM takes no second one.
    injected: bool,
    /// The clock's base that KVM's TSC offset was computed from.
    tsc_base: Option<u64>,
}

/// How a turn of the run loop ended.
enum Turn {
    Again,
    /// Sleeps first, with nothing locked.
    Sleep,
    Crash(CrashCause),
}

impl NativeVcpu {
    /// A processor in `state`, which KVM now holds.
    ///
    /// # Errors
    ///
    /// When KVM refuses the state.
    pub fn new(mut kvm: KvmVcpu, models: Models, state: &CpuState) -> Result<Self, KvmError> {
        kvm.load(state, models.board.irq.apic_base(models.id))?;
        for (index, value) in models.msrs.mirrored() {
            // A KVM without the MSR needs no copy of it; the model answers all accesses.
            let _ = kvm.set_msr(index, value)?;
        }
        let activity = state.activity;
        Ok(Self {
            kvm,
            models,
            activity,
            cr8: state.cr8,
            injected: false,
            tsc_base: None,
        })
    }

    /// Has everything that happens to this processor kept.
    pub fn set_recorder(&mut self, recorder: Arc<Recorder>) {
        self.models.recorder = Some(recorder);
    }

    /// Runs until the machine stops. Gives the state it stopped in where the board asks for it.
    pub fn thread(mut self, board: &Arc<Board>) -> Option<LastState> {
        // Dropped before `self`: the kicker points into it.
        let guard = LoopGuard {
            id: self.models.id,
            board,
        };
        let doorbell = board.control.doorbell(self.models.id);
        doorbell.set_kicker(Some(Kicker::of_this_thread(&mut self.kvm)));
        if self.checkpoint(board) == Checkpoint::Run {
            self.run(board, doorbell);
        }
        drop(guard);
        board.add_stats(VcpuStats {
            cpu: self.models.id,
            exits: self.models.exits,
            interpreter: None,
        });
        board.wants_last_state().then(|| self.last_state())
    }

    /// What a user wants to know of a guest that did not end by itself.
    fn last_state(&mut self) -> LastState {
        let id = self.models.id;
        let state = self.state().unwrap_or_else(|_| CpuState::reset());
        LastState::new(id, state, &self.models.board.memory)
    }

    fn run(&mut self, board: &Arc<Board>, doorbell: &Doorbell) {
        loop {
            match self.turn(doorbell) {
                Ok(Turn::Again) => {}
                Ok(Turn::Sleep) => doorbell.sleep(Duration::from_secs(3600)),
                Ok(Turn::Crash(cause)) => {
                    let crash = self.crash(cause);
                    return board.finish(Outcome::Crash(Box::new(crash)));
                }
                Err(error) => return board.finish(Outcome::failed(error)),
            }
            if doorbell.is_rung() {
                doorbell.answer();
                let id = self.models.id;
                if board.control.wants_checkpoint(id..id + 1) {
                    if let Err(error) = self.complete() {
                        return board.finish(Outcome::failed(error));
                    }
                    if self.checkpoint(board) == Checkpoint::Stop {
                        return;
                    }
                }
            }
        }
    }

    /// Waits out a pause, serving requests.
    fn checkpoint(&mut self, board: &Board) -> Checkpoint {
        let id = self.models.id;
        let serve = &mut |_, request: Request| request(self);
        board.control.checkpoint(id..id + 1, serve)
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
        self.models.record(What::Enter);
        let (cr8, exit) = self.kvm.run()?;
        self.models.record(What::Exit((&exit).into()));
        if cr8 != self.cr8 {
            self.cr8 = cr8;
            self.models.board.irq.set_cr8(self.models.id, cr8);
        }
        tracing::trace!(target: "exit", "cpu {} {exit:x?}", self.models.id);
        let next = dispatch::serve(exit, &mut self.models);
        self.injected = false;
        match next {
            Next::Run => {}
            Next::Look => {
                doorbell.answer();
                // A ring that was taken here is served by the look round that follows; a wish to
                // pause must not get lost with it.
                let id = self.models.id;
                if self.models.board.control.wants_checkpoint(id..id + 1) {
                    doorbell.ring();
                }
            }
            Next::Halt => self.activity = Activity::Halted,
            Next::Apply { index, effect } => self.apply(index, effect)?,
            Next::Crash(cause) => return Ok(Turn::Crash(cause)),
        }
        Ok(Turn::Again)
    }

    /// Brings events to the processor. `false`: it has nothing to run and sleeps.
    fn prepare(&mut self) -> Result<bool, KvmError> {
        let (id, board) = (self.models.id, self.models.board.clone());
        let irq = &board.irq;
        self.follow_clock(&board);
        let pending = irq.pending(id);
        if pending.init && irq.take_init(id) {
            self.init()?;
        }
        if let Some(vector) = pending.sipi.and_then(|_| irq.take_sipi(id)) {
            self.start_up(vector)?;
        }
        if self.activity == Activity::WaitForSipi {
            board.window_wanted(id, false);
            return Ok(false);
        }
        if pending.nmi && irq.take_nmi(id) {
            tracing::trace!(target: "irq", "cpu {id} NMI");
            self.kvm.nmi()?;
            self.activity = Activity::Running;
        }
        self.offer_interrupt(pending, &board)?;
        let cr8 = irq.cr8(id);
        if cr8 != self.cr8 {
            self.cr8 = cr8;
            self.kvm.set_cr8(cr8);
        }
        Ok(self.activity == Activity::Running)
    }

    fn offer_interrupt(&mut self, pending: Pending, board: &Board) -> Result<(), KvmError> {
        let (id, waiting) = (self.models.id, pending.interrupt);
        let mut window = false;
        if waiting && !self.injected && self.kvm.ready_for_interrupt() {
            // An instruction that is half done may still fault, and its handler may run with
            // interrupts off: complete it, which also tells anew whether KVM takes an interrupt.
            self.complete()?;
        }
        if waiting && !self.injected && self.kvm.ready_for_interrupt() {
            if let Some(vector) = board.irq.acknowledge(id) {
                tracing::trace!(target: "irq", "cpu {id} interrupt {vector:#x}");
                self.models.record(What::Interrupt { vector });
                self.kvm.interrupt(vector)?;
                self.injected = true;
                self.activity = Activity::Running;
            }
            window = board.irq.pending(id).interrupt;
        } else if waiting {
            window = true;
        }
        // A halted processor opens no window: where it cannot be interrupted now, it never can.
        let runs = self.activity == Activity::Running;
        self.kvm.request_interrupt_window(window && runs);
        // Some KVMs do not tell when CR8 is lowered either.
        board.window_wanted(id, runs && (window || pending.held));
        Ok(())
    }

    /// The machine's clock starts and is paused: KVM's TSC offset follows.
    fn follow_clock(&mut self, board: &Board) {
        let base = board.clock.host_base();
        if base != self.tsc_base {
            self.tsc_base = base;
            self.set_native_tsc(board);
        }
    }

    fn set_native_tsc(&self, board: &Board) {
        let Some(base) = board.clock.host_base() else {
            return;
        };
        let offset = self.models.msrs.tsc().offset().wrapping_sub(base);
        if let Err(error) = self.kvm.set_tsc_offset(offset) {
            tracing::debug!("cpu {}: {error}", self.models.id);
        }
    }

    fn apply(&mut self, index: u32, effect: Effect) -> Result<(), KvmError> {
        self.complete()?;
        match effect {
            Effect::None | Effect::Armed => {}
            Effect::TscMoved => self.set_native_tsc(&self.models.board),
            Effect::Mirror(value) => {
                if !self.kvm.set_msr(index, value)? {
                    tracing::debug!("this KVM does not take {value:#x} for MSR {index:#x}");
                }
                if index == regs::IA32_APIC_BASE {
                    self.cr8 = self.kvm.cr8();
                }
            }
        }
        Ok(())
    }

    /// Completes an instruction that an exit left half done, serving what it still does.
    fn complete(&mut self) -> Result<(), KvmError> {
        while let Some(exit) = self.kvm.complete()? {
            match dispatch::serve(exit, &mut self.models) {
                Next::Apply { index, effect } => {
                    while self.kvm.complete()?.is_some() {}
                    return self.apply(index, effect);
                }
                Next::Halt => self.activity = Activity::Halted,
                // What else can come of completing one instruction shows again at the next run.
                Next::Run | Next::Look | Next::Crash(_) => {}
            }
        }
        Ok(())
    }

    fn state(&mut self) -> Result<CpuState, KvmError> {
        self.complete()?;
        let mut state = CpuState::reset();
        self.kvm.store(&mut state)?;
        state.activity = self.activity;
        Ok(state)
    }

    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError> {
        self.kvm
            .load(state, self.models.board.irq.apic_base(self.models.id))?;
        self.activity = state.activity;
        self.injected = true;
        Ok(())
    }

    /// INIT: the boot processor starts again at the reset vector, the others wait for SIPI.
    fn init(&mut self) -> Result<(), KvmError> {
        tracing::trace!(target: "irq", "cpu {} INIT", self.models.id);
        let mut state = self.state()?;
        state.init();
        state.activity = if self.models.id == 0 {
            Activity::Running
        } else {
            Activity::WaitForSipi
        };
        self.models.msrs.init();
        self.set_state(&state)
    }

    fn start_up(&mut self, vector: u8) -> Result<(), KvmError> {
        if self.activity != Activity::WaitForSipi {
            return Ok(());
        }
        tracing::trace!(target: "irq", "cpu {} SIPI {vector:#x}", self.models.id);
        let mut state = self.state()?;
        state.start_up(vector);
        self.set_state(&state)
    }

    fn crash(&mut self, cause: CrashCause) -> Crash {
        let id = self.models.id;
        let state = self.state().unwrap_or_else(|_| CpuState::reset());
        Crash::new(id, cause, state, &self.models.board.memory)
    }
}

impl Attended for NativeVcpu {
    fn engine(&self) -> Engine {
        Engine::Kvm
    }

    fn state(&mut self) -> Result<CpuState, KvmError> {
        NativeVcpu::state(self)
    }

    fn set_state(&mut self, state: &CpuState) -> Result<(), KvmError> {
        NativeVcpu::set_state(self, state)
    }

    fn models(&mut self) -> &mut Models {
        &mut self.models
    }

    fn set_plan(&mut self, _: Plan) {}

    fn set_stops(&mut self, stops: &Stops) -> Result<bool, KvmError> {
        Ok(*stops == Stops::default())
    }

    fn retired(&self) -> Option<u64> {
        None
    }
}
