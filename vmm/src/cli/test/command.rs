//! The command `hindsight test`.

use std::fmt;
use std::fs;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use hindsight_cpu::facility::Facilities;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::args::{TestArgs, check_run_args};
use super::report_console::ReportConsole;
use crate::cli::config::EngineArg;
use crate::cli::logging::Logging;
use crate::harness::builtin::{builtin_images, run_job};
use crate::harness::image::TestImage;
use crate::harness::needs::{Capabilities, Lacking, MeasuredHost, Unmeasured, kvm_problem};
use crate::harness::pool::{PoolEvent, run_in_order};
use crate::harness::report::{junit, text};
use crate::harness::runner::Runner;
use crate::harness::select::{self, Pattern, TestJob, check_needs, filter, mark_unmet, repeat};
use crate::harness::verdict::CaseResult;
use crate::machine::start;
use crate::vcpu::engine::Engine;
use crate::vcpu::engine::policy::{EngineDemand, Preference};

/// Status when a case failed.
const STATUS_FAILED: u8 = 1;
/// Status when the host cannot run any case.
const STATUS_UNUSABLE: u8 = 2;
/// Status after an interrupt, as shells have it: 128 + SIGINT.
const STATUS_INTERRUPTED: u8 = 130;

/// The host of a harness run: its KVM, its terminal, its signals.
pub struct HarnessHost<'a> {
    /// What the probes found about this host's KVM.
    pub capabilities: &'a dyn Capabilities,
    /// Why no case can run; every case is then listed as skipped for that reason.
    pub problem: Option<String>,
    /// Ends the run when it is set; the reports are still written.
    pub interrupt: &'a AtomicBool,
    /// Columns of the terminal behind `out`; `None` if it is no terminal.
    pub columns: Option<usize>,
    /// Receives the lines or the TAP.
    pub out: &'a mut dyn Write,
}

impl fmt::Debug for HarnessHost<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HarnessHost")
            .field("problem", &self.problem)
            .finish_non_exhaustive()
    }
}

/// Runs `hindsight test` on this host.
///
/// The status is 0 when nothing failed, 1 when a case failed, 2 when /dev/kvm cannot be used, and
/// 130 after an interrupt.
///
/// # Errors
///
/// Bad usage and bad images, for which the caller ends with status 2; host errors.
pub fn run(mut args: TestArgs) -> Result<ExitCode> {
    Logging::start_from_environment()?;
    check_run_args(&args.run_arg)?;
    if args.runner.is_none() {
        args.engine.get_or_insert_with(|| {
            let decision = start::auto_policy(Preference::default())
                .policy
                .decide(EngineDemand::default());
            match decision.engine {
                Engine::Kvm => EngineArg::Kvm,
                Engine::Interp => EngineArg::Interp,
            }
        });
    }
    if args.engine == Some(EngineArg::Auto) {
        // Measures this host before the cases start, so that not each of them does.
        start::auto_policy(Preference::default());
    }
    let needs_kvm = args.engine == Some(EngineArg::Kvm) && !args.ignore_needs;
    let interrupt = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        // Only sets the flag: the children are ended and the reports are written before the end.
        signal_hook::flag::register(signal, Arc::clone(&interrupt)).context("signal handler")?;
    }
    let mut out = io::stdout().lock();
    let columns = out.is_terminal().then(|| {
        let size = rustix::termios::tcgetwinsize(&out).ok();
        // A terminal that does not know its size says 0.
        size.map(|size| usize::from(size.ws_col))
            .filter(|columns| *columns > 0)
            .unwrap_or(80)
    });
    let measured: &dyn Capabilities = if needs_kvm {
        &MeasuredHost
    } else {
        &Unmeasured
    };
    let lacking = Lacking::new(&args.lacking, measured);
    let status = run_with(
        &args,
        HarnessHost {
            capabilities: &lacking,
            problem: kvm_problem().filter(|_| needs_kvm),
            interrupt: &interrupt,
            columns,
            out: &mut out,
        },
    )?;
    Ok(ExitCode::from(status))
}

/// Runs `hindsight test` on the given host, and returns its status.
///
/// # Errors
///
/// As [`run`].
pub fn run_with(args: &TestArgs, host: HarnessHost<'_>) -> Result<u8> {
    let runner = runner(args)?;
    let jobs = prepare(args, host.capabilities, host.problem.as_deref())?;
    if args.list {
        list(host.out, &jobs)?;
        return Ok(0);
    }
    let start = Instant::now();
    let columns = host.columns.filter(|_| !args.tap);
    let progress = columns.map(|columns| text::ProgressLine::new(columns.max(20) - 1));
    let mut console = ReportConsole {
        out: host.out,
        tap: args.tap,
        progress,
    };
    let results = run_all(args, &runner, &jobs, host.interrupt, &mut console)?;
    let interrupted = host.interrupt.load(Ordering::Relaxed);
    let summary = console.end(&results, jobs.len(), interrupted)?;
    if let Some(path) = &args.junit {
        let name = args
            .runner
            .as_deref()
            .or(args.engine.map(EngineArg::word))
            .unwrap_or("hindsight");
        let xml =
            junit::to_xml(&results, (name, args.shard), start.elapsed()).context("JUnit report")?;
        fs::write(path, xml).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(match (interrupted, host.problem, summary.failed) {
        (true, ..) => STATUS_INTERRUPTED,
        (false, Some(_), _) => STATUS_UNUSABLE,
        (false, None, 0) => 0,
        (false, None, _) => STATUS_FAILED,
    })
}

fn runner(args: &TestArgs) -> Result<Runner> {
    if let Some(template) = &args.runner {
        return Ok(Runner::template(template)?);
    }
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut options = args.run_arg.clone();
    options.extend(
        args.engine
            .iter()
            .map(|engine| format!("--engine={}", engine.word())),
    );
    Ok(Runner::Hindsight { program, options })
}

/// The jobs that a command line selects; those that cannot run here are marked.
fn prepare(
    args: &TestArgs,
    capabilities: &dyn Capabilities,
    host_problem: Option<&str>,
) -> Result<Vec<TestJob>> {
    let images = if args.images.is_empty() {
        builtin_images()?
    } else {
        args.images
            .iter()
            .map(|path| Ok(Arc::new(TestImage::open(path)?)))
            .collect::<Result<_>>()?
    };
    let all = select::jobs(&images);
    check_needs(&all, capabilities)?;
    let patterns = |texts: &[String]| texts.iter().cloned().map(Pattern).collect::<Vec<_>>();
    let mut jobs = filter(all, &patterns(&args.filter), &patterns(&args.rules));
    if jobs.is_empty() {
        bail!("no case to run: nothing matches the filters");
    }
    if let Some(shard) = args.shard {
        jobs = shard.keep(jobs);
    }
    match host_problem {
        Some(problem) => jobs
            .iter_mut()
            .for_each(|job| job.skip = Some(problem.to_owned())),
        None => mark_unmet(&mut jobs, capabilities),
    }
    if args.engine == Some(EngineArg::Kvm) {
        select::mark_profiles(&mut jobs, Facilities::KVM);
    }
    Ok(repeat(jobs, args.repeat))
}

fn list(out: &mut dyn Write, jobs: &[TestJob]) -> io::Result<()> {
    let mut out = BufWriter::new(out);
    for job in jobs {
        write!(out, "{}", job.id())?;
        if let Some(case) = &job.case {
            write!(out, " vcpus={}", case.vcpus)?;
            if let Some(cpu) = case.cpu {
                write!(out, " cpu={cpu}")?;
            }
            if case.virtual_clock {
                write!(out, " clock=virtual")?;
            }
            if !case.rules.is_empty() {
                write!(out, " rules={}", case.rules.join(","))?;
            }
            if !case.about.is_empty() {
                write!(out, " about={}", case.about)?;
            }
        }
        match &job.skip {
            Some(reason) => writeln!(out, " [skip: {reason}]")?,
            None => writeln!(out)?,
        }
    }
    out.flush()
}

fn run_all(
    args: &TestArgs,
    runner: &Runner,
    jobs: &[TestJob],
    interrupt: &AtomicBool,
    console: &mut ReportConsole<'_>,
) -> Result<Vec<CaseResult>> {
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let memory = args.memory.0.to_string();
    let run = |index: usize| -> Result<CaseResult> {
        run_job(&jobs[index], runner, &memory, args.timeout, interrupt)
    };
    let mut results = Vec::new();
    console.begin(jobs.len())?;
    run_in_order(
        jobs.len(),
        args.jobs.unwrap_or(cores),
        interrupt,
        run,
        |event| {
            match event {
                PoolEvent::Running(running, ended) => console.progress(jobs, running, ended)?,
                // An interrupted case has no verdict.
                PoolEvent::Done(_) if interrupt.load(Ordering::Relaxed) => {}
                PoolEvent::Done(result) => {
                    console.result(results.len() + 1, &result)?;
                    results.push(result);
                }
            }
            Ok(())
        },
    )?;
    Ok(results)
}
