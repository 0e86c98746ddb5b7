//! The command `hindsight run`, from its arguments to the end of the guest.

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use tracing::Level;

use super::confine::Confinement;
use super::consoles::Consoles;
use super::files::BootFiles;
use super::hook::RunHook;
use super::input;
use super::machine;
use super::network::Links;
use super::parent::end_with_parent;
use super::report::{print_stats, report};
use crate::cli::config::{ConfigArgs, EngineArg, RunConfig, dump};
use crate::cli::logging::Logging;
use crate::cli::trace::RequestedTrace;
use crate::cli::{Status, gdb, read};
use crate::console::Deliver;
use crate::debugger::DebuggerFiles;
use crate::deterministic::input::{InputFeed, InputQueue};
use crate::exactness::MeasureMode;
use crate::machine::Machine;
use crate::machine::start::StartDecision;
use crate::output::RunOutputs;
use crate::probe::host::measure_hw_breakpoints;
use crate::probe::report::HostInfo;
use crate::sandbox::settle_allocator;
use crate::vcpu::board::Board;
use crate::vcpu::engine::Engine;
use crate::vcpu::engine::policy::EngineDecision;

/// Boot a guest image.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit status:
  0      the guest powered off or halted (--exit-on-halt), or the user ended the run
  2      nothing ran: bad options, a bad image, or something that the host lacks
  4      the guest crashed
  6      the monitor failed
  8      the guest requested a reset (with --firmware only under --no-reboot)
  124    --timeout passed
  2N+1   the guest wrote N to the debug exit port 0xf4

Examples:
  hindsight run vmlinuz --initrd initrd.gz --cmdline console=ttyS0 --memory 512M --cpus 2
  hindsight run kernel.elf --trace exit,msr=trace.txt --timeout 10
  hindsight run vmlinuz --initrd initrd.gz --memory 512M --gdb tcp::1234 --gdb-wait
  hindsight run kernel.elf --deterministic --seed 7 --stats
  hindsight run kernel.elf --memory 1G --dump-config > machine.toml
  hindsight run --config machine.toml --cpus 4")]
pub struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print the effective options as a file for --config, and run nothing
    #[arg(long)]
    dump_config: bool,
    /// For `hindsight doctor`: start in KVM, whatever its verdicts are
    #[arg(long, hide = true, value_enum)]
    measure: Option<MeasureMode>,
    /// For `hindsight test`: end with this process, the parent
    #[arg(long, value_name = "PID", hide = true)]
    end_with: Option<i32>,
}

/// Runs a guest to its end.
///
/// # Errors
///
/// When the guest cannot be started.
pub fn run(args: &RunArgs) -> anyhow::Result<Status> {
    if let Some(pid) = args.end_with {
        end_with_parent(pid)?;
    }
    let config = args.config.load()?;
    config.check()?;
    let config = config.with_defaults();
    if args.dump_config {
        io::stdout().write_all(dump(&config)?.as_bytes())?;
        return Ok(Status::Success);
    }
    run_logged(&config, args.measure, &mut RequestedTrace::default())
}

/// Runs a guest to its end, with `hook` around it.
///
/// # Errors
///
/// When the guest cannot be started, or the hook refuses.
pub(in crate::cli) fn run_with(
    config: RunConfig,
    hook: &mut dyn RunHook,
) -> anyhow::Result<Status> {
    run_logged(&config.with_defaults(), None, hook)
}

fn run_logged(
    config: &RunConfig,
    measure: Option<MeasureMode>,
    hook: &mut dyn RunHook,
) -> anyhow::Result<Status> {
    let limit = config.run.max_output.as_ref().map(|limit| limit.0.0);
    let outputs = RunOutputs::new(limit);
    let logging = Logging::start(&config.log.settings(&outputs));
    tracing::debug!("hindsight {} on {}", env!("CARGO_PKG_VERSION"), HostFacts);
    tracing::debug!("{config:?}");
    let status = run_machine(config, measure, hook, (&logging, &outputs));
    let status = status.inspect_err(|error| logging.log_failure(error))?;
    match hook.finish() {
        Ok(()) => Ok(status),
        Err(error) => {
            logging.report(Level::ERROR, &format!("{error:#}"));
            Ok(Status::Internal)
        }
    }
}

/// This host in one line, read only if the line is logged.
struct HostFacts;

impl fmt::Display for HostFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = HostInfo::here();
        let modules = host.modules.join(", ");
        write!(f, "{}, Linux {}, {modules}", host.cpu_model, host.kernel)
    }
}

fn run_machine(
    config: &RunConfig,
    measure: Option<MeasureMode>,
    hook: &mut dyn RunHook,
    (logging, outputs): (&Logging, &RunOutputs),
) -> anyhow::Result<Status> {
    settle_allocator();
    let limit = config.run.timeout.map(|limit| limit.0);
    let files = BootFiles::read(&config.boot, read::deadline(limit))?;
    let StartDecision {
        decision,
        host,
        policy,
        accepted,
    } = machine::decide(config, measure)?;
    let (mut prepared, links) = machine::prepare_files(config, decision.engine, &files)?;
    hook.check(config, files.image())?;
    let record = gdb::record_options(&config.debugging, files.image().1)?;
    let may_change_engine = policy.is_some();
    if let Some(policy) = policy {
        let forced = config.run.switch_every.map(|every| every.0);
        prepared = prepared.with_engine_policy(policy, forced);
    }
    let log = input::read_log(config)?;
    drop(files);
    // Create files and sockets only now, so that a run that fails above leaves none behind.
    logging.open_files()?;
    tracing::trace!(target: "mode", "{}: {}", decision.engine, decision.because);
    if config.debugging.gdb.is_some() && decision.engine == Engine::Kvm {
        // The debugger's thread needs the result, and cannot measure in the sandbox.
        measure_hw_breakpoints(may_change_engine);
    }
    let confinement = Confinement::prepare(config)?;
    let mut consoles = Consoles::open(&config.console, outputs)?;
    let mut machine = prepared.build(host.as_ref(), consoles.sinks()?)?;
    let (feed, queue) = input::feed(config, log.map(InputFeed::replay))?;
    machine.set_feed(feed);
    report_engine(config, &decision, logging);
    report_accepted(&accepted);
    hook.start(&mut machine)?;
    let listener = gdb::listen(&config.debugging)?;
    let mut links = Links::listen(links)?;
    confinement.confine_files(config)?;
    let sendkey = start_input(config, &machine, &mut consoles, queue)?;
    let board = machine.board().clone();
    set_ends(config, &board, outputs);
    let mut files = DebuggerFiles::default();
    (files.screendump, files.sendkey) = (consoles.screendump(&board), sendkey);
    files.trace = hook.debugger_trace();
    let debugger = gdb::start(&config.debugging, (listener, files), record, &mut machine)?;
    links.start(&board)?;
    consoles.show_screen(&board)?;
    Confinement::enter();
    let start = Instant::now();
    let outcome = machine.run(limit, || consoles.release())?;
    let host_time = start.elapsed();
    if let Some(debugger) = debugger {
        debugger.finish(gdb::exit_status(&outcome));
    }
    if let Some(btm) = &board.buses.btm {
        btm.flush();
    }
    // Writes out all output and restores the terminal, before anything else is printed.
    drop(consoles);
    if config.run.stats {
        print_stats(&board, host_time, &outcome);
    }
    Ok(report(&outcome, outputs.failure(), logging))
}

/// Starts the input of the consoles, and what ends the run. Returns how a debugger presses keys.
fn start_input(
    config: &RunConfig,
    machine: &Machine,
    consoles: &mut Consoles<'_>,
    queue: Option<Arc<InputQueue>>,
) -> anyhow::Result<Option<Deliver>> {
    consoles.watch_signals(input::quit(machine, queue.clone()))?;
    let quit = input::quit(machine, queue.clone());
    let keys = || input::keys(config, machine, queue.clone());
    let (typing, sendkey) = (input::typing(keys()), keys());
    let serial = input::delivery(config, machine, queue.clone());
    consoles.start_input(serial, typing, quit)?;
    Ok(sendkey)
}

/// Warns of the deviations of this host's KVM that the user accepts.
fn report_accepted(accepted: &[(impl fmt::Display, String)]) {
    for (group, reason) in accepted {
        tracing::warn!("--prefer speed: {group} deviates on this host's KVM: {reason}");
    }
}

/// Makes output that cannot be written end the run, and with `--exit-on-halt` a guest that has
/// halted for good.
fn set_ends(config: &RunConfig, board: &Board, outputs: &RunOutputs) {
    if config.run.exit_on_halt {
        board.run.halts.end_run();
    }
    let end = board.run.end.clone();
    outputs.on_failure(move |error| end.set(error.into()));
}

/// Reports the engine, to the user only if `--engine auto` chose the slower one.
fn report_engine(config: &RunConfig, decision: &EngineDecision, logging: &Logging) {
    let deterministic = config.determinism.deterministic;
    let engines = (config.machine.engine, decision.engine);
    if !deterministic && engines == (EngineArg::Auto, Engine::Interp) {
        let text = format!("in the interpreter: {}", decision.because);
        logging.report(Level::INFO, &text);
    } else {
        tracing::info!("engine {}: {}", decision.engine, decision.because);
    }
}
