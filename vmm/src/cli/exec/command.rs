//! The command line of `hindsight exec`, and the run.

use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use hindsight_cpu::profile::CpuProfile;
use hindsight_devices::virtio::VirtioDevice;
use rustix::process::{getegid, geteuid, getgroups, umask};

use super::initramfs::{INIT, Initramfs};
use super::session::{CommandEnd, Session, seconds_since};
use super::{kernel, modules};
use crate::boot::LoadRequest;
use crate::cli::Status;
use crate::cli::config::{EngineArg, Number, OptionWord, RunConfig, SandboxArg, Size};
use crate::cli::logging::Logging;
use crate::cli::read::read;
use crate::cli::run::{Confinement, DeviceLinks, Links, RunHook, decide, open_devices, prepare};
use crate::cli::trace::{RunTrace, TraceOptions};
use crate::console::{self, RawTerminal};
use crate::machine::Machine;
use crate::machine::start::StartDecision;
use crate::platform::Sinks;
use crate::sandbox::settle_allocator;
use crate::vcpu::board::Board;
use crate::vcpu::engine::Engine;
use crate::vcpu::run_control::Outcome;
use crate::virtio::disk::DiskSpec;
use crate::virtio::share::{self, ShareSpec};
use crate::virtio::vsock::VsockSpec;

/// The largest kernel that is read, in bytes.
const KERNEL_MAX: u64 = 256 << 20;
/// Maximum number of folders that the command may change: a limit of the guest's init.
const FOLDERS_MAX: usize = 16;
/// Maximum number of bytes of arguments and environment: a limit of the guest's init.
const REQUEST_MAX: usize = 1 << 20;
/// Exit status if the monitor or the guest failed, as env(1) and timeout(1) use it.
const FAILED: u8 = 125;

/// Run a command of this machine in a guest that sees this machine's files.
#[derive(Debug, Args)]
#[command(after_help = "\
The guest sees this machine's files; what the command changes is lost, except in the current folder
and in those of --rw. User, environment and current folder are the caller's.

Exit status: that of the command; 128 + N if signal N ended it; 124 if --timeout passed; 125 if the
guest or the monitor failed; 126 if the command cannot be executed; 127 if it was not found.

Examples:
  hindsight exec -- uname -a
  hindsight exec -- perf record -b -- ./program
  hindsight exec --deterministic -- perf stat -e instructions:u /bin/true")]
pub struct ExecArgs {
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
    /// Linux kernel of the guest [default: a cached or installed one, or Debian's, which is fetched]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    kernel: Option<PathBuf>,
    /// Folder of the kernel's modules [default: that of its version in /lib/modules]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    modules: Option<PathBuf>,
    /// Guest memory in bytes, or with a suffix K, M, G or T
    #[arg(long, short, value_name = "SIZE", default_value = "1G")]
    memory: OptionWord<Size>,
    /// Number of vCPUs, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: usize,
    /// Processor that the guest sees, as for `hindsight run`
    #[arg(long, value_name = "PROFILE|FILE.toml", allow_hyphen_values = true)]
    cpu: Option<OptionWord<CpuProfile>>,
    /// Engine that executes the guest
    #[arg(long, value_enum, default_value_t)]
    engine: EngineArg,
    /// Run the same way every time, without input; no folder can be changed
    #[arg(long)]
    deterministic: bool,
    /// Seed of random numbers in a deterministic run [default: 0]
    #[arg(long, value_name = "N")]
    seed: Option<OptionWord<Number>>,
    /// Folder that the command may change, besides the current one; may be repeated
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    rw: Vec<PathBuf>,
    /// Throw away what the command changes in the current folder, too
    #[arg(long)]
    discard: bool,
    /// Folder that the guest may mount as virtiofs by TAG, as for `hindsight run`
    #[arg(long, value_name = "DIR=TAG[,rw]", value_hint = ValueHint::DirPath)]
    share: Vec<OptionWord<ShareSpec>>,
    /// Disk of the guest, as for `hindsight run`
    #[arg(long, value_name = "FILE[,OPTION...]", value_hint = ValueHint::FilePath)]
    disk: Vec<OptionWord<DiskSpec>>,
    /// Sockets between guest and host, as for `hindsight run`
    #[arg(long, value_name = "cid=N,socket=PATH", value_hint = ValueHint::FilePath)]
    vsock: Option<OptionWord<VsockSpec>>,
    /// End the run after TIME with exit status 124
    #[arg(long, value_name = "TIME")]
    timeout: Option<OptionWord<Duration>>,
    /// Confine the monitor to what it needs before it runs the guest, as for `hindsight run`
    #[arg(long, value_enum, default_value_t)]
    sandbox: SandboxArg,
    /// Trace the guest to FILE, in the interpreter, as `hindsight trace` does
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    trace_out: Option<PathBuf>,
    /// Trace processes with this name or number only; may be repeated
    #[arg(long, value_name = "NAME|PID", requires = "trace_out")]
    trace_process: Vec<String>,
    /// Show the log of the guest's kernel on standard error
    #[arg(long)]
    kernel_log: bool,
}

impl ExecArgs {
    /// The options that `hindsight run` has too, as its configuration.
    fn config(&self) -> RunConfig {
        let mut config = RunConfig::default();
        config.boot.image = Some(OsString::from("kernel").into());
        config.machine.memory = self.memory;
        config.machine.cpus = self.cpus;
        config.machine.cpu = self.cpu;
        config.machine.engine = match self.trace_out {
            // Only the interpreter sees every event.
            Some(_) => EngineArg::Interp,
            None => self.engine,
        };
        config.determinism.deterministic = self.deterministic;
        config.determinism.seed = self.seed;
        config.devices.share.clone_from(&self.share);
        config.devices.disk.clone_from(&self.disk);
        config.devices.vsock.clone_from(&self.vsock);
        config.run.timeout = self.timeout;
        config.run.sandbox = self.sandbox;
        config
    }

    /// The trace of `--trace-out`.
    fn trace_options(&self) -> anyhow::Result<Option<TraceOptions>> {
        let Some(file) = &self.trace_out else {
            return Ok(None);
        };
        if self.engine == EngineArg::Kvm {
            bail!(
                "KVM does not report branches: drop --engine kvm, --trace-out needs the interpreter"
            );
        }
        let processes = self.trace_process.clone();
        Ok(Some(TraceOptions::of_processes(file.clone(), processes)))
    }

    /// The folders that the command may change.
    fn writable_folders(&self, current: &Path) -> anyhow::Result<Vec<PathBuf>> {
        if self.deterministic {
            if !self.rw.is_empty() {
                bail!("--rw and --deterministic exclude each other: drop one of them");
            }
            return Ok(Vec::new());
        }
        let mut folders = Vec::new();
        // If the current folder is the root, the guest could change every file: require --rw for
        // that.
        if !self.discard && current != Path::new("/") {
            folders.push(current.to_owned());
        }
        for folder in &self.rw {
            let path = folder.canonicalize();
            folders.push(path.with_context(|| format!("--rw {}", folder.display()))?);
        }
        folders.sort();
        folders.dedup();
        if folders.len() > FOLDERS_MAX {
            bail!("the command may change at most {FOLDERS_MAX} folders");
        }
        Ok(folders)
    }
}

/// Encodes the request that the guest's init reads: records that begin with a byte for their kind
/// and end with a NUL.
fn request(
    args: &ExecArgs,
    current: &Path,
    folders: &[PathBuf],
    terminal: bool,
) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut add = |kind: u8, value: &[u8]| {
        bytes.push(kind);
        bytes.extend(value.iter().filter(|byte| **byte != 0));
        bytes.push(0);
    };
    for word in &args.command {
        add(b'a', word.as_bytes());
    }
    for (name, value) in env::vars_os() {
        add(b'e', &[name.as_bytes(), b"=", value.as_bytes()].concat());
    }
    add(b'd', current.as_os_str().as_bytes());
    add(b'u', geteuid().as_raw().to_string().as_bytes());
    add(b'g', getegid().as_raw().to_string().as_bytes());
    for group in getgroups().unwrap_or_default() {
        add(b'G', group.as_raw().to_string().as_bytes());
    }
    let mask = umask(rustix::fs::Mode::empty());
    umask(mask);
    add(b'm', mask.bits().to_string().as_bytes());
    add(b'h', rustix::system::uname().nodename().to_bytes());
    if terminal {
        add(b't', b"");
    }
    for folder in folders {
        add(b'w', folder.as_os_str().as_bytes());
    }
    if bytes.len() > REQUEST_MAX {
        bail!("arguments and environment of the command have more than 1 MiB");
    }
    Ok(bytes)
}

/// The initramfs with init, the modules of `folder` and the request.
fn initramfs(args: &ExecArgs, folder: &Path, request: &[u8]) -> anyhow::Result<Vec<u8>> {
    let init = INIT.context("this program was built without payloads, and so without its init")?;
    let mut archive = Initramfs::default();
    for name in ["dev", "proc", "sys", "host", "changes", "new", "modules"] {
        archive.add_directory(name);
    }
    archive.add_file("init", init);
    archive.add_file("exec", request);
    let mut list = String::new();
    let disks = (!args.disk.is_empty()).then_some("virtio_blk");
    let sockets = args.vsock.is_some();
    let sockets = sockets.then_some("vmw_vsock_virtio_transport");
    let more: Vec<_> = disks.into_iter().chain(sockets).collect();
    for module in modules::collect(folder, &more)? {
        archive.add_file(&format!("modules/{}.ko", module.name), &module.contents);
        list += &format!("{}.ko\n", module.name);
    }
    archive.add_file("modules/list", list.as_bytes());
    Ok(archive.finish())
}

/// The shares of the host's root, and of the folders that the command may change.
fn root_shares(folders: &[PathBuf]) -> Vec<ShareSpec> {
    let root = ShareSpec {
        folder: "/".into(),
        tag: "root".to_owned(),
        writable: false,
    };
    let changed = folders.iter().enumerate();
    let changed = changed.map(|(index, folder)| ShareSpec {
        folder: folder.clone(),
        tag: format!("rw{index}"),
        writable: true,
    });
    [root].into_iter().chain(changed).collect()
}

fn open_shares(shares: &[ShareSpec]) -> anyhow::Result<Vec<Box<dyn VirtioDevice>>> {
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    for share in shares {
        let name = || format!("folder {}", share.folder.display());
        devices.push(Box::new(share::open(share).with_context(name)?));
    }
    Ok(devices)
}

/// The devices of a session and its shares, and those of `config` with their hosts' ends.
fn all_devices(
    session: &Session,
    shares: &[ShareSpec],
    config: &RunConfig,
) -> anyhow::Result<(Vec<Box<dyn VirtioDevice>>, DeviceLinks)> {
    let mut devices: Vec<Box<dyn VirtioDevice>> = vec![Box::new(session.console()?)];
    devices.extend(open_shares(shares)?);
    let mut opened = open_devices(config)?;
    opened.links.follow(devices.len());
    devices.extend(opened.devices);
    Ok((devices, opened.links))
}

/// The command line of the guest's kernel.
fn kernel_command_line(args: &ExecArgs) -> String {
    let log = if args.kernel_log { "" } else { " quiet" };
    format!("console=ttyS0 panic=-1 mitigations=off random.trust_cpu=on{log}")
}

/// Runs the command.
///
/// # Errors
///
/// When the guest cannot be started.
pub fn run(args: &ExecArgs) -> anyhow::Result<ExitCode> {
    let logging = Logging::start_from_environment()?;
    settle_allocator();
    let start = Instant::now();
    let trace_options = args.trace_options()?;
    let config = args.config();
    config.check()?;
    let mut config = config.with_defaults();
    let terminal = !args.deterministic && io::stdin().is_terminal() && io::stdout().is_terminal();
    let current = env::current_dir().context("the current folder")?;
    let folders = args.writable_folders(&current)?;
    let kernel = kernel::find(args.kernel.as_deref(), args.modules.as_deref())?;
    let image = read("kernel", &kernel.image, KERNEL_MAX)?;
    let initrd = initramfs(
        args,
        &kernel.modules,
        &request(args, &current, &folders, terminal)?,
    )?;
    let session = Session::new(terminal);
    let shares = root_shares(&folders);
    let (devices, links) = all_devices(&session, &shares, &config)?;
    // The sandbox permits all shares.
    config
        .devices
        .share
        .extend(shares.into_iter().map(OptionWord));
    let load = LoadRequest {
        image: &image,
        initrd: Some(&initrd),
        cmdline: kernel_command_line(args).into_bytes(),
        ..LoadRequest::default()
    };
    let StartDecision {
        decision,
        host,
        policy,
        ..
    } = decide(&config, None)?;
    let mut prepared = prepare(&config, decision.engine, &load, devices)
        .with_context(|| kernel.image.display().to_string())?;
    if let Some(policy) = policy {
        prepared = prepared.with_engine_policy(policy, None);
    }
    let sinks = sinks(&session, args);
    let confinement = Confinement::prepare(&config)?;
    let mut machine = prepared.build(host.as_ref(), sinks)?;
    let trace = start_trace(
        trace_options.as_ref(),
        &config,
        (&kernel.image, &image),
        &mut machine,
    )?;
    let mut links = Links::listen(links)?;
    confinement.confine_files(&config)?;
    let board = machine.board().clone();
    connect(&session, &board, args)?;
    links.start(&board)?;
    let raw = terminal.then(enter_raw_mode).transpose()?;
    show_progress(&session, &kernel.image, decision.engine);
    Confinement::enter();
    let limit = config.run.timeout.map(|limit| limit.0);
    let outcome = machine.run(limit, || {})?;
    drop(raw);
    let status = status(&session, &outcome);
    let written = trace.map_or(Ok(()), |mut trace| trace.finish());
    tracing::info!("the guest ran for {}", seconds_since(start));
    drop(logging);
    Ok(status_after_trace(status, written))
}

/// Where the guest's own output goes.
fn sinks(session: &Session, args: &ExecArgs) -> Sinks {
    Sinks {
        serial: session.log_sink(args.kernel_log),
        debugcon: Box::new(io::sink()),
        btm: None,
    }
}

/// Passes input and signals to the command.
fn connect(session: &Session, board: &Arc<Board>, args: &ExecArgs) -> anyhow::Result<()> {
    // The console is the first device.
    let console_index = 0;
    session.start(board, console_index, !args.deterministic)?;
    let signals = session.clone();
    console::watch_signals(move |signal| signals.signal(signal, console_index))
        .context("signal handlers cannot be installed")
}

/// Starts to trace a machine with this kernel.
fn start_trace<'a>(
    options: Option<&'a TraceOptions>,
    config: &RunConfig,
    kernel: (&Path, &[u8]),
    machine: &mut Machine,
) -> anyhow::Result<Option<RunTrace<'a>>> {
    let mut trace = options.map(RunTrace::new);
    if let Some(trace) = &mut trace {
        trace.check(config, kernel)?;
        trace.start(machine)?;
    }
    Ok(trace)
}

/// Shows on a terminal which kernel is starting, if that takes long.
fn show_progress(session: &Session, image: &Path, engine: Engine) {
    if io::stderr().is_terminal() {
        let version = image.file_name().unwrap_or_default().to_string_lossy();
        session.show_progress(format!("starting {version}: {engine}"));
    }
}

/// Sets the terminal to raw mode: every key goes to the guest.
fn enter_raw_mode() -> anyhow::Result<RawTerminal> {
    let entered = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .and_then(|terminal| RawTerminal::enter(&terminal));
    entered.context("the terminal cannot be set to raw mode")
}

/// The exit status of the command, or an error if the run ended before the command did.
fn status(session: &Session, outcome: &Outcome) -> ExitCode {
    match (session.end(), outcome) {
        (Some(CommandEnd::Exit(status)), _) => return status.into(),
        (Some(CommandEnd::Signal(signal)), _) => return 128_u8.wrapping_add(signal).into(),
        (_, Outcome::Timeout(_)) => return Status::Timeout.into(),
        _ => {}
    }
    let reason = match outcome {
        Outcome::Crash(crash) => crash.summary(),
        Outcome::Failed(error) => error.to_string(),
        _ if session.started() => "the guest ended before the command".to_owned(),
        _ => "the guest could not start the command".to_owned(),
    };
    let log = session.log();
    let lines: Vec<&str> = log.lines().collect();
    let last = lines.len().saturating_sub(20);
    for line in &lines[last..] {
        let _ = writeln!(io::stderr(), "{line}");
    }
    let _ = writeln!(io::stderr(), "hindsight: {reason}");
    FAILED.into()
}

/// The exit status when the command has ended with `status` and the trace was written or not.
fn status_after_trace(status: ExitCode, written: anyhow::Result<()>) -> ExitCode {
    match written {
        Ok(()) => status,
        Err(error) => {
            let _ = writeln!(io::stderr(), "hindsight: {error:#}");
            FAILED.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct TestCommand {
        #[command(flatten)]
        exec: ExecArgs,
    }

    fn args(words: &[&str]) -> ExecArgs {
        let words = ["hindsight"].iter().chain(words);
        TestCommand::try_parse_from(words).unwrap().exec
    }

    #[test]
    fn request_has_command_folder_and_writable_folders() {
        let args = args(&["--", "ls", "-l", "a b"]);
        let folders = [PathBuf::from("/w")];
        let bytes = request(&args, Path::new("/c"), &folders, true).unwrap();
        assert!(bytes.starts_with(b"als\0a-l\0aa b\0"));
        for record in [&b"\0d/c\0"[..], b"\0w/w\0", b"\0t\0"] {
            let found = bytes.windows(record.len()).any(|window| window == record);
            assert!(found, "{}", String::from_utf8_lossy(record));
        }
    }

    #[test]
    fn trace_that_cannot_be_written_is_a_failure_of_the_monitor() {
        let status = |written| format!("{:?}", status_after_trace(ExitCode::from(7), written));
        assert_eq!(status(Ok(())), format!("{:?}", ExitCode::from(7)));
        let full = Err(anyhow::anyhow!("no space left"));
        assert_eq!(status(full), format!("{:?}", ExitCode::from(125)));
    }

    #[test]
    fn current_folder_can_be_changed_unless_it_is_the_root() {
        let here = Path::new("/tmp");
        let folders = |words: &[&str], current| args(words).writable_folders(current);
        assert_eq!(folders(&["--", "x"], here).unwrap(), [here]);
        assert!(folders(&["--", "x"], Path::new("/")).unwrap().is_empty());
        assert!(folders(&["--discard", "--", "x"], here).unwrap().is_empty());
        assert!(
            folders(&["--deterministic", "--", "x"], here)
                .unwrap()
                .is_empty()
        );
        assert_eq!(
            folders(&["--rw", "/usr", "--", "x"], here).unwrap().len(),
            2
        );
        assert!(folders(&["--rw", "/none/x", "--", "x"], here).is_err());
        assert!(folders(&["--rw", "/usr", "--deterministic", "--", "x"], here).is_err());
    }
}
