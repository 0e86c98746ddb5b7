//! A deterministic machine: its vCPUs, and the round of turns.

use hindsight_cpu::stops::StopConditions;
use std::sync::Arc;

use hindsight_cpu::branch::Branch;
use hindsight_cpu::state::CpuState;

use xxhash_rust::xxh3::Xxh3;

use super::input::InputFeed;
use super::stop::{RunStop, StopHandle};
use super::turn::{QUANTUM, TurnEnd};
use crate::state::{MemorySaver, RestoreError, Schedule};
use crate::vcpu::board::Board;
use crate::vcpu::interp::InterpVcpu;
use crate::vcpu::reset;
use crate::vcpu::run_control::Outcome;

/// Ticks of the virtual clock in a second: a tick is a nanosecond.
pub const TSC_HZ: u64 = 1_000_000_000;

/// The real-time clock at the start of a run: 2000-01-01, in seconds since 1970.
pub const RTC_EPOCH: i64 = 946_684_800;

/// A deterministic machine that its owner runs, saves and restores.
///
/// Its `icount` is the number of instructions that all vCPUs together have retired since the run
/// began. One thread runs them in turn, so that instruction counts order events in time, and the
/// same count is the same state in every run.
#[derive(Debug)]
pub struct DeterministicMachine {
    pub(super) vcpus: Vec<InterpVcpu>,
    pub(super) board: Arc<Board>,
    pub(super) memory: Option<MemorySaver>,
    pub(super) schedule: Schedule,
    pub(super) feed: InputFeed,
    stop_handle: StopHandle,
}

impl DeterministicMachine {
    /// A machine of these vCPUs, all prepared by [`InterpVcpu::make_deterministic`].
    pub(crate) fn new(vcpus: Vec<InterpVcpu>, board: Arc<Board>, feed: InputFeed) -> Self {
        debug_assert!(
            vcpus.iter().all(|vcpu| vcpu.platform.log.is_some()),
            "every vCPU is deterministic"
        );
        let memory = vcpus
            .first()
            .map(|vcpu| MemorySaver::new(board.ram.map.clone(), vcpu.memory().clone()));
        Self {
            vcpus,
            board,
            memory,
            schedule: Schedule::START,
            feed,
            stop_handle: StopHandle::default(),
        }
    }

    /// The board that all parts of the machine share.
    pub const fn board(&self) -> &Arc<Board> {
        &self.board
    }

    /// Instructions that all vCPUs together have retired.
    pub fn icount(&self) -> u64 {
        let retired = self.vcpus.iter().map(InterpVcpu::retired);
        retired.fold(0, u64::wrapping_add)
    }

    /// The vCPU whose turn it is. It executes the next instruction, unless it is halted or its turn
    /// has ended.
    pub const fn current(&self) -> usize {
        self.schedule.turn
    }

    /// A handle that stops a run from another thread.
    pub fn stop_handle(&self) -> StopHandle {
        self.stop_handle.clone()
    }

    /// Runs until exactly `icount` instructions are retired.
    ///
    /// Events that are pending there (traps, interrupts) are delivered, and the instruction after
    /// them is next. If the machine is already past `icount`, it does not run.
    pub fn run_to(&mut self, icount: u64) -> RunStop {
        if self.board.run.vcpus.is_stopped() {
            return RunStop::Ended;
        }
        let mut served = false;
        loop {
            let now = self.icount();
            if now >= icount {
                return RunStop::Reached;
            }
            if self.stop_handle.take() {
                return RunStop::Interrupted;
            }
            // A turn that devices have interrupted goes on, without other input.
            let goes_on = std::mem::take(&mut served);
            if self.has_ended() || !(goes_on || self.deliver_input()) {
                return self.end_of_run();
            }
            let Schedule {
                turn, used, idle, ..
            } = &mut self.schedule;
            let Some(vcpu) = self.vcpus.get_mut(*turn) else {
                return RunStop::Ended;
            };
            let cpu = *turn;
            match vcpu.run_turn(used, icount - now, &self.stop_handle) {
                TurnEnd::Hit(hit) => return RunStop::Hit { cpu, hit },
                TurnEnd::Limit => return RunStop::Reached,
                TurnEnd::Delivered => return RunStop::Delivered { cpu },
                TurnEnd::Stop => return RunStop::Ended,
                TurnEnd::Paused => return RunStop::Interrupted,
                TurnEnd::Crashed => return RunStop::Crashed { cpu },
                TurnEnd::AtEnd => return RunStop::AtEnd,
                TurnEnd::Reset => {
                    self.reset();
                    continue;
                }
                TurnEnd::Served => {
                    served = true;
                    continue;
                }
                TurnEnd::Ran => *idle = false,
                TurnEnd::Idle => {}
            }
            if !self.next_turn() {
                return self.end_of_run();
            }
        }
    }

    /// Resets the machine, as its guest requested.
    fn reset(&mut self) {
        let board = self.board.clone();
        let done = reset::devices(&board).and_then(|()| {
            let mut vcpus = self.vcpus.iter_mut();
            vcpus.try_for_each(|vcpu| reset::vcpu(vcpu))
        });
        if let Err(error) = done {
            board.run.finish(error);
        }
    }

    pub(super) fn crashed(&self) -> Option<usize> {
        self.vcpus.iter().position(|vcpu| vcpu.crashed.is_some())
    }

    /// Whether the guest has ended the run or crashed, and a debugger holds the machine there.
    pub(super) fn has_ended(&self) -> bool {
        self.crashed().is_some() || self.board.run.end.held().is_some()
    }

    /// Why no further instruction can run.
    fn end_of_run(&self) -> RunStop {
        match self.crashed() {
            Some(cpu) => RunStop::Crashed { cpu },
            None if self.board.run.end.held().is_some() => RunStop::AtEnd,
            None => RunStop::Ended,
        }
    }

    /// Gives the turn to the next vCPU. After a round in which all were halted, the clock advances.
    ///
    /// Returns `false` if nothing can wake them, which ends the run.
    fn next_turn(&mut self) -> bool {
        debug_assert!(
            self.schedule.used <= QUANTUM,
            "a turn has {QUANTUM} instructions"
        );
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
        !idle || self.advance_idle_clock()
    }

    /// Sets what the vCPUs stop for from now on, without an effect on the guest.
    ///
    /// A breakpoint at the next instruction is hit at once. To continue past it, run one
    /// instruction without stops.
    pub fn set_stops(&mut self, stops: &StopConditions) {
        for vcpu in &mut self.vcpus {
            vcpu.vcpu.set_stops(stops);
        }
    }

    /// Sets whether [`DeterministicMachine::run_to`] returns when an instruction has raised an
    /// exception instead of retiring, and the exception was delivered. This has no effect on the
    /// guest.
    pub fn stop_at_exceptions(&mut self, stop: bool) {
        for vcpu in &mut self.vcpus {
            vcpu.vcpu.stop_at_exceptions(stop);
        }
    }

    /// Instructions that each vCPU has retired.
    pub fn retired(&self) -> Vec<u64> {
        self.vcpus.iter().map(InterpVcpu::retired).collect()
    }

    /// The last branches, interrupts and exceptions of vCPU `cpu`, the oldest first.
    ///
    /// There are at most 16, and none from before the last [`DeterministicMachine::restore`].
    pub fn last_branches(&self, cpu: usize) -> Vec<Branch> {
        let vcpu = self.vcpus.get(cpu);
        vcpu.map_or_else(Vec::new, InterpVcpu::last_branches)
    }

    /// How many interrupts and how many exceptions were delivered since the machine was created or
    /// restored.
    pub fn delivered(&self) -> (u64, u64) {
        let each = self.vcpus.iter().map(InterpVcpu::delivered);
        each.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// How the run ended. Returns `None` while it can continue, and after the first call.
    pub fn take_outcome(&self) -> Option<Outcome> {
        self.board.run.take_outcome()
    }

    /// The architectural state of vCPU `cpu`, if it exists.
    pub fn state(&mut self, cpu: usize) -> Option<CpuState> {
        self.vcpus.get_mut(cpu).map(InterpVcpu::cpu_state)
    }

    /// Sets the state of vCPU `cpu`. Returns `false` if there is no such vCPU.
    ///
    /// The run is then no longer that of the machine's configuration and input.
    ///
    /// # Errors
    ///
    /// The state is invalid; nothing has changed.
    pub fn set_state(&mut self, cpu: usize, state: &CpuState) -> Result<bool, RestoreError> {
        let vcpu = |source| RestoreError::Vcpu { cpu, source };
        state.check().map_err(vcpu)?;
        let Some(vcpu) = self.vcpus.get_mut(cpu) else {
            return Ok(false);
        };
        vcpu.set_cpu_state(state);
        Ok(true)
    }

    /// Writes guest-physical memory; from then on the run differs from one without the write.
    /// Returns `false` if part of the range is not memory.
    pub fn write_memory(&mut self, address: u64, bytes: &[u8]) -> bool {
        let vcpu = self.vcpus.first();
        vcpu.is_some_and(|vcpu| vcpu.memory().write(address, bytes))
    }

    /// The hash of all events so far. It does not read memory, and so it is cheap.
    pub fn trace_hash(&mut self) -> u128 {
        let mut whole = Xxh3::new();
        for vcpu in &mut self.vcpus {
            whole.update(&vcpu.digest().to_le_bytes());
        }
        whole.digest128()
    }

    /// The hash that `--stats` would print if the run ended here. It includes memory.
    pub fn hash(&mut self) -> Option<u128> {
        let trace = self.trace_hash();
        self.board.hash_with_memory(trace)
    }
}
