//! What all threads of a machine share.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hindsight_cpu::armed::Armed;
use hindsight_cpu::cpuid::CpuidTable;
use hindsight_cpu::models::Cache;
use hindsight_devices::clock::Clock;
use hindsight_devices::irq::{Interrupts, InterruptsState, Wake};
use hindsight_devices::{MachineRequest, MmioBus, PortBus};
use vm_memory::GuestMemoryMmap;
use xxhash_rust::xxh3::Xxh3;

use super::MachineError;
use super::devices::{Devices, DevicesState, Mute};
use super::timer::TimerBell;
use crate::kvm::KvmError;
use crate::memory::{self, MemoryError};
use crate::messages::BranchMessages;
use crate::snapshot::RestoreError;
use crate::vcpu::attend::Reports;
use crate::vcpu::control::{Control, lock};
use crate::vcpu::mode;
use crate::vcpu::report::{Crash, LastState};
use crate::vcpu::stats::VcpuStats;
use crate::vcpu::switch::Modes;

/// How a run ended.
#[derive(Debug)]
pub enum Outcome {
    /// A value was written to the debug exit port.
    Exit(u32),
    /// The guest switched the machine off.
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest cannot go on.
    Crash(Box<Crash>),
    /// The time limit passed: where each processor was then.
    Timeout(Vec<LastState>),
    /// The user asked for the end.
    Quit,
    /// The monitor itself failed.
    Failed(Box<MachineError>),
}

impl Outcome {
    pub(crate) fn failed(error: KvmError) -> Self {
        Self::Failed(Box::new(error.into()))
    }
}

/// The end of a run: set once, waited for.
#[derive(Debug, Default)]
pub(super) struct Finish {
    outcome: Mutex<Option<Outcome>>,
    set: Condvar,
    /// What ends the run waits for a debugger: see [`Board::hold_end`].
    holds: AtomicBool,
    held: Mutex<Option<GuestEnd>>,
}

/// How a guest ended its own run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestEnd {
    /// It asked a device for it.
    Request(MachineRequest),
    /// The end is in the log of its input.
    Input,
}

impl fmt::Display for GuestEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(MachineRequest::Exit(code)) => {
                write!(f, "the guest ends the run with exit code {code}")
            }
            Self::Request(MachineRequest::Reset) => f.write_str("the guest resets the machine"),
            Self::Request(MachineRequest::PowerOff) => {
                f.write_str("the guest switches the machine off")
            }
            Self::Input => f.write_str("the input log ends the run"),
        }
    }
}

impl From<MachineRequest> for Outcome {
    fn from(request: MachineRequest) -> Self {
        match request {
            MachineRequest::Exit(code) => Self::Exit(code),
            MachineRequest::Reset => Self::Reset,
            MachineRequest::PowerOff => Self::PowerOff,
        }
    }
}

/// What all threads of a machine share.
///
/// Lock order: a device on a bus, then the interrupt controllers (which lock themselves and call
/// nothing), then a doorbell.
pub struct Board {
    /// All guest-visible time.
    pub clock: Arc<Clock>,
    /// The interrupt controllers and timers.
    pub irq: Arc<Interrupts>,
    /// The I/O ports.
    pub ports: PortBus,
    /// Devices in memory space.
    pub mmio: MmioBus,
    /// The devices on the buses, for their state.
    pub(super) devices: Devices,
    /// Silences the consoles.
    pub mute: Mute,
    /// CPUID of all processors.
    pub cpuid: CpuidTable,
    /// Pause, resume, stop, kick.
    pub control: Arc<Control>,
    /// Which engine runs the guest, and what is armed.
    pub modes: Modes,
    /// Where processors tell a debugger that they stopped.
    pub reports: Reports,
    /// Guest memory.
    pub memory: GuestMemoryMmap,
    /// The same for the interpreter, once it was needed.
    pub(super) observed_memory: Mutex<Option<Arc<hindsight_interp::Memory>>>,
    /// The last level of cache, which all processors share; cold until somebody asks.
    pub(super) cache: Mutex<Cache>,
    /// System-management interrupts reach the guest.
    pub(crate) has_smm: bool,
    /// Who listens to branch trace messages.
    pub messages: Option<BranchMessages>,
    pub(super) finish: Arc<Finish>,
    pub(super) timer: Arc<TimerBell>,
    /// Processors that wait for KVM to open an interrupt window.
    pub(super) windows: AtomicU64,
    /// The processors' threads give the state they stop in.
    pub(super) last_states: AtomicBool,
    /// What the processors' threads counted, once they ended.
    pub(super) stats: Mutex<Vec<VcpuStats>>,
    /// The end was recorded or replayed input.
    pub(super) quit_by_input: AtomicBool,
    /// The hash of what happened, after a run in deterministic mode.
    pub(super) trace_hash: Mutex<Option<u128>>,
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Board")
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}

impl Finish {
    /// Ends the machine; the first outcome counts.
    pub(super) fn set(&self, control: &Control, outcome: Outcome) {
        lock(&self.outcome).get_or_insert(outcome);
        self.set.notify_all();
        control.stop();
    }

    /// What a device asked of the machine.
    pub(super) fn request(&self, control: &Control, request: MachineRequest) {
        if self.holds.load(Ordering::SeqCst) {
            lock(&self.held).get_or_insert(GuestEnd::Request(request));
            // The processor leaves its code behind this access.
            control.ring_all();
        } else {
            self.set(control, request.into());
        }
    }

    /// Takes the end back.
    fn clear(&self) {
        *lock(&self.outcome) = None;
    }

    /// Waits for the end, or until `limit`.
    pub(super) fn wait(&self, limit: Option<Instant>) -> Option<Outcome> {
        let mut outcome = lock(&self.outcome);
        loop {
            if outcome.is_some() {
                return outcome.take();
            }
            outcome = match limit {
                None => self
                    .set
                    .wait(outcome)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(limit) => {
                    let left = limit.checked_duration_since(Instant::now())?;
                    self.set
                        .wait_timeout(outcome, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }
}

impl Board {
    /// Ends the machine; the first outcome counts.
    pub fn finish(&self, outcome: Outcome) {
        self.finish.set(&self.control, outcome);
        self.timer.ring();
    }

    /// Processor `id` has this armed from now on.
    pub(crate) fn arm(&self, id: usize, armed: Armed) {
        if self.modes.arm(id, armed) {
            self.timer.ring();
        }
    }

    /// A debugger wants this from now on.
    pub(crate) fn debug(&self, wanted: mode::Debugger) {
        if self.modes.debug(wanted) {
            self.timer.ring();
        }
    }

    /// Guest memory as all interpreters of this machine share it.
    pub(crate) fn interpreter_memory(&self) -> Result<Arc<hindsight_interp::Memory>, MemoryError> {
        let mut made = lock(&self.observed_memory);
        if let Some(memory) = &*made {
            return Ok(memory.clone());
        }
        let memory = Arc::new(memory::for_interpreter(&self.memory)?);
        Ok(made.insert(memory).clone())
    }

    /// The last level of cache.
    pub(crate) fn cache(&self) -> MutexGuard<'_, Cache> {
        lock(&self.cache)
    }

    /// A processor's thread ends, and leaves its figures.
    pub(crate) fn add_stats(&self, stats: VcpuStats) {
        lock(&self.stats).push(stats);
    }

    /// What the processors did, in their order: complete when the run is over.
    pub fn stats(&self) -> Vec<VcpuStats> {
        let mut stats = lock(&self.stats).clone();
        stats.sort_by_key(|stats| stats.cpu);
        stats
    }

    pub(crate) fn set_trace_hash(&self, hash: u128) {
        *lock(&self.trace_hash) = Some(hash);
    }

    /// The hash of a run in deterministic mode that is over: all that happened, and what is in
    /// memory now. Two runs of the same machine give the same, unless they were stopped from
    /// outside. `None` in other modes, and if memory cannot be read.
    pub fn run_hash(&self) -> Option<u128> {
        let trace = (*lock(&self.trace_hash))?;
        self.hash_with_memory(trace)
    }

    /// A hash of `trace` and of what is in memory now; `None` if memory cannot be read.
    pub(crate) fn hash_with_memory(&self, trace: u128) -> Option<u128> {
        let mut hash = Xxh3::new();
        hash.update(&trace.to_le_bytes());
        let read = memory::nonzero_pages(&self.memory, |at, bytes| {
            hash.update(&at.to_le_bytes());
            hash.update(bytes);
        });
        read.ok().map(|()| hash.digest128())
    }

    /// How the run ended, once.
    pub(crate) fn take_outcome(&self) -> Option<Outcome> {
        self.finish.wait(Some(Instant::now()))
    }

    /// From now on the guest cannot end its run: it stops where it would, until
    /// [`Board::let_end`]. For a debugger, which may go back from there.
    pub(crate) fn hold_end(&self) {
        self.finish.holds.store(true, Ordering::SeqCst);
    }

    /// The end that is held, if the guest got there.
    pub(crate) fn held_end(&self) -> Option<GuestEnd> {
        *lock(&self.finish.held)
    }

    /// Ends the machine as its guest wanted; `false` if it did not.
    pub(crate) fn let_end(&self) -> bool {
        let Some(end) = lock(&self.finish.held).take() else {
            return false;
        };
        match end {
            GuestEnd::Request(request) => self.finish(request.into()),
            GuestEnd::Input => self.quit(),
        }
        true
    }

    /// Takes the end of the run back: the machine was set to before it. An end that was not the
    /// guest's stays where those of the guest are held.
    pub(crate) fn reopen(&self) {
        *lock(&self.finish.held) = None;
        if self.finish.holds.load(Ordering::SeqCst) {
            return;
        }
        self.finish.clear();
        self.quit_by_input.store(false, Ordering::SeqCst);
        *lock(&self.trace_hash) = None;
        self.control.reopen();
    }

    /// The state of the interrupt controllers, and of all other devices.
    pub(crate) fn save(&self) -> (InterruptsState, DevicesState) {
        (self.irq.save(), self.devices.save())
    }

    /// Takes over states. The clock must show the time of the save.
    pub(crate) fn restore(
        &self,
        interrupts: &InterruptsState,
        devices: &DevicesState,
    ) -> Result<(), RestoreError> {
        self.devices.restore(devices)?;
        // After the devices: what their lines did on the way is overwritten.
        self.irq.restore(interrupts)?;
        Ok(())
    }

    /// Bytes for the guest's COM1: how many it took.
    pub(crate) fn serial_input(&self, bytes: &[u8]) -> usize {
        lock(&self.devices.serial).input(bytes)
    }

    /// The guest's COM1 takes at least one more byte.
    pub(crate) fn serial_has_room(&self) -> bool {
        lock(&self.devices.serial).room() != 0
    }

    /// Input ends the machine: recorded input, of which a debugger may go back, or the user's.
    pub(crate) fn finish_by_input(&self, recorded: bool) {
        if recorded && self.finish.holds.load(Ordering::SeqCst) {
            *lock(&self.finish.held) = Some(GuestEnd::Input);
        } else {
            self.quit();
        }
    }

    fn quit(&self) {
        self.quit_by_input.store(true, Ordering::SeqCst);
        self.finish(Outcome::Quit);
    }

    /// Whether an [`Outcome::Quit`] is part of the run, as in every replay of it.
    pub fn quit_by_input(&self) -> bool {
        self.quit_by_input.load(Ordering::SeqCst)
    }

    /// Whether a processor's thread gives the state it stops in.
    pub(crate) fn wants_last_state(&self) -> bool {
        self.last_states.load(Ordering::SeqCst)
    }

    /// Holds the machine and its time; returns when no processor runs any more. `false`: it is
    /// stopped.
    pub fn pause(&self) -> bool {
        let paused = self.control.pause();
        if paused {
            self.clock.pause();
        }
        paused
    }

    /// Lets time and processors go on.
    pub fn resume(&self) {
        self.clock.resume();
        self.control.resume();
        // While time stood still, nothing of this kept the timer thread awake.
        if self.irq.next_event().is_some() {
            self.timer.ring();
        }
    }

    /// Processor `id` waits, or waits no more, for KVM to say that it takes an interrupt. Some KVMs
    /// say so late or never: the timer thread then throws the processor out of KVM_RUN now and
    /// then, which shows whether it can be interrupted.
    pub fn window_wanted(&self, id: usize, wanted: bool) {
        let bit = 1 << id;
        let had = self.windows.load(Ordering::Relaxed) & bit != 0;
        if had != wanted {
            if wanted {
                self.windows.fetch_or(bit, Ordering::SeqCst);
                self.timer.ring_if_long();
            } else {
                self.windows.fetch_and(!bit, Ordering::SeqCst);
            }
        }
    }
}

/// Passes what the interrupt controllers have to say to the threads.
#[derive(Debug)]
pub(super) struct Waker {
    pub(super) control: Arc<Control>,
    pub(super) timer: Arc<TimerBell>,
}

impl Wake for Waker {
    fn wake(&self, vcpu: usize) {
        self.control.doorbell(vcpu).ring();
    }

    fn timer_changed(&self) {
        self.timer.ring();
    }
}
