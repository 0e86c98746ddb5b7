//! All options of `hindsight run`: one field each.
//!
//! A field's documentation is its help; its `#[arg]` attribute says how it is written on the command
//! line, and its default is in the [`Default`] of its group. A field that is an [`Option`] has no
//! default, or one that depends on other options ([`RunConfig::with_defaults`]).
//!
//! To add an option, add a field to a group, and use it. A type that is written as one word implements
//! [`OptionValue`](super::OptionValue); options that exclude each other get a row in
//! [`RunConfig::check`]. Tests name what else must follow: the file in
//! `docs/reference/configuration.md`, and a sample value.

use std::time::Duration;

use clap::{Args, ValueHint};
use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::profile::CpuProfile;
use serde::{Deserialize, Serialize};

use super::choices::{EngineArg, ModeArg, ModelsArg, PreferArg, ProtocolArg, SandboxArg};
use super::option_word::OptionWord;
use super::paths::FilePath;
use super::values::{
    BranchRecord, BtmTarget, DisplayTarget, GuestAddress, ModuleArg, Number, Size,
};
use crate::cli::logging::{LogFilter, LogSettings, TraceSpec, trace_help};
use crate::console::Backend;
use crate::deterministic::CheckpointLimits;
use crate::output::RunOutputs;
use crate::vcpu::engine::ForcedSwitch;
use crate::vcpu::translation::{TranslateAfter, TranslationPolicy};
use crate::virtio::disk::DiskSpec;
use crate::virtio::net::NetSpec;
use crate::virtio::share::ShareSpec;
use crate::virtio::vsock::VsockSpec;
use hindsight_gdb::ListenAddress;

/// Every option of `hindsight run`.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RunConfig {
    /// The guest image, and how to boot it.
    #[command(flatten)]
    pub boot: BootOptions,
    /// Memory, processors, engine.
    #[command(flatten)]
    pub machine: MachineOptions,
    /// Devices on the PCI bus.
    #[command(flatten)]
    pub devices: DeviceOptions,
    /// Where the guest's output goes.
    #[command(flatten)]
    pub console: ConsoleOptions,
    /// Deterministic runs and their input.
    #[command(flatten)]
    pub determinism: DeterminismOptions,
    /// Debuggers.
    #[command(flatten)]
    pub debugging: DebugOptions,
    /// How the run ends, and what is printed about it.
    #[command(flatten)]
    pub run: RunOptions,
    /// What the monitor logs.
    #[command(flatten)]
    pub log: LogOptions,
}

/// The guest image, and how to boot it.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[command(next_help_heading = "Boot")]
pub struct BootOptions {
    /// Guest image to boot
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    pub image: Option<FilePath>,
    /// Start in the firmware in FILE (such as SeaBIOS) at the reset vector, which boots from a --disk,
    /// instead of an IMAGE
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub firmware: Option<FilePath>,
    /// Variables of --firmware: FILE is a copy of those of the firmware (such as OVMF_VARS_4M.fd), which the
    /// guest changes, but not in a deterministic run
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub firmware_vars: Option<FilePath>,
    /// Option ROM of the screen of --display, which SeaBIOS runs, such as that of Debian's seabios
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub vga_bios: Option<FilePath>,
    /// Boot protocol; auto detects it from the image
    #[arg(long, value_enum)]
    pub protocol: ProtocolArg,
    /// Initial RAM disk
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub initrd: Option<FilePath>,
    /// Kernel command line
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline: String,
    /// Module of a PVH or multiboot image, with its command line; may be repeated
    #[arg(long, value_name = "FILE[=ARGS]", value_hint = ValueHint::FilePath)]
    pub module: Vec<OptionWord<ModuleArg>>,
    /// Guest-physical address at which to load a flat image [default: depends on --mode]
    #[arg(long, value_name = "ADDRESS")]
    pub load_address: Option<OptionWord<GuestAddress>>,
    /// Guest-physical address at which to enter a flat image [default: the load address]
    #[arg(long, value_name = "ADDRESS")]
    pub entry: Option<OptionWord<GuestAddress>>,
    /// Processor mode in which to enter a flat image
    #[arg(long, value_enum)]
    pub mode: Option<ModeArg>,
}

/// Memory, processors, engine.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[command(next_help_heading = "Machine")]
pub struct MachineOptions {
    /// Guest memory in bytes, or with a suffix K, M, G or T (binary: 1M is 1 MiB)
    #[arg(long, short, value_name = "SIZE")]
    pub memory: OptionWord<Size>,
    /// Back guest memory with huge pages
    #[arg(long)]
    pub hugepages: bool,
    /// Number of vCPUs, 1 to 64
    #[arg(long, value_name = "N")]
    pub cpus: usize,
    /// Processor that the guest sees: skylake-server, portable-v1, portable-v2 or host, with
    /// facilities added and removed (such as skylake-server,-pebs,+l2cat,pmu=8), or a TOML file with a
    /// profile [default: skylake-server, or portable-v2 if deterministic]
    #[arg(long, value_name = "PROFILE|FILE.toml", allow_hyphen_values = true)]
    #[arg(value_hint = ValueHint::FilePath)]
    pub cpu: Option<OptionWord<CpuProfile>>,
    /// Engine that executes the guest: KVM, the interpreter, or the better one for this host
    #[arg(long, value_enum)]
    pub engine: EngineArg,
    /// What --engine auto prefers on a host whose KVM is not exact, or not known to be
    #[arg(long, value_enum)]
    pub prefer: PreferArg,
    /// When the interpreter translates a block of code: off, auto, always, or after so many runs
    #[arg(long, value_name = "off|auto|always|N")]
    pub translate: OptionWord<TranslateAfter>,
    /// Most memory for translated code of one vCPU; when it is full, code is translated again
    #[arg(long, value_name = "SIZE")]
    pub translate_memory: OptionWord<Size>,
    /// Branch predictor and cache models, for the performance events that depend on them; off leaves
    /// those events at 0
    #[arg(long, value_enum)]
    pub models: ModelsArg,
}

impl Default for MachineOptions {
    fn default() -> Self {
        Self {
            memory: OptionWord(Size::mib(128)),
            hugepages: false,
            cpus: 1,
            cpu: None,
            engine: EngineArg::default(),
            prefer: PreferArg::default(),
            translate: OptionWord::default(),
            translate_memory: OptionWord(Size(TranslationPolicy::DEFAULT_MEMORY)),
            models: ModelsArg::default(),
        }
    }
}

/// Devices on the PCI bus.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[command(next_help_heading = "Devices")]
pub struct DeviceOptions {
    /// Disk with the contents of FILE; ro: the guest cannot write, snapshot: its changes are thrown away;
    /// may be repeated
    #[arg(
        long,
        value_name = "FILE[,ro][,snapshot][,backing][,format=raw|qcow2|vmdk]"
    )]
    #[arg(value_hint = ValueHint::FilePath)]
    pub disk: Vec<OptionWord<DiskSpec>>,
    /// CD-ROM drive with the disc in the image FILE (ISO)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub cdrom: Option<FilePath>,
    /// Folder that the guest may mount as virtiofs by TAG; rw: the guest may change the files; may be
    /// repeated
    #[arg(long, value_name = "DIR=TAG[,rw]", value_hint = ValueHint::DirPath)]
    pub share: Vec<OptionWord<ShareSpec>>,
    /// Network: none, or user without privileges, by the program passt, with ports of this machine that
    /// lead to the guest's [default: none]
    #[arg(long, value_name = "user[,hostfwd=PROTO:[ADDRESS]:PORT-:PORT]|none")]
    pub net: Option<OptionWord<NetSpec>>,
    /// Sockets between the guest, which has context identifier N, and unix sockets: clients of PATH that
    /// write `CONNECT <port>` reach the guest, and port P of the host is PATH_P
    #[arg(long, value_name = "cid=N,socket=PATH", value_hint = ValueHint::FilePath)]
    pub vsock: Option<OptionWord<VsockSpec>>,
    /// Source of random numbers: the host's, or those of --seed in a deterministic run
    #[arg(long)]
    pub rng: bool,
}

/// Where the guest's output goes.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[command(next_help_heading = "Console")]
pub struct ConsoleOptions {
    /// COM1: stdio (Ctrl-A x quits, Ctrl-A h helps), none, file:PATH or unix:PATH
    #[arg(long, value_name = "CONSOLE")]
    pub serial: OptionWord<Backend>,
    /// Debug console, port 0xe9 (output only): stdio, none, file:PATH or unix:PATH
    #[arg(long, value_name = "CONSOLE")]
    pub debugcon: OptionWord<Backend>,
    /// Screen and keyboard: none, text on standard output (while the guest runs, if that is a terminal and no
    /// console is there) with keys from standard input unless --serial is stdio, or a picture at the end
    #[arg(long, value_name = "none|text|FILE.png", value_hint = ValueHint::FilePath)]
    pub display: OptionWord<DisplayTarget>,
    /// File for branch trace messages, one line each; - is standard output
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub btm: Option<OptionWord<BtmTarget>>,
}

impl Default for ConsoleOptions {
    fn default() -> Self {
        Self {
            serial: OptionWord(Backend::Stdio),
            debugcon: OptionWord(Backend::None),
            display: OptionWord(DisplayTarget::None),
            btm: None,
        }
    }
}

/// Deterministic runs and their input.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[command(next_help_heading = "Determinism")]
pub struct DeterminismOptions {
    /// Run the same way every time: in the interpreter, on one thread, with virtual time and without
    /// input
    #[arg(long)]
    pub deterministic: bool,
    /// Seed of RDRAND and RDSEED in a deterministic run [default: 0]
    #[arg(long, value_name = "N")]
    pub seed: Option<OptionWord<Number>>,
    /// Accept input in a deterministic run, and record it in FILE
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub record_input: Option<FilePath>,
    /// Give a deterministic run the input that --record-input recorded in FILE
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub replay_input: Option<FilePath>,
}

/// Debuggers.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[command(next_help_heading = "Debugging")]
pub struct DebugOptions {
    /// Serve gdb or lldb at tcp:HOST:PORT (tcp::PORT on this machine only) or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    pub gdb: Option<OptionWord<ListenAddress>>,
    /// Stop before the first instruction until a debugger connects
    #[arg(long)]
    pub gdb_wait: bool,
    /// Let other machines connect to --gdb; whoever connects controls the guest
    #[arg(long)]
    pub gdb_allow_remote: bool,
    /// Record the last N branches of every vCPU for a debugger that connects later, without the repetitions
    /// of loops unless `every`, and up to a function, address or exception (stop=#PF) [default N: 65536]
    #[arg(long, value_name = "branches[=N][,stop=WHERE][,every]")]
    pub record: Option<OptionWord<BranchRecord>>,
    /// File for the traces that a debugger starts with `monitor trace`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub trace_out: Option<FilePath>,
    /// Most memory that checkpoints for reverse execution may take, in bytes or with a suffix K, M or G
    /// [default: 1G]
    #[arg(long, value_name = "SIZE")]
    pub checkpoint_memory: Option<OptionWord<Size>>,
}

/// How the run ends, and what is printed about it.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[command(next_help_heading = "Run")]
pub struct RunOptions {
    /// End the run after TIME with exit status 124; in seconds, or with a unit ms, s, m or h
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<OptionWord<Duration>>,
    /// End the run with exit status 0 when the guest halts with interrupts off and nothing can wake it
    #[arg(long)]
    pub exit_on_halt: bool,
    /// End the run with exit status 8 when the guest resets a machine with --firmware, instead of starting
    /// the firmware again
    #[arg(long)]
    pub no_reboot: bool,
    /// Most bytes that consoles, traces, logs and branch messages may write together; more end the run
    /// with exit status 2
    #[arg(long, value_name = "SIZE")]
    pub max_output: Option<OptionWord<Size>>,
    /// Confine the monitor to the files that it has open and the system calls of its threads; strict
    /// ends it at any other call
    #[arg(long, value_enum)]
    pub sandbox: SandboxArg,
    /// Print statistics to standard error when the run ends
    #[arg(long)]
    pub stats: bool,
    /// For tests of Hindsight: change the engine after every N exits, or every N milliseconds
    #[arg(long, value_name = "N|Nms")]
    pub switch_every: Option<OptionWord<ForcedSwitch>>,
}

/// What the monitor logs.
#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[command(next_help_heading = "Log")]
pub struct LogOptions {
    /// Messages of the monitor to log: off, error, warn, info, debug or trace, or a filter such as
    /// warn,msr=debug
    #[arg(long, value_name = "LEVEL|FILTER", env = LogFilter::VARIABLE, hide_env_values = true)]
    pub log: OptionWord<LogFilter>,
    /// File for the log [default: standard error]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub log_file: Option<FilePath>,
    /// Events to trace.
    #[arg(long, value_name = "KINDS", help = trace_help())]
    pub trace: Option<OptionWord<TraceSpec>>,
}

impl LogOptions {
    /// The settings of the log and the trace, which are among `outputs`.
    pub fn settings(&self, outputs: &RunOutputs) -> LogSettings {
        LogSettings {
            filter: self.log.0.clone(),
            file: self.log_file.as_deref().map(Into::into),
            trace: self.trace.as_ref().map(|trace| trace.0.clone()),
            outputs: outputs.clone(),
        }
    }
}

impl RunConfig {
    /// Fills in the defaults that depend on other options.
    #[must_use]
    pub fn with_defaults(mut self) -> Self {
        let deterministic = self.determinism.deterministic;
        let model = if deterministic {
            CpuModel::PortableV2
        } else {
            CpuModel::default()
        };
        self.machine.cpu.get_or_insert(OptionWord(model.into()));
        if deterministic {
            self.determinism.seed.get_or_insert_default();
        }
        if deterministic && self.debugging.gdb.is_some() {
            let limit = OptionWord(Size(CheckpointLimits::BYTES));
            self.debugging.checkpoint_memory.get_or_insert(limit);
        }
        self
    }

    /// The CPU profile that the guest sees.
    pub fn cpu(&self) -> CpuProfile {
        let filled = self.clone().with_defaults();
        filled.machine.cpu.map(|cpu| cpu.0).unwrap_or_default()
    }

    /// The seed of a deterministic run; `None` for other runs.
    pub fn deterministic_seed(&self) -> Option<u64> {
        let filled = self.clone().with_defaults();
        let seed = filled.determinism.seed.map_or(0, |seed| seed.0.0);
        self.determinism.deterministic.then_some(seed)
    }
}
