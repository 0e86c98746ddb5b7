//! A vCPU's thread: runs it in one engine until the machine changes engines or stops.

use std::sync::Arc;

use hindsight_interp::Vcpu as Interp;
use hindsight_trace::VcpuTracer;

use super::board::Board;
use super::branch_history::{BranchHistory, RecordOptions};
use super::crash::FinalState;
use super::engine::Engine;
use super::interp::InterpVcpu;
use super::kernel_function::KernelFunction;
use super::kvm::KvmVcpu;
use super::loop_guard::LoopGuard;
use super::model::VcpuModel;
use super::process_tracker::ProcessTracker;
use super::recorder::Recorder;
use super::run_control::{Doorbell, Kick, RunError, RunLoopEnd};
use super::run_counter::RunCounter;
use super::stats::VcpuStats;
use crate::kvm::kick::KvmKicker;
use crate::kvm::vcpu::KvmVcpuFd;

/// A vCPU of a machine in one engine. It keeps the other engine's object, if there is one.
#[derive(Debug)]
pub struct MachineVcpu {
    id: usize,
    engine: EngineVcpu,
}

#[derive(Debug)]
enum EngineVcpu {
    /// The interpreter is created when it is first needed.
    Kvm(Box<KvmVcpu>, Option<Box<Interp>>),
    /// There is a KVM vCPU if the machine started in KVM.
    Interp(Box<InterpVcpu>, Option<Box<KvmVcpuFd>>),
}

impl From<KvmVcpu> for MachineVcpu {
    fn from(vcpu: KvmVcpu) -> Self {
        Self {
            id: vcpu.id(),
            engine: EngineVcpu::Kvm(Box::new(vcpu), None),
        }
    }
}

impl From<InterpVcpu> for MachineVcpu {
    fn from(vcpu: InterpVcpu) -> Self {
        Self {
            id: vcpu.id(),
            engine: EngineVcpu::Interp(Box::new(vcpu), None),
        }
    }
}

impl MachineVcpu {
    /// The vCPU, if it runs in the interpreter.
    pub fn into_interp(self) -> Option<InterpVcpu> {
        match self.engine {
            EngineVcpu::Interp(vcpu, _) => Some(*vcpu),
            EngineVcpu::Kvm(..) => None,
        }
    }

    /// Records all events of this vCPU from now on.
    pub fn set_recorder(&mut self, recorder: Arc<Recorder>) {
        self.engine.model_mut().recorder = Some(recorder);
    }

    /// Records the vCPU's branches from now on, while it runs in the interpreter.
    ///
    /// The vCPU is at RIP `start` in a code segment with the base `base`. If there is a function of the
    /// guest's kernel in `stop`, the recording ends there.
    pub fn record_branches(
        &mut self,
        options: RecordOptions,
        stop: Option<Arc<KernelFunction>>,
        (start, base): (u64, u64),
    ) {
        let model = self.engine.model_mut();
        let history = BranchHistory::with_options(options, start, base);
        model.history = Some(Box::new(history));
        model.record_stop = stop;
        model.recorded_from_start = true;
    }

    /// Traces the vCPU's events with `tracer` from now on. `base` is the base of CS.
    ///
    /// With `processes`, what a Linux guest runs is traced too; the vCPU is in the interpreter.
    pub fn set_tracer(
        &mut self,
        mut tracer: VcpuTracer,
        base: u64,
        processes: Option<Arc<ProcessTracker>>,
    ) {
        tracer.restart(base);
        self.engine.model_mut().tracer = Some(Box::new(tracer));
        if let (Some(tracker), EngineVcpu::Interp(vcpu, _)) = (processes, &mut self.engine) {
            vcpu.track_processes(tracker);
        }
    }

    /// Counts the vCPU's events with `counter` from now on.
    pub fn set_counter(&mut self, counter: RunCounter) {
        self.engine.model_mut().counter = Some(Box::new(counter));
    }

    /// Runs until the machine stops. Returns the final state if the machine requests it.
    pub fn run(mut self, board: &Arc<Board>) -> Option<FinalState> {
        let id = self.id;
        let guard = LoopGuard { id, board };
        let doorbell = board.run.vcpus.doorbell(id);
        self.engine.set_kicker(doorbell);
        loop {
            let (end, from) = (self.engine.run(board, doorbell), self.engine.kind());
            doorbell.set_kicker(None);
            let moved = match end {
                RunLoopEnd::Stopped => break,
                RunLoopEnd::Change(..) => self.engine.change(board),
                RunLoopEnd::Emulate => self.engine.emulate(board, doorbell),
            };
            match moved {
                Ok(engine) => self.engine = engine,
                Err(error) => {
                    board.run.finish(error);
                    return None;
                }
            }
            self.engine.set_kicker(doorbell);
            if let RunLoopEnd::Change(to, since) = end {
                let took = since.elapsed();
                board.run.engine.count_change(id, from, to, took);
            }
        }
        drop(guard);
        board.run.add_stats(self.engine.stats());
        let requested = board.run.final_states_requested();
        requested.then(|| self.engine.final_state(board))
    }
}

impl Kick for KvmKicker {
    fn kick(&self) {
        KvmKicker::kick(self);
    }

    fn clear(&self) {
        KvmKicker::clear(self);
    }
}

impl EngineVcpu {
    const fn kind(&self) -> Engine {
        match self {
            Self::Kvm(..) => Engine::Kvm,
            Self::Interp(..) => Engine::Interp,
        }
    }

    const fn model_mut(&mut self) -> &mut VcpuModel {
        match self {
            Self::Kvm(vcpu, _) => vcpu.model_mut(),
            Self::Interp(vcpu, _) => vcpu.model_mut(),
        }
    }

    /// Lets the doorbell kick the thread out of KVM_RUN. The interpreter polls the doorbell.
    fn set_kicker(&mut self, doorbell: &Doorbell) {
        if let Self::Kvm(vcpu, _) = self {
            let kicker = KvmKicker::of_this_thread(vcpu.fd_mut());
            doorbell.set_kicker(Some(Box::new(kicker)));
        }
    }

    fn run(&mut self, board: &Arc<Board>, doorbell: &Doorbell) -> RunLoopEnd {
        match self {
            Self::Kvm(vcpu, _) => vcpu.run(board, doorbell),
            Self::Interp(vcpu, _) => vcpu.run(board, doorbell),
        }
    }

    /// Moves the state into the other engine.
    fn change(self, board: &Board) -> Result<Self, RunError> {
        match self {
            Self::Kvm(mut vcpu, idle) => {
                let state = vcpu.state()?;
                let (fd, model) = vcpu.into_parts();
                let mut interpreter = match idle {
                    Some(interpreter) => interpreter,
                    None => Box::new(Interp::new(board.ram.for_interpreters()?)),
                };
                // The guest's writes to code under KVM were not observed.
                interpreter.distrust_code();
                let vcpu = InterpVcpu::from_parts(*interpreter, model, &state);
                Ok(Self::Interp(Box::new(vcpu), Some(Box::new(fd))))
            }
            Self::Interp(mut vcpu, Some(mut fd)) => {
                let mut state = vcpu.state();
                let (mut interpreter, model) = vcpu.into_parts();
                state.cr8 = board.buses.irq.cr8(model.id);
                if interpreter.take_flushed() {
                    fd.flush_tlb_on_load();
                }
                let vcpu = KvmVcpu::new(*fd, model, &state)?;
                Ok(Self::Kvm(Box::new(vcpu), Some(Box::new(interpreter))))
            }
            // A machine without a policy never requests a change.
            same @ Self::Interp(_, None) => Ok(same),
        }
    }

    /// Executes one instruction in the interpreter while the other vCPUs continue under KVM. The
    /// instruction affects nothing but its own vCPU.
    fn emulate(self, board: &Arc<Board>, doorbell: &Doorbell) -> Result<Self, RunError> {
        let mut engine = self.change(board)?;
        if let Self::Interp(vcpu, _) = &mut engine {
            // A ring is for the KVM loop, which continues soon.
            let rung = doorbell.answer();
            vcpu.run_one(board);
            if rung {
                doorbell.ring();
            }
        }
        engine.change(board)
    }

    fn stats(&self) -> VcpuStats {
        match self {
            Self::Kvm(vcpu, idle) => VcpuStats {
                interpreter: idle.as_ref().map(|idle| idle.stats()),
                mix: idle.as_ref().map(|idle| idle.mix()).unwrap_or_default(),
                ..vcpu.stats()
            },
            Self::Interp(vcpu, _) => vcpu.stats(),
        }
    }

    fn final_state(&mut self, board: &Board) -> FinalState {
        match self {
            Self::Kvm(vcpu, _) => vcpu.final_state(),
            Self::Interp(vcpu, _) => vcpu.final_state(board),
        }
    }
}
