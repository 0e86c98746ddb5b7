//! Putting a machine together, and running it to its end.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hindsight_cpu::cpuid::{self, CpuidTable, Regs};
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::models::{Cache, Geometry};
use hindsight_cpu::msr::{MsrConfig, Msrs};
use hindsight_cpu::profile::{Profile, ProfileError};
use hindsight_cpu::state::{Activity, CpuState, gpr, seg};
use hindsight_devices::clock::Clock;
use hindsight_devices::irq::lapic::LapicFeatures;
use hindsight_devices::irq::{self, Interrupts};
use hindsight_devices::rtc::RtcConfig;
use hindsight_devices::{BusError, NanoClock, Requests};
use thiserror::Error;
use vm_memory::GuestMemoryMmap;

use super::board::{Board, Finish, Outcome, Waker};
use super::devices::{self, Mute, Sinks, Wiring};
use super::timer::{self, TimerBell};
use crate::boot::{self, BootError, Loaded, Plan, Protocol};
use crate::console::Deliver;
use crate::kvm::vcpu::KvmVcpu;
use crate::kvm::vm::KvmVm;
use crate::kvm::{self, KvmError};
use crate::layout::{Layout, LayoutError};
use crate::memory::{self, MemoryError};
use crate::messages::BranchMessages;
use crate::snapshot::{Limits, RestoreError};
use crate::vcpu::attend::Reports;
use crate::vcpu::control::Control;
use crate::vcpu::determined::input::Feed;
use crate::vcpu::determined::{self, Determined};
use crate::vcpu::mode::{Engine, Rule};
use crate::vcpu::models::Models;
use crate::vcpu::native::NativeVcpu;
use crate::vcpu::observed::ObservedVcpu;
use crate::vcpu::record::Recorder;
use crate::vcpu::report::LastState;
use crate::vcpu::switch::{Every, Modes, Processor};
use crate::{acpi, doctor, host_clock};

/// Most processors a machine may have.
pub const CPUS_MAX: usize = 64;

/// What a machine is made of.
#[derive(Clone, Debug)]
pub struct Config {
    /// Bytes of memory.
    pub memory: u64,
    /// Back memory by huge pages.
    pub huge_pages: bool,
    /// Processors, 1 to [`CPUS_MAX`].
    pub cpus: usize,
    /// Which processor.
    pub cpu: Profile,
    /// What executes its code.
    pub engine: Engine,
}

/// Why a machine could not be built, or failed.
#[derive(Debug, Error)]
pub enum MachineError {
    /// KVM refused.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The size of memory is impossible.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The ACPI tables cannot be placed.
    #[error(transparent)]
    Acpi(#[from] acpi::PlaceError),
    /// Memory could not be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The image cannot be booted.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Two devices at one address: a flaw of ours.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The processor cannot be had here.
    #[error("--cpu")]
    Profile(#[from] ProfileError),
    /// The number of processors is impossible.
    #[error("a machine has 1 to {CPUS_MAX} processors, not {0}")]
    Cpus(usize),
    /// Deterministic mode is for the interpreter.
    #[error("deterministic mode needs the interpreter: KVM cannot count instructions")]
    Deterministic,
    /// Only deterministic machines can be taken to an instruction.
    #[error("the machine is not deterministic")]
    NotDeterministic,
    /// The log of input cannot be written.
    #[error("the input log cannot be written")]
    InputLog(#[source] io::Error),
    /// The log of input is of another run.
    #[error(
        "the input log is of another run: at round {round}, instruction {place}, time {ticks} it has \"{entry}\""
    )]
    OtherInput {
        /// Round of turns.
        round: u64,
        /// Instructions.
        place: u64,
        /// Time.
        ticks: u64,
        /// The entry that does not fit.
        entry: String,
    },
    /// A thread of ours panicked; it has said why.
    #[error("a thread of the monitor panicked: this is a bug in hindsight")]
    Panicked,
    /// The host has no more file descriptors.
    #[error("no file descriptor for the debugger's events")]
    Reports(#[source] io::Error),
    /// A machine under a debugger could not be set back.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// A thread could not be started.
    #[error("a thread cannot be started")]
    Thread(#[source] io::Error),
}

/// A machine that is ready to run.
#[derive(Debug)]
pub struct Machine {
    board: Arc<Board>,
    vcpus: Vec<Processor>,
    deterministic: bool,
    feed: Feed,
    /// Somebody else lets it run.
    starts_paused: bool,
    checkpoints: Limits,
    loaded: Loaded,
}

/// Guest memory with an image in it, and no machine round it yet: what can be wrong with the image
/// and the configuration has shown.
#[derive(Debug)]
pub struct Prepared {
    config: Config,
    layout: Layout,
    memory: GuestMemoryMmap,
    loaded: Loaded,
    seed: Option<u64>,
    rule: Option<Rule>,
    every: Option<Every>,
    modelled: bool,
}

impl Prepared {
    /// Makes the machine deterministic: see [`crate::vcpu::determined`]. The seed is that of RDRAND
    /// and RDSEED.
    #[must_use]
    pub fn deterministic(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Whether a branch predictor and caches stand behind the events that need them; without, these
    /// count nothing. See [`hindsight_cpu::models`].
    #[must_use]
    pub fn modelled(mut self, modelled: bool) -> Self {
        self.modelled = modelled;
        self
    }

    /// Lets a machine that starts in KVM change its engine as `rule` says, and for tests of just
    /// that also `every` so often. See [`crate::vcpu::switch`].
    #[must_use]
    pub fn changing(mut self, rule: Rule, every: Option<Every>) -> Self {
        self.rule = Some(rule);
        self.every = every;
        self
    }

    /// Puts the image of `plan` into the memory of `config`.
    ///
    /// # Errors
    ///
    /// When the configuration is impossible, the host has not got the memory, or the image cannot
    /// be booted.
    pub fn new(config: &Config, plan: &Plan<'_>) -> Result<Self, MachineError> {
        if !(1..=CPUS_MAX).contains(&config.cpus) {
            return Err(MachineError::Cpus(config.cpus));
        }
        let layout = Layout::new(config.memory)?;
        let memory = memory::allocate(&layout.ram(), config.huge_pages)?;
        let layout = acpi::place(&memory, layout, config.cpus)?;
        let loaded = boot::load(&memory, &layout, plan)?;
        Ok(Self {
            config: config.clone(),
            layout,
            memory,
            loaded,
            seed: None,
            rule: None,
            every: None,
            modelled: true,
        })
    }

    /// Builds the machine. Only [`Engine::Interp`] does without `host`.
    ///
    /// # Errors
    ///
    /// When KVM refuses, or is to be deterministic.
    pub fn build(self, host: Option<&kvm::Host>, sinks: Sinks) -> Result<Machine, MachineError> {
        let Self {
            config,
            layout,
            memory,
            loaded,
            seed,
            rule,
            every,
            modelled,
        } = self;
        if seed.is_some() && config.engine != Engine::Interp {
            return Err(MachineError::Deterministic);
        }
        let kvm = match (config.engine, host) {
            (Engine::Kvm, Some(host)) => Some(KvmParts::new(host, &memory, config.cpus)?),
            (Engine::Kvm, None) => return Err(KvmError::Missing.into()),
            (Engine::Interp, _) => None,
        };
        // Without KVM there is nothing to change to.
        let rule = rule.filter(|_| kvm.is_some());
        let facilities = config
            .cpu
            .facilities(available(config.engine, rule.is_some()))?;
        let tsc_hz = match seed {
            Some(_) => determined::TSC_HZ,
            None => host_clock::tsc_hz(kvm.as_ref().and_then(KvmParts::tsc_khz)),
        };
        let supported = |leaf, subleaf| match (&kvm, host) {
            (Some(_), Some(host)) if rule.is_some() => executed_by_both(host, leaf, subleaf),
            (Some(_), Some(host)) => host.supported_cpuid(leaf, subleaf),
            _ => hindsight_interp::supported_cpuid(leaf, subleaf),
        };
        let processor = Features {
            facilities,
            tsc_hz,
            supported: &supported,
            deterministic: seed.is_some(),
        };
        let control = Arc::new(Control::new(config.cpus, config.engine));
        let modes = Modes::new(config.cpus, rule.clone(), every, control.clone());
        let board = board(&config, &layout, memory, &processor, modes, control, sinks)?;
        if !matches!(loaded.protocol, Protocol::Pvh | Protocol::Elf) {
            // What firmware would have left behind: interrupts of the 8259 pair reach the processor.
            board.irq.set_virtual_wire();
        }
        let msrs = MsrConfig {
            facilities,
            tsc_hz,
            models: modelled,
        };
        let package = Arc::default();
        let models = |id| {
            Models::new(
                id,
                Msrs::in_package(msrs, Arc::clone(&package)),
                board.clone(),
            )
        };
        let ready = match kvm {
            Some(parts) => parts.into_vcpus(&board, &loaded, models)?,
            None => observed_vcpus(config.cpus, &board, &loaded, seed, models)?,
        };
        for id in 1..config.cpus {
            board.irq.set_wait_for_sipi(id, true);
        }
        Ok(Machine {
            board,
            vcpus: ready,
            deterministic: seed.is_some(),
            feed: Feed::default(),
            starts_paused: false,
            checkpoints: Limits::default(),
            loaded,
        })
    }
}

impl Machine {
    /// Builds a machine of `config` with the image of `plan` in its memory. Only
    /// [`Engine::Interp`] does without `host`.
    ///
    /// # Errors
    ///
    /// When the configuration is impossible, the host has not got what it takes, or the image
    /// cannot be booted.
    pub fn new(
        host: Option<&kvm::Host>,
        config: &Config,
        plan: &Plan<'_>,
        sinks: Sinks,
    ) -> Result<Self, MachineError> {
        Prepared::new(config, plan)?.build(host, sinks)
    }

    /// What all threads share: for consoles, debuggers and the like.
    pub const fn board(&self) -> &Arc<Board> {
        &self.board
    }

    /// Input of a deterministic machine; without it there is none.
    pub fn set_feed(&mut self, feed: Feed) {
        self.feed = feed;
    }

    /// Takes a deterministic machine into the caller's hands, which then runs it: no threads, no
    /// consoles' input.
    ///
    /// # Errors
    ///
    /// When the machine is not deterministic.
    pub fn into_determined(self) -> Result<Determined, MachineError> {
        if !self.deterministic {
            return Err(MachineError::NotDeterministic);
        }
        let machine = Determined::new(determined_vcpus(self.vcpus)?, self.board, self.feed);
        machine.board().resume();
        Ok(machine)
    }

    /// What was put where in guest memory.
    pub const fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    /// Where bytes for the guest's COM1 go. It takes as many as it has room for, none while the port
    /// is busy, and says how many.
    pub fn serial_input(&self) -> Deliver {
        let serial = self.board.devices.serial.clone();
        Box::new(move |bytes| {
            serial
                .try_lock()
                .map_or(0, |mut serial| serial.input(bytes))
        })
    }

    /// Has what happens to its processors kept from now on.
    pub fn record(&mut self) -> Arc<Recorder> {
        let recorder = Arc::new(Recorder::new(self.board.clock.clone()));
        for vcpu in &mut self.vcpus {
            vcpu.set_recorder(recorder.clone());
        }
        recorder
    }

    /// Keeps the last `limit` branches of every processor, for a debugger that connects later.
    pub fn record_branches(&mut self, limit: usize) {
        let first = &self.loaded.state;
        let long = first.efer & 1 << 10 != 0;
        let base = if long { 0 } else { first.seg[seg::CS].base };
        let first = (first.rip, base);
        for (id, vcpu) in self.vcpus.iter_mut().enumerate() {
            vcpu.record_branches(limit, if id == 0 { first } else { (0, 0) });
        }
    }

    /// A debugger's checkpoints of a deterministic run keep so many bytes of memory at most.
    pub const fn limit_checkpoints(&mut self, bytes: u64) {
        self.checkpoints.bytes = bytes;
    }

    /// [`Machine::run`] leaves it to somebody else to let the processors run, by
    /// [`Board::resume`].
    pub const fn start_paused(&mut self) {
        self.starts_paused = true;
    }

    /// Runs the machine to its end, `limit` at most. `release` is called before the threads are
    /// joined: nothing may make them wait any more.
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
        // A limit beyond the end of time is none.
        let limit = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut threads = Vec::new();
        let started = if deterministic {
            spawn_one(&board, vcpus, (feed, checkpoints), &mut threads)
        } else {
            spawn_all(&board, vcpus, &mut threads)
        };
        if started.is_ok() && !starts_paused {
            board.resume();
        }
        let outcome = started.map(|()| board.finish.wait(limit));
        let timed_out = matches!(outcome, Ok(None));
        board.last_states.store(timed_out, Ordering::SeqCst);
        board.control.stop();
        board.timer.ring();
        release();
        // A panic in there has been printed; the outcome stands.
        let last = threads.into_iter().filter_map(|thread| thread.join().ok());
        let last: Vec<_> = last.flatten().collect();
        Ok(outcome?.unwrap_or(Outcome::Timeout(last)))
    }
}

fn spawn_all(
    board: &Arc<Board>,
    vcpus: Vec<Processor>,
    threads: &mut Vec<JoinHandle<Vec<LastState>>>,
) -> Result<(), MachineError> {
    let timer_board = board.clone();
    let timer = thread::Builder::new().name("timer".to_owned());
    let timer = timer
        .spawn(move || {
            timer::thread(&timer_board);
            Vec::new()
        })
        .map_err(MachineError::Thread)?;
    threads.push(timer);
    for (id, vcpu) in vcpus.into_iter().enumerate() {
        let thread_board = board.clone();
        let builder = thread::Builder::new().name(format!("vcpu{id}"));
        board.control.enter();
        let thread = builder
            .spawn(move || vcpu.thread(&thread_board).into_iter().collect())
            .map_err(|error| {
                board.control.leave();
                MachineError::Thread(error)
            })?;
        threads.push(thread);
    }
    Ok(())
}

/// Deterministic mode: one thread for all processors, and none for time.
fn spawn_one(
    board: &Arc<Board>,
    vcpus: Vec<Processor>,
    (feed, checkpoints): (Feed, Limits),
    threads: &mut Vec<JoinHandle<Vec<LastState>>>,
) -> Result<(), MachineError> {
    let vcpus = determined_vcpus(vcpus)?;
    let thread_board = board.clone();
    board.control.enter();
    let thread = thread::Builder::new()
        .name("vcpus".to_owned())
        .spawn(move || determined::thread(vcpus, &thread_board, feed, checkpoints))
        .map_err(|error| {
            board.control.leave();
            MachineError::Thread(error)
        })?;
    threads.push(thread);
    Ok(())
}

fn determined_vcpus(vcpus: Vec<Processor>) -> Result<Vec<ObservedVcpu>, MachineError> {
    let vcpus = vcpus.into_iter().map(|vcpu| {
        let observed = vcpu.into_observed();
        observed.ok_or(MachineError::Deterministic)
    });
    vcpus.collect()
}

/// What decides the processor that guests see.
struct Features<'a> {
    facilities: Facilities,
    tsc_hz: u64,
    /// What the engine can execute, in CPUID's own form.
    supported: &'a dyn Fn(u32, u32) -> Regs,
    /// Its time is virtual.
    deterministic: bool,
}

/// What works on this host, in an engine or in two that take turns: what KVM lacks moves the machine.
fn available(engine: Engine, changes: bool) -> Facilities {
    if engine == Engine::Interp {
        return Facilities::INTERPRETED;
    }
    let all = if changes {
        Facilities::OBSERVED
            .union(Facilities::L2CAT)
            .union(Facilities::PMU8)
    } else {
        Facilities::NATIVE
    };
    // Without an in-kernel APIC, some KVMs swallow writes of the deadline.
    if matches!(doctor::unmet("tsc-deadline-exit"), Ok(None)) {
        all
    } else {
        all.difference(Facilities::TSC_DEADLINE)
    }
}

/// What KVM and the interpreter both execute: a guest that moves between them must not notice. Where
/// things lie in an XSAVE area is the host's, because XSAVE runs natively; the interpreter follows.
fn executed_by_both(host: &kvm::Host, leaf: u32, subleaf: u32) -> Regs {
    let native = host.supported_cpuid(leaf, subleaf);
    let observed = hindsight_interp::supported_cpuid(leaf, subleaf);
    intersection(leaf, subleaf, native, observed)
}

fn intersection(leaf: u32, subleaf: u32, native: Regs, observed: Regs) -> Regs {
    let mut both = native;
    match (leaf, subleaf) {
        (1, _) => {
            both[2] &= observed[2];
            both[3] &= observed[3];
        }
        (7, _) | (0x8000_0001, _) | (0xd, 1) => {
            for (native, observed) in both.iter_mut().zip(observed) {
                *native &= observed;
            }
        }
        (0xd, 0) => both[0] &= observed[0],
        // A component that the interpreter lacks has no length there.
        (0xd, _) if observed[0] == 0 => both = [0; 4],
        (0x8000_0008, _) => {
            let (a, b) = (both[0], observed[0]);
            both[0] = (a & 0xff).min(b & 0xff) | (a & 0xff00).min(b & 0xff00);
        }
        _ => {}
    }
    both
}

/// The KVM side of a machine under construction.
struct KvmParts {
    vcpus: Vec<KvmVcpu>,
}

impl KvmParts {
    fn new(host: &kvm::Host, memory: &GuestMemoryMmap, cpus: usize) -> Result<Self, KvmError> {
        let vm = KvmVm::new(host, memory)?;
        let vcpus = (0_u32..).take(cpus).map(|id| vm.create_vcpu(id));
        Ok(Self {
            vcpus: vcpus.collect::<Result<_, _>>()?,
        })
    }

    fn tsc_khz(&self) -> Option<u32> {
        self.vcpus.first().and_then(KvmVcpu::tsc_khz)
    }

    fn into_vcpus(
        self,
        board: &Board,
        loaded: &Loaded,
        models: impl Fn(usize) -> Models,
    ) -> Result<Vec<Processor>, MachineError> {
        let vcpus = self.vcpus.into_iter().zip(0_u32..).enumerate();
        vcpus
            .map(|(id, (kvm, wide))| {
                kvm.set_cpuid(wide, &board.cpuid)?;
                let state = first_state(id, loaded, &board.cpuid);
                Ok(NativeVcpu::new(kvm, models(id), &state)?.into())
            })
            .collect()
    }
}

fn observed_vcpus(
    cpus: usize,
    board: &Board,
    loaded: &Loaded,
    seed: Option<u64>,
    models: impl Fn(usize) -> Models,
) -> Result<Vec<Processor>, MachineError> {
    let memory = board.interpreter_memory()?;
    let vcpus = (0..cpus).map(|id| {
        let state = first_state(id, loaded, &board.cpuid);
        let mut vcpu = ObservedVcpu::new(memory.clone(), models(id), &state);
        if let Some(seed) = seed {
            vcpu.determine(seed);
        }
        vcpu.into()
    });
    Ok(vcpus.collect())
}

fn board(
    config: &Config,
    layout: &Layout,
    memory: GuestMemoryMmap,
    processor: &Features<'_>,
    modes: Modes,
    control: Arc<Control>,
    sinks: Sinks,
) -> Result<Arc<Board>, MachineError> {
    let clock = Arc::new(if processor.deterministic {
        Clock::new_virtual(processor.tsc_hz)
    } else {
        Clock::host(processor.tsc_hz, host_clock::read_tsc)
    });
    clock.pause();
    let cpus = u32::try_from(config.cpus).unwrap_or(u32::MAX);
    let &Features {
        facilities,
        tsc_hz,
        supported,
        deterministic,
    } = processor;
    let cpuid_config = cpuid::Config {
        model: config.cpu.model(),
        facilities,
        cpus,
        tsc_hz,
    };
    let cpuid = CpuidTable::new(&cpuid_config, supported);
    let timer = Arc::new(TimerBell::default());
    let finish = Arc::new(Finish::default());
    let waker = Arc::new(Waker {
        control: control.clone(),
        timer: timer.clone(),
    });
    let irq_config = irq::Config {
        rtc: rtc_config(layout, deterministic),
        lapic: LapicFeatures {
            x2apic: facilities.contains(Facilities::X2APIC),
            tsc_deadline: facilities.contains(Facilities::TSC_DEADLINE),
            ..LapicFeatures::default()
        },
    };
    let irq = Arc::new(Interrupts::new(
        config.cpus,
        clock.clone(),
        irq_config,
        waker,
    ));
    let nano_clock = clock.clone();
    let (to_control, to_finish) = (control.clone(), finish.clone());
    let wiring = Wiring {
        irq: &irq,
        nanos: NanoClock::new(move || nano_clock.ns_from_ticks(nano_clock.now())),
        requests: Requests::new(move |request| to_finish.request(&to_control, request)),
        layout,
        cpus: u16::try_from(config.cpus).unwrap_or(u16::MAX),
    };
    let mute = Mute::default();
    let mut sinks = sinks.muted(&mute);
    let messages = sinks.messages.take().map(BranchMessages::new);
    let (ports, mmio, devices) = devices::build(&wiring, sinks)?;
    let windows = AtomicU64::new(0);
    let board = Board {
        clock,
        irq,
        ports,
        mmio,
        devices,
        mute,
        cpuid,
        control,
        modes,
        reports: Reports::new().map_err(MachineError::Reports)?,
        memory,
        observed_memory: Mutex::default(),
        cache: Mutex::new(Cache::new(Geometry::L3)),
        has_smm: facilities.contains(Facilities::SMM),
        messages,
        finish,
        timer,
        windows,
        last_states: AtomicBool::new(false),
        stats: Mutex::default(),
        quit_by_input: AtomicBool::new(false),
        trace_hash: Mutex::default(),
    };
    Ok(Arc::new(board))
}

fn rtc_config(layout: &Layout, deterministic: bool) -> RtcConfig {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let host = i64::try_from(since.as_secs()).unwrap_or(0);
    RtcConfig {
        epoch_seconds: if deterministic {
            determined::RTC_EPOCH
        } else {
            host
        },
        memory_below_4g: layout.low_end(),
        memory_above_4g: layout.memory() - layout.low_end(),
    }
}

/// The boot processor starts as the protocol says, the others wait.
fn first_state(id: usize, loaded: &Loaded, cpuid: &CpuidTable) -> CpuState {
    if id == 0 {
        return loaded.state.clone();
    }
    let mut state = CpuState::reset();
    state.gpr[gpr::RDX] = u64::from(cpuid.query(1, 0, 0, 0, 0)[0]);
    state.activity = Activity::WaitForSipi;
    state
}
