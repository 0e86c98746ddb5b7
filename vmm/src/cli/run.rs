//! `hindsight run`.

mod input;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::profile::{CpuProfile, ProfileError};

use crate::boot::{Mode, Module, Plan, Protocol};
use crate::cli::{Status, gdb, trace};
use crate::console::{self, Backend, Console, Releaser};
use crate::deterministic::DeterministicMachine;
use crate::deterministic::input_log::InputFeed;
use crate::machine::start::{self, StartDecision};
use crate::machine::{Config, MachineError, Prepared};
use crate::platform::Sinks;
use crate::vcpu::board::Board;
use crate::vcpu::crash::FinalState;
use crate::vcpu::engine::ForcedSwitch;
use crate::vcpu::engine::policy::{Engine, EngineChoice};
use crate::vcpu::run_control::Outcome;
use crate::vcpu::stats::RunReport;
use input::{ending, feed, input_log, no_input};

/// The largest image, initrd or module that is read, in bytes.
const FILE_MAX: u64 = 4 << 30;

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// The guest image
    image: PathBuf,
    /// How to boot it; found by looking at it unless given
    #[arg(long, value_enum, default_value_t = ProtocolArg::Auto)]
    protocol: ProtocolArg,
    /// Initial RAM disk
    #[arg(long, value_name = "FILE")]
    initrd: Option<PathBuf>,
    /// Kernel command line
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        allow_hyphen_values = true
    )]
    cmdline: String,
    /// A module for PVH and multiboot images, with its command line; may be repeated
    #[arg(long = "module", value_name = "FILE[=ARGS]")]
    modules: Vec<String>,
    /// Where to load a flat image
    #[arg(long, value_name = "ADDRESS", value_parser = number)]
    load_address: Option<u64>,
    /// Where to enter a flat image [default: the load address]
    #[arg(long, value_name = "ADDRESS", value_parser = number)]
    entry: Option<u64>,
    /// The mode in which to enter a flat image
    #[arg(long, value_enum)]
    mode: Option<ModeArg>,
    /// Memory, in bytes or with a suffix K, M, G, T
    #[arg(long, short, value_name = "SIZE", default_value = "128M", value_parser = size)]
    memory: u64,
    /// Back memory by huge pages
    #[arg(long)]
    hugepages: bool,
    /// Processors, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: usize,
    /// The processor the guest sees: skylake-server, portable-v1 or host, less and more facilities (such
    /// as skylake-server,-pebs,+l2cat,pmu=8), or a TOML file that says so [default: skylake-server, or
    /// portable-v1 if deterministic]
    #[arg(long, value_name = "PROFILE|FILE.toml", value_parser = profile, allow_hyphen_values = true)]
    cpu: Option<CpuProfile>,
    /// What executes the guest's code: KVM, the interpreter, or the better one for this host
    #[arg(long, value_enum, default_value_t = EngineArg::Auto)]
    engine: EngineArg,
    /// COM1: stdio (Ctrl-A x quits, Ctrl-A h helps), none, file:PATH or unix:PATH
    #[arg(long, value_name = "WHERE", default_value = "stdio")]
    serial: Backend,
    /// The debug console, port 0xe9: where its output goes
    #[arg(long, value_name = "WHERE", default_value = "none")]
    debugcon: Backend,
    /// Where branch trace messages go, one line each: a file, or - for standard output
    #[arg(long, value_name = "FILE")]
    btm: Option<PathBuf>,
    /// End the run after so many seconds, with exit status 124
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// Run the same way every time: virtual time, one thread, no input, in the interpreter
    #[arg(long)]
    deterministic: bool,
    /// What RDRAND and RDSEED give in deterministic mode
    #[arg(long, value_name = "N", default_value = "0", value_parser = number, requires = "deterministic")]
    seed: u64,
    /// Take input in deterministic mode, and write it with its place to a file
    #[arg(
        long,
        value_name = "FILE",
        requires = "deterministic",
        conflicts_with = "replay_input"
    )]
    record_input: Option<PathBuf>,
    /// Give the guest the input of a file that --record-input wrote
    #[arg(long, value_name = "FILE", requires = "deterministic")]
    replay_input: Option<PathBuf>,
    /// The branch predictor and the caches behind performance events: off leaves such events at 0
    #[arg(long, value_enum, default_value_t = ModelsArg::On)]
    models: ModelsArg,
    #[command(flatten)]
    gdb: gdb::GdbArgs,
    /// For tests of Hindsight: run in KVM and in the interpreter in turn, changing after so many
    /// exits (N) or so much time (Nms)
    #[arg(long, value_name = "N|Nms", value_parser = every, conflicts_with = "deterministic")]
    switch_every: Option<ForcedSwitch>,
    /// Print figures about the run to standard error at its end
    #[arg(long)]
    stats: bool,
    #[arg(long, value_name = "KINDS", help = trace::help())]
    trace: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProtocolArg {
    Auto,
    Flat,
    Pvh,
    Elf,
    Multiboot,
    Linux,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ModelsArg {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeArg {
    Real,
    Protected,
    Long,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineArg {
    Auto,
    Kvm,
    Interp,
}

impl From<EngineArg> for EngineChoice {
    fn from(engine: EngineArg) -> Self {
        match engine {
            EngineArg::Auto => Self::Auto,
            EngineArg::Kvm => Self::Only(Engine::Kvm),
            EngineArg::Interp => Self::Only(Engine::Interp),
        }
    }
}

/// A number in decimal, or in hexadecimal with 0x.
pub(super) fn number(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "not a number (decimal, or hexadecimal with 0x)".to_owned())
}

pub(super) fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.chars().last().map(|c| c.to_ascii_uppercase()) {
        Some('K') => (&text[..text.len() - 1], 10),
        Some('M') => (&text[..text.len() - 1], 20),
        Some('G') => (&text[..text.len() - 1], 30),
        Some('T') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let value = number(digits).map_err(|_| "not a size such as 128M, 1G or 0x8000000")?;
    value
        .checked_mul(1 << shift)
        .ok_or_else(|| "more than 2^64 bytes".to_owned())
}

/// The largest profile file that is read, in bytes.
const PROFILE_MAX: u64 = 64 << 10;

/// A profile, or the name of a file with one.
fn profile(text: &str) -> Result<CpuProfile, String> {
    let is_file = Path::new(text).extension().is_some_and(|e| e == "toml");
    if !is_file {
        return text
            .parse()
            .map_err(|error: ProfileError| error.to_string());
    }
    let file = File::open(text).map_err(|error| error.to_string())?;
    let mut content = String::new();
    let read = file.take(PROFILE_MAX + 1).read_to_string(&mut content);
    read.map_err(|error| error.to_string())?;
    if content.len() as u64 > PROFILE_MAX {
        return Err(format!("larger than {PROFILE_MAX} bytes"));
    }
    CpuProfile::from_toml(&content).map_err(|error| error.to_string())
}

fn every(text: &str) -> Result<ForcedSwitch, String> {
    let number = |digits: &str| digits.parse().ok().filter(|&n: &u64| n != 0);
    let every = match text.strip_suffix("ms") {
        Some(digits) => number(digits).map(|ms| ForcedSwitch::Time(Duration::from_millis(ms))),
        None => number(text).map(ForcedSwitch::Exits),
    };
    every.ok_or_else(|| "a number of exits such as 10, or a time such as 5ms".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| "not a number of seconds")?;
    Duration::try_from_secs_f64(value).map_err(|_| "not a possible number of seconds".to_owned())
}

/// Reads a whole file of at most [`FILE_MAX`] bytes.
fn read(what: &str, path: &Path) -> anyhow::Result<Vec<u8>> {
    let name = path.display();
    let mut file = File::open(path).with_context(|| format!("{what} {name} cannot be opened"))?;
    let metadata = file
        .metadata()
        .with_context(|| format!("{what} {name} cannot be read"))?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        bail!("{what} {name} is a directory");
    }
    // A pipe ends; a device such as /dev/zero does not.
    if !kind.is_file() && !kind.is_fifo() {
        bail!("{what} {name} is not a file");
    }
    // One byte more than a file has, so that reading finds its end without growing.
    let expected = usize::try_from(metadata.len().min(FILE_MAX)).unwrap_or(0);
    let mut bytes = Vec::with_capacity(expected + 1);
    let limited = Read::by_ref(&mut file).take(FILE_MAX + 1);
    let read = { limited }.read_to_end(&mut bytes);
    read.with_context(|| format!("{what} {name} cannot be read"))?;
    if bytes.len() as u64 > FILE_MAX {
        bail!("{what} {name} is larger than {FILE_MAX} bytes");
    }
    Ok(bytes)
}

/// The files of a run, read before anything is built.
struct Files {
    image: Vec<u8>,
    initrd: Option<Vec<u8>>,
    modules: Vec<ModuleFile>,
}

/// A module with its command line and its name.
struct ModuleFile {
    data: Vec<u8>,
    args: String,
    name: Vec<u8>,
}

/// What guests are told of a file's place: its name.
fn file_name(path: &Path) -> Vec<u8> {
    let name = path.file_name().unwrap_or_default();
    name.as_encoded_bytes().to_vec()
}

impl Files {
    fn read(args: &RunArgs) -> anyhow::Result<Self> {
        let image = read("image", &args.image)?;
        let initrd = args
            .initrd
            .as_deref()
            .map(|path| read("initrd", path))
            .transpose()?;
        let modules = args.modules.iter().map(|module| {
            let (path, line) = module.split_once('=').unwrap_or((module, ""));
            let path = Path::new(path);
            Ok(ModuleFile {
                data: read("module", path)?,
                args: line.to_owned(),
                name: file_name(path),
            })
        });
        Ok(Self {
            image,
            initrd,
            modules: modules.collect::<anyhow::Result<_>>()?,
        })
    }

    fn plan<'a>(&'a self, args: &RunArgs) -> Plan<'a> {
        Plan {
            image: &self.image,
            protocol: match args.protocol {
                ProtocolArg::Auto => None,
                ProtocolArg::Flat => Some(Protocol::Flat),
                ProtocolArg::Pvh => Some(Protocol::Pvh),
                ProtocolArg::Elf => Some(Protocol::Elf),
                ProtocolArg::Multiboot => Some(Protocol::Multiboot),
                ProtocolArg::Linux => Some(Protocol::Linux),
            },
            name: file_name(&args.image),
            initrd_name: args.initrd.as_deref().map_or_else(Vec::new, file_name),
            initrd: self.initrd.as_deref(),
            modules: self
                .modules
                .iter()
                .map(|module| Module {
                    data: &module.data,
                    args: module.args.clone().into_bytes(),
                    name: module.name.clone(),
                })
                .collect(),
            cmdline: args.cmdline.clone().into_bytes(),
            load_address: args.load_address,
            entry: args.entry,
            mode: args.mode.map(|mode| match mode {
                ModeArg::Real => Mode::Real,
                ModeArg::Protected => Mode::Protected,
                ModeArg::Long => Mode::Long,
            }),
        }
    }
}

/// Runs a guest to its end.
pub(super) fn run(args: RunArgs) -> anyhow::Result<Status> {
    let files = Files::read(&args)?;
    let StartDecision {
        decision,
        host,
        policy,
    } = decide(&args)?;
    let config = Config {
        memory: args.memory,
        huge_pages: args.hugepages,
        cpus: args.cpus,
        cpu: cpu(&args)?,
        engine: decision.engine,
    };
    let image = args.image.display();
    let prepared = Prepared::new(&config, &files.plan(&args))
        .with_context(|| image.to_string())?
        .with_uarch(args.models == ModelsArg::On);
    let log = input_log(&args)?;
    let prepared = match policy {
        Some(policy) => prepared.changing(policy, args.switch_every),
        None if args.deterministic => prepared.deterministic(args.seed),
        None => prepared,
    };
    drop(files);
    // Only now: what a failure above left behind would be files and sockets of no use.
    trace::start(args.trace.as_deref())?;
    tracing::trace!(target: "mode", "{}: {}", decision.engine, decision.because);
    let mut serial = Console::open(&args.serial).context("--serial")?;
    let mut debugcon = Console::open(&args.debugcon).context("--debugcon")?;
    let sinks = Sinks {
        serial: serial.output(),
        debugcon: debugcon.output(),
        btm: args.btm.as_deref().map(messages).transpose()?,
    };
    let mut machine = prepared.build(host.as_ref(), sinks)?;
    let (feed, inbox) = feed(&args, log)?;
    machine.set_feed(feed);
    if !args.deterministic && (args.engine, decision.engine) == (EngineArg::Auto, Engine::Interp) {
        let _ = writeln!(
            io::stderr(),
            "hindsight: in the interpreter: {}",
            decision.because
        );
    }
    let (quit, signalled) = (ending(&machine, &inbox), ending(&machine, &inbox));
    let waiting = [serial.releaser(), debugcon.releaser()];
    let signalled = move |_| {
        waiting.iter().for_each(Releaser::release);
        signalled();
    };
    console::watch_signals(signalled).context("signals")?;
    let input = match inbox {
        Some(inbox) => Box::new(move |bytes: &[u8]| inbox.put(bytes)),
        None if args.deterministic => no_input(),
        None => machine.serial_input(),
    };
    serial.start_input(input, quit).context("--serial")?;
    if matches!(args.debugcon, Backend::Unix(_)) {
        // Its client is accepted, and what it sends is dropped.
        debugcon
            .start_input(Box::new(<[u8]>::len), || {})
            .context("--debugcon")?;
    }
    let board = machine.board().clone();
    let debugger = gdb::start(&args.gdb, &mut machine)?;
    let start = Instant::now();
    let outcome = machine.run(args.timeout, || {
        serial.release();
        debugcon.release();
    })?;
    let host_time = start.elapsed();
    if let Some(debugger) = debugger {
        debugger.finish(gdb::exit_status(&outcome));
    }
    if let Some(messages) = &board.buses.btm {
        messages.flush();
    }
    // All output is out, and the terminal as it was, before we say anything.
    drop((serial, debugcon));
    if args.stats {
        print_stats(&board, host_time, &outcome);
    }
    Ok(report(outcome))
}

/// Opens the listener of branch trace messages.
fn messages(path: &Path) -> anyhow::Result<Box<dyn Write + Send>> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdout()));
    }
    let file = File::create(path).with_context(|| format!("--btm {}", path.display()))?;
    Ok(Box::new(io::BufWriter::new(file)))
}

/// Builds a deterministic machine that the caller runs; its consoles go nowhere.
pub(super) fn determined(args: &RunArgs) -> anyhow::Result<DeterministicMachine> {
    let files = Files::read(args)?;
    wanted_engine(args)?;
    let config = Config {
        memory: args.memory,
        huge_pages: args.hugepages,
        cpus: args.cpus,
        cpu: cpu(args)?,
        engine: Engine::Interp,
    };
    let image = args.image.display();
    let prepared = Prepared::new(&config, &files.plan(args))
        .with_context(|| image.to_string())?
        .with_uarch(args.models == ModelsArg::On);
    let log = input_log(args)?;
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(io::sink()),
        btm: None,
    };
    let mut machine = prepared.deterministic(args.seed).build(None, sinks)?;
    machine.set_feed(log.map(InputFeed::replay).unwrap_or_default());
    Ok(machine.into_deterministic()?)
}

impl RunArgs {
    /// KVM is asked for by name.
    pub(super) fn is_for_kvm(&self) -> bool {
        self.engine == EngineArg::Kvm
    }
}

/// Deterministic mode is for the interpreter.
fn wanted_engine(args: &RunArgs) -> anyhow::Result<EngineChoice> {
    match (args.deterministic, args.engine) {
        (true, EngineArg::Kvm) => Err(MachineError::Deterministic.into()),
        (true, _) => Ok(EngineChoice::Only(Engine::Interp)),
        // KVM records no branches, and has only the host's processor.
        (false, EngineArg::Auto)
            if args.gdb.needs_interpreter()
                || args.cpu.is_some_and(|cpu| cpu.needs_interpreter()) =>
        {
            Ok(EngineChoice::Only(Engine::Interp))
        }
        (false, engine) => Ok(engine.into()),
    }
}

fn decide(args: &RunArgs) -> anyhow::Result<StartDecision> {
    let wanted = wanted_engine(args)?;
    if args.switch_every.is_none() {
        return Ok(start::decide(wanted)?);
    }
    if wanted == EngineChoice::Only(Engine::Interp) {
        bail!("--switch-every needs KVM: with --engine interp there is nothing to switch to");
    }
    Ok(start::decide_both()?)
}

fn cpu(args: &RunArgs) -> anyhow::Result<CpuProfile> {
    match (args.cpu, args.deterministic) {
        (Some(cpu), true) if cpu.model() != CpuModel::PortableV1 => {
            bail!("--deterministic needs --cpu portable-v1: other processors depend on the host's")
        }
        (Some(cpu), _) => Ok(cpu),
        (None, true) => Ok(CpuModel::PortableV1.into()),
        (None, false) => Ok(CpuProfile::default()),
    }
}

fn print_stats(board: &Board, host_time: Duration, outcome: &Outcome) {
    let report = RunReport::new(board.run.stats(), board.run.engine.stats(), host_time).to_string();
    for line in report.lines() {
        let _ = writeln!(io::stderr(), "hindsight: {line}");
    }
    // What ended from outside ended at a place that no other run ends at.
    let from_outside = match outcome {
        Outcome::Timeout(_) | Outcome::Failed(_) => true,
        Outcome::Quit => !board.run.end.by_input(),
        _ => false,
    };
    if let Some(hash) = board.run_hash().filter(|_| !from_outside) {
        let _ = writeln!(io::stderr(), "hindsight: hash {hash:032x}");
    }
}

fn timeout(last: &[FinalState]) -> String {
    let mut text = "the time limit passed".to_owned();
    for state in last {
        text.push('\n');
        text.push_str(state.to_string().trim_end());
    }
    text
}

/// Tells the user how it ended, where the guest has not.
fn report(outcome: Outcome) -> Status {
    let (status, text) = match outcome {
        Outcome::Exit(code) => (Status::Guest(code), None),
        Outcome::PowerOff | Outcome::Quit => (Status::Success, None),
        Outcome::Reset => (
            Status::Reset,
            Some("the guest asked for a reset".to_owned()),
        ),
        Outcome::Timeout(last) => (Status::Timeout, Some(timeout(&last))),
        Outcome::Crash(crash) => (Status::GuestCrash, Some(crash.to_string())),
        Outcome::Failed(error) => {
            let error = anyhow::Error::from(*error);
            (Status::Internal, Some(format!("{error:#}")))
        }
    };
    if let Some(text) = text {
        let _ = writeln!(io::stderr(), "hindsight: {}", text.trim_end());
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes_and_limits() {
        assert_eq!(size("128M"), Ok(128 << 20));
        assert_eq!(size("0x1000"), Ok(0x1000));
        assert_eq!(size("1g"), Ok(1 << 30));
        assert!(size("").is_err() && size("M").is_err() && size("99999999T").is_err());
    }

    #[test]
    fn switching_is_told_in_exits_or_milliseconds() {
        assert_eq!(every("10"), Ok(ForcedSwitch::Exits(10)));
        assert_eq!(
            every("5ms"),
            Ok(ForcedSwitch::Time(Duration::from_millis(5)))
        );
        assert!(every("0").is_err() && every("0ms").is_err() && every("ms").is_err());
    }

    #[test]
    fn seconds_refuse_what_is_no_duration() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert!(seconds("-1").is_err() && seconds("nan").is_err() && seconds("x").is_err());
    }
}
