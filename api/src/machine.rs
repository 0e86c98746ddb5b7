//! A machine that a program runs.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hindsight_cpu::stops::{StopConditions, StopHit};
use hindsight_devices::MachineRequest;
use hindsight_export::{Function, LocationError};
use hindsight_gdb::kernel;
use hindsight_gdb::memory::LinearMemory;
use hindsight_gdb::target::PhysicalMemory;
use hindsight_trace::{TraceHeader, TracedImage};
use hindsight_vmm::deterministic::{
    CheckpointLimits, DeterministicMachine, RunStop, TSC_HZ, Timeline,
};
use hindsight_vmm::memory::MachineMemory;
use hindsight_vmm::state::{RestoreError, Snapshot};
use hindsight_vmm::vcpu::crash::CrashCause;
use hindsight_vmm::vcpu::run_control::{GuestEnd, Outcome};

use crate::console::GuestOutput;
use crate::poll::{Poll, StopHandle, Ticker};
use crate::symbols::MachineSymbols;
use crate::trace::OpenTrace;
use crate::{Error, MachineBuilder, RegisterFile, Stop, Trace, TraceRequest, Until};

/// Instructions between two looks at the trace and calls of the poll function.
const SLICE: u64 = 1_000_000;

/// The lowest address of a Linux kernel.
const KERNEL_HALF: u64 = 1 << 63;

/// A deterministic machine that a program runs. It stands between two instructions.
pub struct Machine {
    pub(crate) timeline: Timeline,
    pub(crate) memory: MachineMemory,
    symbols: MachineSymbols,
    /// The instruction count at which a kernel's symbols were last looked for.
    searched: Option<u64>,
    console: GuestOutput,
    /// OutputBuffer that was taken already.
    taken: u64,
    image: TracedImage,
    trace: Option<OpenTrace>,
    poll: Option<Poll>,
    /// Whether [`StopHandle::stop`] was called.
    stopped: Arc<AtomicBool>,
    /// How the run ended, where the monitor does not hold the machine.
    ended: Option<Stop>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("count", &self.count())
            .finish_non_exhaustive()
    }
}

impl Machine {
    /// The configuration of a machine that boots the image at `path`.
    pub fn builder(path: impl AsRef<Path>) -> MachineBuilder {
        MachineBuilder::new(path.as_ref())
    }

    pub(crate) fn new(
        mut machine: DeterministicMachine,
        checkpoints: CheckpointLimits,
        symbols: MachineSymbols,
        console: GuestOutput,
        image: TracedImage,
    ) -> Result<Self, Error> {
        machine.hold_end();
        let memory = MachineMemory::new(machine.board().ram.map.clone());
        Ok(Self {
            timeline: Timeline::new(machine, checkpoints)?,
            memory,
            symbols,
            searched: None,
            console,
            taken: 0,
            image,
            trace: None,
            poll: None,
            stopped: Arc::default(),
            ended: None,
        })
    }

    /// Instructions that all processors together have retired.
    pub fn count(&self) -> u64 {
        self.timeline.icount()
    }

    /// The lowest count to which the machine can go back: 0, unless checkpoints were dropped.
    pub fn begin(&self) -> u64 {
        self.timeline.begin()
    }

    /// Number of processors.
    pub fn cpus(&mut self) -> usize {
        self.timeline.machine().retired().len()
    }

    /// The processor that executes the next instruction, unless it is halted.
    pub fn current_cpu(&mut self) -> usize {
        self.timeline.machine().current()
    }

    /// The machine's clock, in nanoseconds: it follows the instructions, and jumps while all
    /// processors are halted.
    pub fn time(&mut self) -> u64 {
        self.timeline.machine().board().time.clock.now()
    }

    /// Guest memory, in bytes.
    pub fn memory_size(&self) -> u64 {
        let ranges = self.memory.ram().iter();
        ranges.map(|range| range.end - range.start).sum()
    }

    /// The registers of processor `cpu`.
    ///
    /// # Errors
    ///
    /// When there is no such processor.
    pub fn registers(&mut self, cpu: usize) -> Result<RegisterFile, Error> {
        let cpus = self.cpus();
        let state = self.timeline.machine().state(cpu);
        state.map(RegisterFile).ok_or(Error::Cpu { cpu, cpus })
    }

    /// Sets a register of processor `cpu`, by its name in [`REGISTER_NAMES`](crate::REGISTER_NAMES).
    /// From here on the run is another one.
    ///
    /// # Errors
    ///
    /// When the register cannot be set, or not to this value.
    pub fn set_register(&mut self, cpu: usize, name: &str, value: u64) -> Result<(), Error> {
        let mut registers = self.registers(cpu)?;
        if !registers.set(name, value) {
            return Err(Error::Register(name.to_owned()));
        }
        let refuse = |source| Error::RegisterValue {
            name: name.to_owned(),
            value,
            source,
        };
        let invalid = |source| refuse(RestoreError::Vcpu { cpu, source });
        registers.0.check().map_err(invalid)?;
        self.begin_write();
        let set = self.timeline.machine().set_state(cpu, &registers.0);
        set.map(drop).map_err(refuse)
    }

    /// Makes what follows another run: later checkpoints and input are forgotten.
    pub(crate) fn begin_write(&mut self) {
        self.timeline.prepare_write();
        self.timeline.machine().forget_later_input();
    }

    /// Runs to its end, or until nothing wakes the guest.
    ///
    /// # Errors
    ///
    /// When the host fails.
    pub fn run(&mut self) -> Result<Stop, Error> {
        self.run_to(u64::MAX)
    }

    /// Runs `instructions` instructions.
    ///
    /// # Errors
    ///
    /// When the host fails.
    pub fn run_for(&mut self, instructions: u64) -> Result<Stop, Error> {
        self.run_to(self.count().saturating_add(instructions))
    }

    /// Runs to an instruction count. Where it is already behind, it does not run.
    ///
    /// # Errors
    ///
    /// When the host fails.
    pub fn run_to(&mut self, count: u64) -> Result<Stop, Error> {
        self.timeline
            .machine()
            .set_stops(&StopConditions::default());
        self.slices(count)
    }

    /// Runs until one of the conditions is met.
    ///
    /// An instruction that is next already does not count: the machine runs until it is next again.
    /// OutputBuffer that is repeated after going back does not count.
    ///
    /// # Errors
    ///
    /// When a location is no symbol, or the host fails.
    pub fn run_until(&mut self, until: &Until) -> Result<Stop, Error> {
        let mut stops = until.conditions.clone();
        for location in until.locations() {
            stops.execute.push(self.symbol(location)?);
        }
        let count = until
            .instructions
            .map_or(u64::MAX, |n| self.count().saturating_add(n));
        self.timeline.machine().set_stops(&stops);
        let stop = self.run_to_condition(count, &stops, until.text.as_deref());
        self.timeline
            .machine()
            .set_stops(&StopConditions::default());
        stop
    }

    fn run_to_condition(
        &mut self,
        count: u64,
        stops: &StopConditions,
        text: Option<&[u8]>,
    ) -> Result<Stop, Error> {
        let start = self.positions();
        let mut read = self.console.position();
        let begin = read;
        loop {
            let stop = match self.slice(count)? {
                None => continue,
                Some(stop) => stop,
            };
            match stop {
                SliceEnd::Port => {
                    let Some(text) = text else { continue };
                    let before = text.len().saturating_sub(1) as u64;
                    let output = self.console.since(read.saturating_sub(before).max(begin));
                    read = self.console.position();
                    if text.is_empty() || output.windows(text.len()).any(|window| window == text) {
                        return Ok(Stop::Printed);
                    }
                }
                SliceEnd::Stop(Stop::Reached { cpu, address })
                    if start.get(cpu) == self.positions().get(cpu) =>
                {
                    let mut others = stops.clone();
                    others.execute.retain(|&other| other != address);
                    self.timeline.machine().set_stops(&others);
                    let next = self.count().saturating_add(1).min(count);
                    let stop = self.slice(next);
                    self.timeline.machine().set_stops(stops);
                    match stop? {
                        Some(SliceEnd::Stop(Stop::Count)) if next < count => {}
                        Some(SliceEnd::Stop(stop)) => return Ok(stop),
                        None | Some(SliceEnd::Port) => {}
                    }
                }
                SliceEnd::Stop(stop) => return Ok(stop),
            }
        }
    }

    /// Where the processors are: retired instructions, and the address of the next one.
    fn positions(&mut self) -> Vec<(u64, Option<u64>)> {
        let machine = self.timeline.machine();
        let retired = machine.retired().into_iter().enumerate();
        let positions = retired.map(|(cpu, retired)| (retired, machine.code_address(cpu)));
        positions.collect()
    }

    /// Runs until `predicate` is true, which is called after every `every` instructions.
    ///
    /// # Errors
    ///
    /// When `every` is 0, or the host fails.
    pub fn run_until_true(
        &mut self,
        every: u64,
        mut predicate: impl FnMut(&mut Self) -> bool,
    ) -> Result<Stop, Error> {
        if every == 0 {
            return Err(Error::Every);
        }
        loop {
            let stop = self.run_for(every)?;
            if stop != Stop::Count {
                return Ok(stop);
            }
            if predicate(self) {
                return Ok(Stop::Predicate);
            }
        }
    }

    fn slices(&mut self, count: u64) -> Result<Stop, Error> {
        loop {
            match self.slice(count)? {
                Some(SliceEnd::Stop(stop)) => return Ok(stop),
                Some(SliceEnd::Port) | None => {}
            }
        }
    }

    /// Runs at most [`SLICE`] instructions towards `count`. Returns `None` if nothing stops there.
    fn slice(&mut self, count: u64) -> Result<Option<SliceEnd>, Error> {
        if self.trace.as_ref().is_some_and(OpenTrace::is_full) {
            return Ok(Some(Stop::TraceFull.into()));
        }
        let until = count.min(self.count().saturating_add(SLICE));
        let Some(stop) = self.polled(|timeline| timeline.run_to(until))? else {
            return Ok(Some(Stop::Interrupted.into()));
        };
        if stop != RunStop::Reached {
            return Ok(Some(self.slice_end(stop)));
        }
        if self.count() >= count {
            return Ok(Some(Stop::Count.into()));
        }
        let interrupted = self.poll.as_mut().is_some_and(|poll| (poll.function)());
        Ok(interrupted.then(|| Stop::Interrupted.into()))
    }

    /// Calls `run`, again and again while only the ticker interrupts it, and then polls. Returns
    /// `None` if the poll function stops it.
    fn polled<E>(
        &mut self,
        mut run: impl FnMut(&mut Timeline) -> Result<RunStop, E>,
    ) -> Result<Option<RunStop>, E> {
        loop {
            let running = self.poll.as_ref().map(|poll| poll.ticker.begin());
            let stop = run(&mut self.timeline);
            drop(running);
            let stop = stop?;
            if stop != RunStop::Interrupted || self.stopped.swap(false, Ordering::SeqCst) {
                return Ok(Some(stop));
            }
            let Some(poll) = &mut self.poll else {
                return Ok(Some(stop));
            };
            if (poll.function)() {
                return Ok(None);
            }
        }
    }

    fn slice_end(&mut self, stop: RunStop) -> SliceEnd {
        let stop = match stop {
            RunStop::Reached => Stop::Count,
            RunStop::Hit { cpu, hit } => match hit {
                StopHit::Execute(address) => Stop::Reached { cpu, address },
                StopHit::Watchpoint { at, write, .. } => Stop::Accessed {
                    cpu,
                    address: at,
                    write,
                },
                StopHit::Exception { vector, code } => Stop::Exception {
                    cpu,
                    vector,
                    error_code: code,
                },
                StopHit::Port { .. } | StopHit::Msr { .. } | StopHit::Control { .. } => {
                    return SliceEnd::Port;
                }
            },
            RunStop::Crashed { .. } => self.crash(),
            RunStop::AtEnd => self.guest_end(),
            RunStop::Ended => self.outcome(),
            RunStop::Delivered { .. } | RunStop::Interrupted => Stop::Interrupted,
        };
        SliceEnd::Stop(stop)
    }

    fn crash(&mut self) -> Stop {
        match self.timeline.machine().held_crash() {
            Some(crash) if *crash.cause() == CrashCause::Asleep => Stop::Asleep,
            Some(crash) => Stop::Crash(crash.summary()),
            None => Stop::Interrupted,
        }
    }

    fn guest_end(&mut self) -> Stop {
        match self.timeline.machine().held_end() {
            Some(GuestEnd::Request(MachineRequest::Exit(code))) => Stop::Exit(code),
            Some(GuestEnd::Request(MachineRequest::PowerOff)) => Stop::PowerOff,
            Some(GuestEnd::Request(MachineRequest::Reset)) => Stop::Reset,
            Some(GuestEnd::Input) => Stop::EndOfInput,
            None => Stop::Interrupted,
        }
    }

    fn outcome(&mut self) -> Stop {
        let stop = match self.timeline.machine().take_outcome() {
            Some(Outcome::Exit(code)) => Some(Stop::Exit(code)),
            Some(Outcome::PowerOff) => Some(Stop::PowerOff),
            Some(Outcome::Reset) => Some(Stop::Reset),
            Some(Outcome::Crash(crash)) => Some(Stop::Crash(crash.summary())),
            Some(Outcome::Failed(error)) => Some(Stop::Failed(error.to_string())),
            Some(Outcome::Quit) => Some(Stop::EndOfInput),
            Some(Outcome::Halted { .. } | Outcome::Timeout(_)) => Some(Stop::Asleep),
            None => None,
        };
        if let Some(stop) = stop {
            self.ended = Some(stop);
        }
        self.ended.clone().unwrap_or(Stop::Interrupted)
    }

    /// Goes to an instruction count, backwards or forwards. Going back undoes what the program has
    /// written since.
    ///
    /// Below [`Machine::begin`] it goes to the beginning. OutputBuffer is not taken back.
    ///
    /// # Errors
    ///
    /// When the machine records and is to go back, or the host fails.
    pub fn seek(&mut self, count: u64) -> Result<Stop, Error> {
        if count >= self.count() {
            return self.run_to(count);
        }
        if self.trace.is_some() {
            return Err(Error::Traced);
        }
        let machine = self.timeline.machine();
        machine.set_stops(&StopConditions::default());
        machine.drop_queued_input();
        match self.polled(|timeline| timeline.go_to(count))? {
            Some(RunStop::Reached) => Ok(Stop::Count),
            None => Ok(Stop::Interrupted),
            Some(stop) => match self.slice_end(stop) {
                SliceEnd::Stop(stop) => Ok(stop),
                SliceEnd::Port => Ok(Stop::Interrupted),
            },
        }
    }

    /// Goes back `instructions` instructions.
    ///
    /// # Errors
    ///
    /// As [`Machine::seek`].
    pub fn back(&mut self, instructions: u64) -> Result<Stop, Error> {
        self.seek(self.count().saturating_sub(instructions))
    }

    /// The whole state of the machine, with what the guest wrote to its disks.
    ///
    /// # Errors
    ///
    /// When guest memory cannot be read.
    pub fn snapshot(&mut self) -> Result<Snapshot, Error> {
        self.timeline.commit_write()?;
        Ok(self.timeline.machine().save()?)
    }

    /// Brings the machine to a state of a machine with the same configuration. It cannot go back
    /// beyond it.
    ///
    /// # Errors
    ///
    /// When the snapshot is of another configuration or is invalid, or the machine records.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), Error> {
        if self.trace.is_some() {
            return Err(Error::Traced);
        }
        self.timeline.restart_from(snapshot)?;
        self.timeline.machine().drop_queued_input();
        // Another kernel may run, or this one at other addresses.
        self.symbols.forget_kernel();
        self.searched = None;
        Ok(())
    }

    /// Writes the whole state of the machine to a file, with what the guest wrote to its disks.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let snapshot = self.snapshot()?;
        let file = File::create(path).map_err(|source| Error::File {
            path: path.to_owned(),
            source,
        })?;
        snapshot.write(file).map_err(|source| Error::SnapshotFile {
            path: path.to_owned(),
            source,
        })
    }

    /// Brings the machine to the state in a file of [`Machine::save`], of a machine with the same
    /// configuration.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, or as [`Machine::restore`].
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| Error::File {
            path: path.to_owned(),
            source,
        })?;
        let snapshot = Snapshot::read(file, self.memory_size());
        let snapshot = snapshot.map_err(|source| Error::SnapshotFile {
            path: path.to_owned(),
            source,
        })?;
        self.restore(&snapshot)
    }

    /// Records what the processors do from here on, until [`Machine::stop_trace`].
    ///
    /// # Errors
    ///
    /// When the machine records already, or the host has no thread left.
    pub fn start_trace(&mut self, options: impl Into<TraceRequest>) -> Result<(), Error> {
        if self.trace.is_some() {
            return Err(Error::Traced);
        }
        let cpus = self.cpus();
        let header = TraceHeader {
            writer: format!("hindsight-api {}", env!("CARGO_PKG_VERSION")),
            image: self.image.clone(),
            cpus: u32::try_from(cpus).unwrap_or(1),
            tsc_hz: TSC_HZ,
            seed: Some(0),
            start: self.timeline.machine().code_address(0).unwrap_or(0),
            ..TraceHeader::default()
        };
        let trace = OpenTrace::begin(header, &options.into())?;
        self.timeline.machine().trace(&trace.writer);
        self.trace = Some(trace);
        Ok(())
    }

    /// Ends the trace and returns it.
    ///
    /// # Errors
    ///
    /// When the machine records nothing.
    pub fn stop_trace(&mut self) -> Result<Trace, Error> {
        let trace = self.trace.take().ok_or(Error::NoTrace)?;
        self.timeline.machine().stop_trace();
        trace.finish()
    }

    /// Sends bytes to COM1. The guest gets them when it runs, as fast as it takes them.
    ///
    /// Going back drops what the guest has not taken. What it has taken is repeated when the machine
    /// runs forwards again, until the program writes or sends something else.
    ///
    /// # Errors
    ///
    /// When more than 4096 bytes would wait.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> Result<(), Error> {
        let bytes = bytes.as_ref();
        match self.timeline.send_input(bytes) {
            true => Ok(()),
            false => Err(Error::Input { len: bytes.len() }),
        }
    }

    /// What the guest has printed on COM1 and the debug console: the last megabytes.
    pub fn output(&self) -> Vec<u8> {
        self.console.since(0)
    }

    /// What the guest has printed since the last call.
    pub fn take_output(&mut self) -> Vec<u8> {
        let output = self.console.since(self.taken);
        self.taken = self.console.position();
        output
    }

    /// The address of a symbol, or of a number such as `0x1000`.
    ///
    /// Symbols are those of the image, of the files of [`MachineBuilder::symbols`], and of a Linux
    /// kernel once it runs.
    ///
    /// # Errors
    ///
    /// When there is no such symbol, or several functions have the name.
    pub fn symbol(&mut self, name: &str) -> Result<u64, Error> {
        match self.symbols.locate(name) {
            Err(LocationError::Unknown(_)) if self.find_kernel() => {}
            found => return Ok(found?),
        }
        Ok(self.symbols.locate(name)?)
    }

    /// The name of an address, such as `main+0x12`; the address if no function contains it.
    pub fn name_of(&mut self, address: u64) -> String {
        match self.function(address) {
            Some(function) if function.address == address => function.name.clone(),
            Some(function) => format!("{}+{:#x}", function.name, address - function.address),
            None => format!("{address:#x}"),
        }
    }

    /// The function that contains an address.
    pub fn function(&mut self, address: u64) -> Option<&Function> {
        if self.symbols.function(address).is_none() && address >= KERNEL_HALF {
            self.find_kernel();
        }
        self.symbols.function(address)
    }

    /// All functions whose symbols are known.
    pub fn functions(&mut self) -> impl Iterator<Item = &Function> {
        self.find_kernel();
        self.symbols.functions()
    }

    /// Looks for the symbols of a Linux kernel that runs. Returns whether it found them now.
    fn find_kernel(&mut self) -> bool {
        let count = self.count();
        if self.symbols.has_kernel() || self.searched == Some(count) {
            return false;
        }
        self.searched = Some(count);
        let Some(state) = self.timeline.machine().state(0) else {
            return false;
        };
        if !state.is_long_mode() || state.rip.max(state.msrs.lstar) < KERNEL_HALF {
            return false;
        }
        let memory = LinearMemory {
            memory: &self.memory,
            state: &state,
        };
        let found = kernel::find_symbols(&memory, &|| false);
        if let Some(symbols) = &found {
            self.symbols.set_kernel(symbols);
        }
        found.is_some()
    }

    /// A handle by which another thread stops a run.
    pub fn stop_handle(&mut self) -> StopHandle {
        StopHandle {
            machine: self.timeline.machine().stop_handle(),
            stopped: self.stopped.clone(),
        }
    }

    /// Calls `poll` about ten times a second while the machine runs, and each million instructions;
    /// the run stops if it returns true.
    pub fn set_poll(&mut self, poll: impl FnMut() -> bool + Send + 'static) {
        self.poll = Some(Poll {
            function: Box::new(poll),
            ticker: Ticker::start(self.timeline.machine().stop_handle()),
        });
    }
}

impl Drop for Machine {
    /// Ends the thread of a trace that was not stopped.
    fn drop(&mut self) {
        if self.trace.is_some() {
            // Nobody reads the trace.
            let _ = self.stop_trace();
        }
    }
}

/// Why a slice of a run ended.
enum SliceEnd {
    /// The guest wrote to a port that it prints on.
    Port,
    /// Anything else.
    Stop(Stop),
}

impl From<Stop> for SliceEnd {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}
