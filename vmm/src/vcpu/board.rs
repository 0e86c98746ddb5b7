//! The board: the state that all threads of a machine share.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use hindsight_cpu::cpuid::CpuidTable;
use hindsight_cpu::uarch::CacheModel;
use hindsight_devices::MachineRequest;
use hindsight_devices::irq::Wake;
use xxhash_rust::xxh3::Xxh3;

use super::crash::CrashCause;
use super::debug::inspect::InspectRequest;
use super::debug::stop::StopReports;
use super::engine::EngineSwitch;
use super::halt_watch::HaltWatch;
use super::run_control::{GuestEnd, HaltText, Outcome, ResetPolicy, RunEnd, VcpuControl};
use super::stats::VcpuStats;
use crate::log_limit::LogLimit;
use crate::memory::{self, GuestRam};
use crate::platform::{Buses, Timekeeping, TimerBell};
use crate::sync::lock;

/// The state that all threads of a machine share.
///
/// Lock order: a device on a bus, then the interrupt controllers (which lock themselves and call
/// nothing while locked), then a doorbell.
#[derive(Debug)]
pub struct Board {
    /// Guest memory.
    pub ram: GuestRam,
    /// Devices and interrupt controllers.
    pub buses: Buses,
    /// The machine's clocks and timers.
    pub time: Timekeeping,
    /// What all processors have in common: CPUID and the last-level cache.
    pub package: Package,
    /// Run control: which vCPUs run, in which engine, and how the run ends.
    pub run: RunControl,
}

/// The package: what all processors of a machine have in common.
pub struct Package {
    /// CPUID of all processors.
    pub cpuid: CpuidTable,
    /// System-management interrupts reach the guest.
    pub has_smm: bool,
    /// The last-level cache. It stays cold until an armed facility needs it.
    cache: Mutex<CacheModel>,
}

impl fmt::Debug for Package {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Package").finish_non_exhaustive()
    }
}

impl Package {
    /// A package with a cold cache.
    pub fn new(cpuid: CpuidTable, has_smm: bool, cache: CacheModel) -> Self {
        Self {
            cpuid,
            has_smm,
            cache: Mutex::new(cache),
        }
    }

    /// The last-level cache.
    pub fn cache(&self) -> MutexGuard<'_, CacheModel> {
        lock(&self.cache)
    }
}

/// Starts and stops the vCPU threads, and holds what they report when they end.
#[derive(Debug)]
pub struct RunControl {
    /// Pause, resume, stop, kick.
    pub vcpus: Arc<VcpuControl<InspectRequest>>,
    /// Which engine runs the guest, and what is armed.
    pub engine: EngineSwitch<InspectRequest>,
    /// The stops that vCPUs report to a debugger.
    pub stops: StopReports,
    /// How the run ends.
    pub end: Arc<RunEnd>,
    /// Whether the guest has halted for good.
    pub halts: HaltWatch,
    bell: Arc<TimerBell>,
    /// The vCPU threads return their final state when they end.
    final_states: AtomicBool,
    /// The statistics of vCPU threads that have ended.
    stats: Mutex<Vec<VcpuStats>>,
    /// The hash of the run's events, after a deterministic run.
    event_hash: Mutex<Option<u128>>,
}

impl RunControl {
    /// Run control of a machine that has not started.
    pub fn new(
        vcpus: Arc<VcpuControl<InspectRequest>>,
        engine: EngineSwitch<InspectRequest>,
        stops: StopReports,
        end: Arc<RunEnd>,
        bell: Arc<TimerBell>,
    ) -> Self {
        let halts = HaltWatch::new(vcpus.cpus());
        Self {
            vcpus,
            engine,
            stops,
            end,
            halts,
            bell,
            final_states: AtomicBool::new(false),
            stats: Mutex::default(),
            event_hash: Mutex::default(),
        }
    }

    /// Ends the machine. The first outcome is the one reported.
    pub fn finish(&self, outcome: impl Into<Outcome>) {
        self.end.set(outcome.into());
        self.stop();
    }

    /// Stops all threads, without waiting for them.
    pub fn stop(&self) {
        self.vcpus.stop();
        self.bell.ring();
    }

    /// Ends the machine as its guest requested, if that end was held. Returns whether it was.
    pub fn release_held_end(&self) -> bool {
        match self.end.take_held() {
            Some(GuestEnd::Request(request)) => self.finish(request),
            Some(GuestEnd::Input) => self.quit(),
            None => return false,
        }
        true
    }

    /// Ends the machine by input: an entry of the log, which a debugger may hold, or the user's.
    pub fn finish_by_input(&self, from_log: bool) {
        if from_log && self.end.holds() {
            self.end.set_held(GuestEnd::Input);
        } else {
            self.quit();
        }
    }

    fn quit(&self) {
        self.end.set_by_input();
        self.finish(Outcome::Quit);
    }

    /// Resets the machine after a triple fault, if it reboots and no debugger would stop there.
    ///
    /// Returns `false` if it does not.
    pub fn reset_after(&self, cause: &CrashCause) -> bool {
        let reboots = self.end.resets() != ResetPolicy::End && !self.stops.requested();
        if !reboots || *cause != CrashCause::TripleFault {
            return false;
        }
        static LIMIT: LogLimit = LogLimit::new();
        if let Some(suppressed) = LIMIT.admit() {
            tracing::warn!(
                "a triple fault resets the machine; --no-reboot shows its registers{suppressed}"
            );
        }
        request_reset(&self.vcpus, &self.end);
        true
    }

    /// Withdraws the end of the run after the machine was restored to a state before it.
    ///
    /// While the ends that the guest requests are held for a debugger, any other end remains.
    pub fn reopen(&self) {
        self.end.take_held();
        self.end.take_reset();
        if self.end.holds() {
            return;
        }
        self.end.clear();
        *lock(&self.event_hash) = None;
        self.vcpus.reopen();
    }

    /// How the run ended, once.
    pub fn take_outcome(&self) -> Option<Outcome> {
        self.end.wait(Some(Instant::now()))
    }

    /// Requests that vCPU threads return their final state when they end.
    pub fn request_final_states(&self) {
        self.final_states.store(true, Ordering::SeqCst);
    }

    /// Whether a vCPU thread returns its final state when it ends.
    pub fn final_states_requested(&self) -> bool {
        self.final_states.load(Ordering::SeqCst)
    }

    /// Adds the counts of a vCPU thread that ends.
    pub fn add_stats(&self, stats: VcpuStats) {
        lock(&self.stats).push(stats);
    }

    /// The counts of all vCPUs, in order of their numbers; complete when the run is over.
    pub fn stats(&self) -> Vec<VcpuStats> {
        let mut stats = lock(&self.stats).clone();
        stats.sort_by_key(|stats| stats.cpu);
        stats
    }

    /// Stores the hash of the events of a deterministic run.
    pub fn set_event_hash(&self, hash: u128) {
        *lock(&self.event_hash) = Some(hash);
    }
}

impl Board {
    /// Returns the hash of a deterministic run that has ended: of its events and of memory.
    ///
    /// Two runs of the same machine have the same hash, unless something outside stopped them.
    /// `None` after other runs, and if memory cannot be read.
    pub fn run_hash(&self) -> Option<u128> {
        let events = (*lock(&self.run.event_hash))?;
        self.hash_with_memory(events)
    }

    /// A hash of `events` and of the contents of memory now; `None` if memory cannot be read.
    pub fn hash_with_memory(&self, events: u128) -> Option<u128> {
        let mut hash = Xxh3::new();
        hash.update(&events.to_le_bytes());
        let read = memory::nonzero_pages(&self.ram.map, |at, bytes| {
            hash.update(&at.to_le_bytes());
            hash.update(bytes);
        });
        read.ok().map(|()| hash.digest128())
    }

    /// Records that vCPU `id` sleeps with interrupts off.
    ///
    /// It sleeps after a HLT before `rip`, or waits for a start-up IPI. If no event can wake the
    /// guest any more, this is reported, and ends the run if the user requested that.
    pub fn sleeps_without_interrupts(&self, id: usize, rip: Option<u64>) {
        let halts = &self.run.halts;
        let Some((cpu, rip)) = halts.enter(id, rip) else {
            return;
        };
        if self.buses.irq.can_wake_without_interrupts() {
            return;
        }
        if halts.ends_run() {
            self.run.finish(Outcome::Halted { cpu, rip });
        } else if halts.report() {
            tracing::warn!("{}; --exit-on-halt ends such a run", HaltText { cpu, rip });
        }
    }

    /// Pauses the machine and its clock; returns when no vCPU runs any more.
    ///
    /// Returns `false` if the machine is stopped.
    pub fn pause(&self) -> bool {
        let paused = self.run.vcpus.pause();
        if paused {
            self.time.clock.pause();
        }
        paused
    }

    /// Resumes the clock and the vCPUs.
    pub fn resume(&self) {
        self.time.clock.resume();
        self.run.vcpus.resume();
        // A paused clock lets the timer thread sleep without limit.
        if self.buses.irq.next_event().is_some() {
            self.time.bell.ring();
        }
    }
}

/// Wakes the threads for which the interrupt controllers have work.
#[derive(Debug)]
pub struct ThreadWaker {
    /// The vCPU threads.
    pub vcpus: Arc<VcpuControl<InspectRequest>>,
    /// The timer thread.
    pub bell: Arc<TimerBell>,
}

impl Wake for ThreadWaker {
    fn wake(&self, vcpu: usize) {
        self.vcpus.doorbell(vcpu).ring();
    }

    fn timer_changed(&self) {
        self.bell.ring();
    }
}

/// Requests a reset of a machine that reboots. The guest executes no further instruction before it.
fn request_reset(vcpus: &VcpuControl<InspectRequest>, end: &RunEnd) {
    if end.resets() == ResetPolicy::Reboot {
        vcpus.begin_reset();
    } else {
        // The thread leaves the interpreter after this access.
        vcpus.ring_all();
    }
    end.set_reset();
}

/// Serves the requests of devices to the machine: exit, reset, power-off.
#[derive(Clone, Debug)]
pub struct RequestHandler {
    /// The vCPU threads.
    pub vcpus: Arc<VcpuControl<InspectRequest>>,
    /// The timer thread.
    pub bell: Arc<TimerBell>,
    /// How the run ends.
    pub end: Arc<RunEnd>,
}

impl RequestHandler {
    /// Resets the machine, ends the run, or holds the end for a debugger.
    pub fn request(&self, request: MachineRequest) {
        if request == MachineRequest::Reset && self.end.resets() != ResetPolicy::End {
            request_reset(&self.vcpus, &self.end);
        } else if self.end.holds() {
            self.end.set_held(GuestEnd::Request(request));
            // The vCPU leaves the interpreter after this access.
            self.vcpus.ring_all();
        } else {
            self.end.set(request.into());
            self.vcpus.stop();
            self.bell.ring();
        }
    }
}
