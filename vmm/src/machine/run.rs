//! Running a machine to its end.

use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hindsight_cpu::state::seg;
use hindsight_trace::{EventKinds, TraceWriter};

use super::builder::{MachineConfig, PreparedMachine};
use super::{MachineError, timer};
use crate::boot::{LoadRequest, LoadedImage};
use crate::console::Deliver;
use crate::deterministic::input::InputFeed;
use crate::deterministic::{self, CheckpointLimits, DeterministicMachine};
use crate::kvm;
use crate::platform::Sinks;
use crate::sandbox::{ThreadKind, enter};
use crate::vcpu::MachineVcpu;
use crate::vcpu::board::Board;
use crate::vcpu::branch_history::RecordOptions;
use crate::vcpu::crash::FinalState;
use crate::vcpu::interp::InterpVcpu;
use crate::vcpu::kernel_function::KernelFunction;
use crate::vcpu::process_tracker::ProcessTracker;
use crate::vcpu::recorder::Recorder;
use crate::vcpu::reset;
use crate::vcpu::run_control::{HaltText, Outcome, RunEvent};
use crate::vcpu::run_counter::{CountOptions, RunCounter, RunCounts};

/// A machine that is ready to run.
#[derive(Debug)]
pub struct Machine {
    board: Arc<Board>,
    vcpus: Vec<MachineVcpu>,
    deterministic: bool,
    feed: InputFeed,
    /// Whether [`Machine::run`] leaves the machine paused.
    starts_paused: bool,
    checkpoints: CheckpointLimits,
    loaded: LoadedImage,
}

impl Machine {
    /// Builds a machine of `config` with the image of `request` in its memory.
    ///
    /// [`Engine::Kvm`](crate::vcpu::engine::Engine::Kvm) needs `host`.
    ///
    /// # Errors
    ///
    /// When the configuration is impossible, the host lacks what it needs, or the image cannot be
    /// booted.
    pub fn new(
        host: Option<&kvm::KvmDevice>,
        config: &MachineConfig,
        request: &LoadRequest<'_>,
        sinks: Sinks,
    ) -> Result<Self, MachineError> {
        PreparedMachine::new(config, request)?.build(host, sinks)
    }

    pub(super) fn from_parts(
        board: Arc<Board>,
        vcpus: Vec<MachineVcpu>,
        deterministic: bool,
        loaded: LoadedImage,
    ) -> Self {
        Self {
            board,
            vcpus,
            deterministic,
            feed: InputFeed::default(),
            starts_paused: false,
            checkpoints: CheckpointLimits::default(),
            loaded,
        }
    }

    /// The board that all threads of the machine share.
    pub const fn board(&self) -> &Arc<Board> {
        &self.board
    }

    /// Sets the input of a deterministic machine, which otherwise has none.
    pub fn set_feed(&mut self, feed: InputFeed) {
        self.feed = feed;
    }

    /// Converts a deterministic machine into one that the caller runs, without threads.
    ///
    /// # Errors
    ///
    /// When the machine is not deterministic.
    pub fn into_deterministic(self) -> Result<DeterministicMachine, MachineError> {
        if !self.deterministic {
            return Err(MachineError::NotDeterministic);
        }
        let vcpus = interp_vcpus(self.vcpus)?;
        let machine = DeterministicMachine::new(vcpus, self.board, self.feed);
        machine.board().resume();
        Ok(machine)
    }

    /// The image as loaded into guest memory.
    pub const fn loaded(&self) -> &LoadedImage {
        &self.loaded
    }

    /// A function that feeds bytes to the guest's COM1 and returns how many the port accepted: none
    /// while another thread uses the port.
    pub fn serial_input(&self) -> Deliver {
        self.board.buses.serial_feeder()
    }

    /// A function that presses and releases keys, given as codes of set 1, and returns how many bytes the
    /// keyboard took.
    pub fn key_input(&self) -> Deliver {
        self.board.buses.key_feeder()
    }

    /// Records the events of all vCPUs from now on.
    pub fn record(&mut self) -> Arc<Recorder> {
        let recorder = Arc::new(Recorder::new(self.board.time.clock.clone()));
        for vcpu in &mut self.vcpus {
            vcpu.set_recorder(recorder.clone());
        }
        recorder
    }

    /// Records the branches of every vCPU, for a debugger that connects later, up to the `function` of
    /// a Linux guest's kernel, if that is given.
    pub fn record_branches(&mut self, options: RecordOptions, function: Option<String>) {
        let stop = function.map(|name| Arc::new(KernelFunction::new(name, &self.board.ram.map)));
        let first = (self.loaded.state.rip, self.first_base());
        for (id, vcpu) in self.vcpus.iter_mut().enumerate() {
            let start = if id == 0 { first } else { (0, 0) };
            vcpu.record_branches(options, stop.clone(), start);
        }
    }

    /// The base of the code segment in which vCPU 0 starts.
    fn first_base(&self) -> u64 {
        let first = &self.loaded.state;
        if first.is_long_mode() {
            0
        } else {
            first.seg[seg::CS].base
        }
    }

    /// The linear address at which vCPU 0 starts.
    pub fn start_address(&self) -> u64 {
        self.loaded.state.rip.wrapping_add(self.first_base())
    }

    /// Traces the events of all vCPUs. Their tracers are dropped at the end of [`Machine::run`].
    pub fn trace(&mut self, writer: &TraceWriter) {
        let base = self.first_base();
        let follows_processes = writer.kinds().contains(EventKinds::PROCESSES);
        let new_tracker = || ProcessTracker::new(&self.board.ram.map, writer.selects_processes());
        let tracker = follows_processes.then(|| Arc::new(new_tracker()));
        for (cpu, vcpu) in (0_u32..).zip(&mut self.vcpus) {
            let base = if cpu == 0 { base } else { 0 };
            vcpu.set_tracer(writer.tracer(cpu), base, tracker.clone());
        }
    }

    /// Counts what all vCPUs do. The counts are complete after [`Machine::run`].
    pub fn count(&mut self, options: CountOptions) -> Arc<Mutex<RunCounts>> {
        let run = Arc::default();
        let options = Arc::new(options);
        for vcpu in &mut self.vcpus {
            vcpu.set_counter(RunCounter::new(Arc::clone(&options), Arc::clone(&run)));
        }
        run
    }

    /// Limits the memory of a deterministic run's checkpoints, in bytes.
    pub const fn limit_checkpoints(&mut self, bytes: u64) {
        self.checkpoints.bytes = bytes;
    }

    /// Makes [`Machine::run`] leave the machine paused until another thread calls
    /// [`Board::resume`].
    pub const fn start_paused(&mut self) {
        self.starts_paused = true;
    }

    /// Runs the machine to its end, at most for `limit`.
    ///
    /// Calls `release` before it joins the threads; `release` must end all waiting for the
    /// consoles.
    ///
    /// # Errors
    ///
    /// When a thread cannot be started.
    pub fn run(
        self,
        limit: Option<Duration>,
        release: impl FnOnce(),
    ) -> Result<Outcome, MachineError> {
        let Self {
            board,
            vcpus,
            deterministic,
            feed,
            starts_paused,
            checkpoints,
            ..
        } = self;
        // A limit that `Instant` cannot represent is no limit.
        let limit = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut threads = Vec::new();
        tracing::info!(
            "machine starts{}: {} vCPU{}{}",
            if starts_paused { " paused" } else { "" },
            vcpus.len(),
            if vcpus.len() == 1 { "" } else { "s" },
            if deterministic { ", deterministic" } else { "" },
        );
        let started = if deterministic {
            spawn_one(&board, vcpus, (feed, checkpoints), &mut threads)
        } else {
            spawn_all(&board, vcpus, &mut threads)
        };
        if started.is_ok() && !starts_paused {
            board.resume();
        }
        let outcome = started.map(|()| wait(&board, limit));
        if matches!(outcome, Ok(None)) {
            board.run.request_final_states();
        }
        board.run.stop();
        release();
        // A thread that panicked has printed its message and set the outcome.
        let states = threads.into_iter().filter_map(|thread| thread.join().ok());
        let states: Vec<_> = states.flatten().collect();
        let outcome = outcome?.unwrap_or(Outcome::Timeout(states));
        tracing::info!("machine stopped: {}", reason(&outcome));
        Ok(outcome)
    }
}

/// Waits for the end of the run, and resets the machine whenever the guest requests that.
fn wait(board: &Board, limit: Option<Instant>) -> Option<Outcome> {
    loop {
        match board.run.end.wait_or_reset(limit) {
            RunEvent::End(outcome) => return Some(outcome),
            RunEvent::Limit => return None,
            RunEvent::Reset => {
                if let Err(error) = reset::machine(board) {
                    return Some(error.into());
                }
            }
        }
    }
}

/// Why a run ended, for the log.
fn reason(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Exit(code) => format!("the guest exits with code {code:#x}"),
        Outcome::PowerOff => "the guest powers the machine off".to_owned(),
        Outcome::Reset => "the guest resets the machine".to_owned(),
        Outcome::Crash(crash) => crash.summary(),
        &Outcome::Halted { cpu, rip } => HaltText { cpu, rip }.to_string(),
        Outcome::Timeout(_) => "the time limit passed".to_owned(),
        Outcome::Quit => "the user ended the run".to_owned(),
        Outcome::Failed(error) => error.to_string(),
    }
}

fn spawn_all(
    board: &Arc<Board>,
    vcpus: Vec<MachineVcpu>,
    threads: &mut Vec<JoinHandle<Vec<FinalState>>>,
) -> Result<(), MachineError> {
    let timer_board = board.clone();
    let timer = thread::Builder::new().name("timer".to_owned());
    let timer = timer
        .spawn(move || {
            enter(ThreadKind::Timer);
            timer::thread(&timer_board);
            Vec::new()
        })
        .map_err(MachineError::Thread)?;
    threads.push(timer);
    for (id, vcpu) in vcpus.into_iter().enumerate() {
        let thread_board = board.clone();
        let builder = thread::Builder::new().name(format!("vcpu{id}"));
        board.run.vcpus.enter();
        let thread = builder
            .spawn(move || {
                enter(ThreadKind::Vcpu);
                vcpu.run(&thread_board).into_iter().collect()
            })
            .map_err(|error| {
                board.run.vcpus.leave();
                MachineError::Thread(error)
            })?;
        threads.push(thread);
    }
    Ok(())
}

/// Starts a deterministic machine: one thread runs all vCPUs, and there is no timer thread.
fn spawn_one(
    board: &Arc<Board>,
    vcpus: Vec<MachineVcpu>,
    (feed, checkpoints): (InputFeed, CheckpointLimits),
    threads: &mut Vec<JoinHandle<Vec<FinalState>>>,
) -> Result<(), MachineError> {
    let vcpus = interp_vcpus(vcpus)?;
    let thread_board = board.clone();
    board.run.vcpus.enter();
    let thread = thread::Builder::new()
        .name("vcpus".to_owned())
        .spawn(move || {
            enter(ThreadKind::Vcpu);
            deterministic::thread(vcpus, &thread_board, feed, checkpoints)
        })
        .map_err(|error| {
            board.run.vcpus.leave();
            MachineError::Thread(error)
        })?;
    threads.push(thread);
    Ok(())
}

fn interp_vcpus(vcpus: Vec<MachineVcpu>) -> Result<Vec<InterpVcpu>, MachineError> {
    let vcpus = vcpus
        .into_iter()
        .map(|vcpu| vcpu.into_interp().ok_or(MachineError::Deterministic));
    vcpus.collect()
}
