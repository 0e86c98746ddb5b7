//! Deterministic mode: one thread runs all processors in turn, on a clock that only they move.
//!
//! One retired instruction is one tick of the clock. A turn is a fixed number of instructions; it
//! is cut short only by a halt, and interrupted where a timer is due, so that a timer fires at its
//! instruction. When all processors are halted, the clock jumps to the next timer. Nothing in here
//! may depend on the host's time or on another thread, except for the end of the run, and for input
//! that is written to a log.
//!
//! [`Determined`] is such a machine in its owner's hands; `hindsight run` gives one to a thread.

pub mod input;
mod track;
mod turn;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hindsight_cpu::branch::Branch;
use hindsight_cpu::state::CpuState;
use hindsight_devices::clock::Ticks;
use hindsight_interp::{Hit, Stops};
use serde::{Deserialize, Serialize};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use xxhash_rust::xxh3::Xxh3;

use input::{Event, Feed};
pub use track::TrackState;
pub(super) use track::{Noted, Track};
use turn::Turn;

use super::dispatch::CrashCause;
use super::guard::LoopGuard;
use super::observed::ObservedVcpu;
use super::report::LastState;
use crate::machine::{Board, MachineError, Outcome};
use crate::snapshot::{MemoryKeeper, RestoreError, Shape, Snapshot, VERSION};
use crate::vcpu::control::Checkpoint;

/// Ticks of the virtual clock that count as one second: a tick is a nanosecond.
pub const TSC_HZ: u64 = 1_000_000_000;

/// Instructions of a turn.
pub const QUANTUM: u64 = 10_000;

/// What the real-time clock shows at the start: 2000-01-01, in seconds since 1970.
pub const RTC_EPOCH: i64 = 946_684_800;

/// Where the round of turns is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Whose turn it is.
    pub turn: usize,
    /// Instructions of the turn that are over.
    pub used: u64,
    /// Nobody ran in this round so far.
    pub idle: bool,
    /// Rounds before this one.
    pub round: u64,
    /// Entries of the input log that came.
    pub inputs: u64,
}

impl Schedule {
    const START: Self = Self {
        turn: 0,
        used: 0,
        idle: true,
        round: 0,
        inputs: 0,
    };
}

/// Why [`Determined::run_to`] came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The machine is where it was to go.
    Reached,
    /// The run is over before that; [`Determined::take_outcome`] says how.
    Ended,
    /// A processor reached what [`Determined::set_stops`] asks for.
    Hit {
        /// Which.
        cpu: usize,
        /// What.
        hit: Hit,
    },
    /// [`Breaker::stop`] was called. The machine can go on.
    Interrupted,
}

/// Stops a [`Determined::run_to`] from another thread.
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
pub struct Determined {
    vcpus: Vec<ObservedVcpu>,
    board: Arc<Board>,
    memory: Option<MemoryKeeper>,
    schedule: Schedule,
    feed: Feed,
    breaker: Breaker,
}

impl Determined {
    /// The machine of these processors, all made by [`ObservedVcpu::determine`].
    pub(crate) fn new(vcpus: Vec<ObservedVcpu>, board: Arc<Board>, feed: Feed) -> Self {
        let memory = vcpus
            .first()
            .map(|vcpu| MemoryKeeper::new(board.memory.clone(), vcpu.memory().clone()));
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
        let retired = self.vcpus.iter().map(ObservedVcpu::retired);
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
    pub fn run_to(&mut self, place: u64) -> Stop {
        if self.board.control.is_stopped() {
            return Stop::Ended;
        }
        loop {
            let now = self.place();
            if now >= place {
                return Stop::Reached;
            }
            if self.breaker.take() {
                return Stop::Interrupted;
            }
            if !self.take_input() {
                return Stop::Ended;
            }
            let Schedule {
                turn, used, idle, ..
            } = &mut self.schedule;
            let Some(vcpu) = self.vcpus.get_mut(*turn) else {
                return Stop::Ended;
            };
            let cpu = *turn;
            match vcpu.turn(used, place - now) {
                Turn::Hit(hit) => return Stop::Hit { cpu, hit },
                Turn::Limit => return Stop::Reached,
                Turn::Stop => return Stop::Ended,
                Turn::Ran => *idle = false,
                Turn::Idle => {}
            }
            if !self.next_turn() {
                return Stop::Ended;
            }
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

    /// Nobody runs: the clock goes to the next timer, or to the next input if that comes first.
    /// `false`: neither can come.
    fn let_time_pass(&mut self) -> bool {
        let board = &self.board;
        let now = board.clock.now();
        let due = board.irq.next_event();
        let known = self.feed.known(self.schedule.inputs);
        let to = match known {
            Some(input) if input.round == self.schedule.round => {
                Some(input.ticks.min(due.unwrap_or(u64::MAX)))
            }
            Some(_) => due,
            None => self.await_input(now, due),
        };
        let Some(to) = to else {
            if let Some(first) = self.vcpus.first_mut() {
                first.crash(board, CrashCause::Asleep);
            }
            return false;
        };
        board.clock.advance(to.saturating_sub(now));
        board.irq.advance(board.clock.now());
        true
    }

    /// Where input is recorded, time passes as on the host while nothing runs: up to which tick.
    fn await_input(&self, now: Ticks, due: Option<Ticks>) -> Option<Ticks> {
        let board = &self.board;
        let nanos = |ticks| Duration::from_nanos(board.clock.ns_from_ticks(ticks));
        let limit = due.map(|due| nanos(due.saturating_sub(now)));
        let stopped = || board.control.is_stopped();
        let Some(waited) = self.feed.wait(limit, board.serial_has_room(), stopped) else {
            return due;
        };
        let nanos = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        let woken = now.saturating_add(board.clock.ticks_from_ns(nanos));
        Some(woken.min(due.unwrap_or(u64::MAX)))
    }

    /// At the beginning of a round: takes the input that comes here. `false`: it ends the run.
    fn take_input(&mut self) -> bool {
        if (self.schedule.turn, self.schedule.used) != (0, 0) {
            return true;
        }
        let place = (self.schedule.round, self.place(), self.board.clock.now());
        loop {
            let event = match self.feed.known(self.schedule.inputs) {
                Some(input) if input.round > place.0 => return true,
                Some(input) if (input.round, input.place, input.ticks) != place => {
                    return self.lost_input(place);
                }
                Some(input) => {
                    let event = input.event.clone();
                    if let Event::Serial(bytes) = &event
                        && self.board.serial_input(bytes) != bytes.len()
                    {
                        return self.lost_input(place);
                    }
                    event
                }
                None => {
                    let board = self.board.clone();
                    let accept = |bytes: &[u8]| board.serial_input(bytes);
                    match self.feed.take_live(place, accept) {
                        Ok(None) => return true,
                        Ok(Some(event)) => event,
                        Err(error) => return self.fail(MachineError::InputLog(error)),
                    }
                }
            };
            self.schedule.inputs += 1;
            let bytes = match &event {
                Event::Serial(bytes) => &**bytes,
                Event::Quit => &[],
            };
            if let Some(first) = self.vcpus.first_mut() {
                first.note(Noted::Input, self.schedule.inputs, bytes);
            }
            if event == Event::Quit {
                self.board.finish_by_input();
                return false;
            }
        }
    }

    /// The log says what cannot be in this run.
    fn lost_input(&self, (round, place, ticks): (u64, u64, Ticks)) -> bool {
        let entry = self.feed.known(self.schedule.inputs);
        self.fail(MachineError::OtherInput {
            round,
            place,
            ticks,
            entry: entry.map(ToString::to_string).unwrap_or_default(),
        })
    }

    fn fail(&self, error: MachineError) -> bool {
        self.board.finish(Outcome::Failed(Box::new(error)));
        false
    }

    /// What the processors stop for from now on; the guest cannot tell. A breakpoint at the next
    /// instruction is hit at once: to get past it, run to the next place without stops.
    pub fn set_stops(&mut self, stops: &Stops) {
        for vcpu in &mut self.vcpus {
            vcpu.vcpu.set_stops(stops);
        }
    }

    /// Instructions that each processor has retired.
    pub fn retired(&self) -> Vec<u64> {
        self.vcpus.iter().map(ObservedVcpu::retired).collect()
    }

    /// The last branches, interrupts and exceptions of processor `cpu`, the oldest first: at most 16,
    /// and none from before the last [`Determined::restore`].
    pub fn last_branches(&self, cpu: usize) -> Vec<Branch> {
        let vcpu = self.vcpus.get(cpu);
        vcpu.map_or_else(Vec::new, ObservedVcpu::last_branches)
    }

    /// How the run ended, once: `None` while it can go on.
    pub fn take_outcome(&self) -> Option<Outcome> {
        self.board.take_outcome()
    }

    /// The architectural state of processor `cpu`, if there is one.
    pub fn state(&mut self, cpu: usize) -> Option<CpuState> {
        self.vcpus.get_mut(cpu).map(ObservedVcpu::cpu_state)
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

    /// What machines this one's snapshots fit.
    fn shape(&self) -> Shape {
        let regions = self.board.memory.iter();
        Shape {
            cpus: self.vcpus.len(),
            memory: regions.map(|r| (r.start_addr().0, r.len())).collect(),
            clock_hz: self.board.clock.hz(),
            cpuid: self.board.cpuid.clone(),
        }
    }

    /// Saves the whole machine. The processors forget their translations, as they may at any time:
    /// only a guest that changes page tables without the flush that the architecture asks for can
    /// tell.
    ///
    /// # Errors
    ///
    /// When memory cannot be read.
    pub fn save(&mut self) -> Result<Snapshot, RestoreError> {
        let memory = self.memory.as_mut().map(MemoryKeeper::save).transpose()?;
        let (interrupts, devices) = self.board.save();
        Ok(Snapshot {
            version: VERSION,
            shape: self.shape(),
            ticks: self.board.clock.now(),
            schedule: self.schedule,
            vcpus: self.vcpus.iter_mut().map(ObservedVcpu::save).collect(),
            interrupts,
            devices,
            memory: memory.unwrap_or_default(),
        })
    }

    /// Sets the machine to a snapshot of one of its shape. A machine whose run is over can run
    /// again. Output that the guest wrote stays written.
    ///
    /// # Errors
    ///
    /// A snapshot that does not fit or cannot be; the machine is as it was.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        self.accepts(snapshot)?;
        let old = self.save()?;
        if let Err(error) = self.put(snapshot) {
            // It was just saved, and is restored in the same order.
            self.put(&old)?;
            return Err(error);
        }
        self.board.reopen();
        Ok(())
    }

    /// What can be checked before anything is changed.
    fn accepts(&self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        let own = self.shape();
        let other = &snapshot.shape;
        if snapshot.version != VERSION {
            return Err(RestoreError::Version(snapshot.version));
        }
        let differ = [
            (own.cpus != other.cpus, "processors"),
            (own.memory != other.memory, "memory ranges"),
            (own.clock_hz != other.clock_hz, "clocks"),
            (own.cpuid != other.cpuid, "CPUID tables"),
            (snapshot.vcpus.len() != own.cpus, "processors"),
        ];
        if let Some((_, what)) = differ.into_iter().find(|(differ, _)| *differ) {
            return Err(RestoreError::Shape(what));
        }
        let Schedule { turn, used, .. } = snapshot.schedule;
        if turn >= own.cpus || used > QUANTUM {
            return Err(RestoreError::Schedule);
        }
        let keeper = self.memory.as_ref();
        match keeper.and_then(|keeper| keeper.misplaced(&snapshot.memory)) {
            Some(page) => Err(RestoreError::Page(page)),
            None => Ok(()),
        }
    }

    fn put(&mut self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        // The order counts: timers are restored at their time, what drives interrupt lines before
        // what the lines go to, and APICs before the processors that ask where their page is.
        self.board.clock.set(snapshot.ticks);
        self.board
            .restore(&snapshot.interrupts, &snapshot.devices)?;
        for (vcpu, state) in self.vcpus.iter_mut().zip(&snapshot.vcpus) {
            vcpu.restore(state)?;
        }
        if let Some(keeper) = &mut self.memory {
            keeper.restore(&snapshot.memory)?;
        }
        self.vcpus.iter_mut().for_each(|vcpu| {
            vcpu.vcpu.forget_translations();
        });
        self.schedule = snapshot.schedule;
        Ok(())
    }
}

/// Runs all processors of a machine until it stops, on the calling thread. Gives the states they
/// stopped in where the board asks for them.
pub fn thread(vcpus: Vec<ObservedVcpu>, board: &Arc<Board>, feed: Feed) -> Vec<LastState> {
    let mut machine = Determined::new(vcpus, board.clone(), feed);
    let guard = LoopGuard { id: 0, board };
    if board.control.checkpoint(0..1, &mut |_, _| {}) == Checkpoint::Run {
        machine.run_to(u64::MAX);
    }
    drop(guard);
    board.set_trace_hash(machine.trace_hash());
    for vcpu in &machine.vcpus {
        board.add_stats(vcpu.stats());
    }
    let wanted = board.wants_last_state();
    let last = machine.vcpus.iter_mut().filter(|_| wanted);
    last.map(|vcpu| vcpu.last_state(board)).collect()
}
