//! Deterministic mode: one thread runs all processors in turn, on a clock that only they move.
//!
//! One retired instruction is one tick of the clock. A turn is a fixed number of instructions; it
//! is cut short only by a halt, and interrupted where a timer is due, so that a timer fires at its
//! instruction. When all processors are halted, the clock jumps to the next timer. Nothing in here
//! may depend on the host's time or on another thread, except for the end of the run, and for input
//! that is written to a log.
//!
//! [`DeterministicMachine`] is such a machine in its owner's hands; `hindsight run` gives one to a thread.

mod checkpoints;
mod debug;
pub mod input_log;
mod outside;
mod reverse;
mod save;
mod turn;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hindsight_cpu::branch::Branch;
use hindsight_cpu::state::CpuState;
use hindsight_cpu::stops::{StopConditions, StopHit};
use xxhash_rust::xxh3::Xxh3;

pub use checkpoints::{CheckpointLimits, Timeline};
use input_log::InputFeed;
use turn::Turn;

use crate::state::{MemoryKeeper, RestoreError, Schedule};
use crate::vcpu::board::Board;
use crate::vcpu::crash::FinalState;
use crate::vcpu::engine::policy::Engine;
use crate::vcpu::interp::InterpVcpu;
use crate::vcpu::loop_guard::LoopGuard;
use crate::vcpu::run_control::Outcome;
use crate::vcpu::run_control::{Checkpoint, CheckpointState};

/// Ticks of the virtual clock that count as one second: a tick is a nanosecond.
pub const TSC_HZ: u64 = 1_000_000_000;

/// Instructions of a turn.
pub const QUANTUM: u64 = 10_000;

/// What the real-time clock shows at the start: 2000-01-01, in seconds since 1970.
pub const RTC_EPOCH: i64 = 946_684_800;

/// Why [`DeterministicMachine::run_to`] came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStop {
    /// The machine is where it was to go.
    Reached,
    /// The run is over before that; [`DeterministicMachine::take_outcome`] says how.
    Ended,
    /// A processor reached what [`DeterministicMachine::set_stops`] asks for.
    Hit {
        /// Which.
        cpu: usize,
        /// What.
        hit: StopHit,
    },
    /// An exception was delivered after [`DeterministicMachine::stop_at_exceptions`].
    Delivered {
        /// To which processor.
        cpu: usize,
    },
    /// The guest cannot go on, and a debugger looks at that.
    Crashed {
        /// Which processor.
        cpu: usize,
    },
    /// The guest has ended the run, and a debugger holds that: nothing comes after this place.
    AtEnd,
    /// [`Breaker::stop`] was called, or a debugger pauses the machine. It can go on.
    Interrupted,
}

/// Stops a [`DeterministicMachine::run_to`] from another thread.
#[derive(Clone, Debug, Default)]
pub struct Breaker(Arc<AtomicBool>);

impl Breaker {
    /// The run in progress, or the next one, comes back within some ten thousand instructions.
    pub fn stop(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn take(&self) -> bool {
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::SeqCst)
    }
}

/// A deterministic machine that its owner runs, saves and sets back.
///
/// A place is the number of instructions that all processors together have retired since the
/// machine's beginning. One thread runs them in turn, so places are in order of time, and the same
/// place is the same state in every run.
#[derive(Debug)]
pub struct DeterministicMachine {
    vcpus: Vec<InterpVcpu>,
    board: Arc<Board>,
    memory: Option<MemoryKeeper>,
    schedule: Schedule,
    feed: InputFeed,
    breaker: Breaker,
}

impl DeterministicMachine {
    /// The machine of these processors, all made by [`InterpVcpu::determine`].
    pub(crate) fn new(vcpus: Vec<InterpVcpu>, board: Arc<Board>, feed: InputFeed) -> Self {
        let memory = vcpus
            .first()
            .map(|vcpu| MemoryKeeper::new(board.ram.map.clone(), vcpu.memory().clone()));
        Self {
            vcpus,
            board,
            memory,
            schedule: Schedule::START,
            feed,
            breaker: Breaker::default(),
        }
    }

    /// What all parts of the machine share.
    pub const fn board(&self) -> &Arc<Board> {
        &self.board
    }

    /// Instructions that all processors together have retired.
    pub fn place(&self) -> u64 {
        let retired = self.vcpus.iter().map(InterpVcpu::retired);
        retired.fold(0, u64::wrapping_add)
    }

    /// The processor whose turn it is: it executes the next instruction, unless it is halted or its
    /// turn is over.
    pub const fn current(&self) -> usize {
        self.schedule.turn
    }

    /// For stopping a run from another thread.
    pub fn breaker(&self) -> Breaker {
        self.breaker.clone()
    }

    /// Runs to exactly `place`. Events that pend there (traps, interrupts) are delivered, and the
    /// instruction after them is next. A place that is over is reached at once.
    pub fn run_to(&mut self, place: u64) -> RunStop {
        if self.board.run.vcpus.is_stopped() {
            return RunStop::Ended;
        }
        loop {
            let now = self.place();
            if now >= place {
                return RunStop::Reached;
            }
            if self.breaker.take() {
                return RunStop::Interrupted;
            }
            if self.is_over() {
                return self.no_more();
            }
            if !self.take_input() {
                return self.no_more();
            }
            let Schedule {
                turn, used, idle, ..
            } = &mut self.schedule;
            let Some(vcpu) = self.vcpus.get_mut(*turn) else {
                return RunStop::Ended;
            };
            let cpu = *turn;
            match vcpu.turn(used, place - now) {
                Turn::Hit(hit) => return RunStop::Hit { cpu, hit },
                Turn::Limit => return RunStop::Reached,
                Turn::Delivered => return RunStop::Delivered { cpu },
                Turn::Stop => return RunStop::Ended,
                Turn::Paused => return RunStop::Interrupted,
                Turn::Crashed => return RunStop::Crashed { cpu },
                Turn::AtEnd => return RunStop::AtEnd,
                Turn::Ran => *idle = false,
                Turn::Idle => {}
            }
            if !self.next_turn() {
                return self.no_more();
            }
        }
    }

    fn crashed(&self) -> Option<usize> {
        self.vcpus.iter().position(|vcpu| vcpu.crashed.is_some())
    }

    /// The guest has ended or crashed, and a debugger holds that.
    fn is_over(&self) -> bool {
        self.crashed().is_some() || self.board.run.end.held().is_some()
    }

    /// Why there is nothing more to run.
    fn no_more(&self) -> RunStop {
        match self.crashed() {
            Some(cpu) => RunStop::Crashed { cpu },
            None if self.board.run.end.held().is_some() => RunStop::AtEnd,
            None => RunStop::Ended,
        }
    }

    /// Gives the turn to the next processor. When all of a round were halted, time passes; `false`:
    /// nothing can wake them, and the run is over.
    fn next_turn(&mut self) -> bool {
        self.schedule.used = 0;
        self.schedule.turn += 1;
        if self.schedule.turn < self.vcpus.len() {
            return true;
        }
        let idle = self.schedule.idle;
        self.schedule = Schedule {
            round: self.schedule.round.wrapping_add(1),
            inputs: self.schedule.inputs,
            ..Schedule::START
        };
        !idle || self.let_time_pass()
    }

    /// What the processors stop for from now on; the guest cannot tell. A breakpoint at the next
    /// instruction is hit at once: to get past it, run to the next place without stops.
    pub fn set_stops(&mut self, stops: &StopConditions) {
        for vcpu in &mut self.vcpus {
            vcpu.vcpu.set_stops(stops);
        }
    }

    /// Whether [`DeterministicMachine::run_to`] comes back when an instruction has raised an exception instead of
    /// retiring, and that was delivered. The guest cannot tell.
    pub fn stop_at_exceptions(&mut self, stop: bool) {
        for vcpu in &mut self.vcpus {
            vcpu.vcpu.stop_at_exceptions(stop);
        }
    }

    /// Instructions that each processor has retired.
    pub fn retired(&self) -> Vec<u64> {
        self.vcpus.iter().map(InterpVcpu::retired).collect()
    }

    /// The last branches, interrupts and exceptions of processor `cpu`, the oldest first: at most 16,
    /// and none from before the last [`DeterministicMachine::restore`].
    pub fn last_branches(&self, cpu: usize) -> Vec<Branch> {
        let vcpu = self.vcpus.get(cpu);
        vcpu.map_or_else(Vec::new, InterpVcpu::last_branches)
    }

    /// How many interrupts and how many exceptions the processors took since the machine was made or
    /// restored.
    pub fn delivered(&self) -> (u64, u64) {
        let each = self.vcpus.iter().map(InterpVcpu::delivered);
        each.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// How the run ended, once: `None` while it can go on.
    pub fn take_outcome(&self) -> Option<Outcome> {
        self.board.run.take_outcome()
    }

    /// The architectural state of processor `cpu`, if there is one.
    pub fn state(&mut self, cpu: usize) -> Option<CpuState> {
        self.vcpus.get_mut(cpu).map(InterpVcpu::cpu_state)
    }

    /// Changes the state of processor `cpu` from outside, which makes another run. Says whether
    /// there is such a processor.
    ///
    /// # Errors
    ///
    /// A state that no processor can be in; nothing was changed.
    pub fn set_state(&mut self, cpu: usize, state: &CpuState) -> Result<bool, RestoreError> {
        let vcpu = |source| RestoreError::Vcpu { cpu, source };
        state.check().map_err(vcpu)?;
        let Some(vcpu) = self.vcpus.get_mut(cpu) else {
            return Ok(false);
        };
        vcpu.set_cpu_state(state);
        Ok(true)
    }

    /// Writes guest-physical memory from outside, which makes another run. `false`: not all of it
    /// is there.
    pub fn write_memory(&mut self, address: u64, bytes: &[u8]) -> bool {
        let vcpu = self.vcpus.first();
        vcpu.is_some_and(|vcpu| vcpu.memory().write(address, bytes))
    }

    /// The hash of all that happened so far, without memory: cheap.
    pub fn trace_hash(&mut self) -> u128 {
        let mut whole = Xxh3::new();
        for vcpu in &mut self.vcpus {
            whole.update(&vcpu.digest().to_le_bytes());
        }
        whole.digest128()
    }

    /// The hash that `--stats` prints, as if the run ended here.
    pub fn hash(&mut self) -> Option<u128> {
        let trace = self.trace_hash();
        self.board.hash_with_memory(trace)
    }
}

/// The thread of all processors at a checkpoint. It never changes its engine.
const fn checkpoint_state() -> CheckpointState {
    CheckpointState {
        ids: 0..1,
        engine: Engine::Interp,
        movable: Some(false),
    }
}

/// Runs all processors of a machine until it stops, on the calling thread. Gives the states they
/// stopped in where the board asks for them. `checkpoints` are a debugger's.
pub fn thread(
    vcpus: Vec<InterpVcpu>,
    board: &Arc<Board>,
    feed: InputFeed,
    checkpoints: CheckpointLimits,
) -> Vec<FinalState> {
    let mut machine = DeterministicMachine::new(vcpus, board.clone(), feed);
    let guard = LoopGuard { id: 0, board };
    if board.run.stops.requested() {
        machine = match debug::run(machine, board, checkpoints) {
            Ok(machine) => machine,
            Err(error) => {
                board.run.finish(Outcome::Failed(Box::new(error.into())));
                return Vec::new();
            }
        };
    } else if board
        .run
        .vcpus
        .checkpoint(checkpoint_state(), &mut |_, _| {})
        == Checkpoint::Run
    {
        machine.run_to(u64::MAX);
    }
    drop(guard);
    board.run.set_event_hash(machine.trace_hash());
    for vcpu in &machine.vcpus {
        board.run.add_stats(vcpu.stats());
    }
    let wanted = board.run.final_states_requested();
    let last = machine.vcpus.iter_mut().filter(|_| wanted);
    last.map(|vcpu| vcpu.final_state(board)).collect()
}
