//! The command `hindsight test`.

use std::fmt;
use std::fs;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use hindsight_cpu::facility::Facilities;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::harness::child::supervise;
use crate::harness::image::Image;
use crate::harness::needs::{self, Capabilities, HostKvm, Lacking, Unmeasured, kvm_problem};
use crate::harness::pool::{Event, run_in_order};
use crate::harness::report::{Summary, junit, tap, text};
use crate::harness::runner::{GRACE, Runner};
use crate::harness::select::{self, Job, Pattern, Shard, check_needs, filter, mark_unmet, repeat};
use crate::harness::verdict::CaseResult;
use crate::machine::start;
use crate::vcpu::engine::policy::EngineDemand;

/// Status when a case failed.
const STATUS_FAILED: u8 = 1;
/// Status when the host cannot run any case.
const STATUS_UNUSABLE: u8 = 2;
/// Status after an interrupt, as shells have it: 128 + SIGINT.
const STATUS_INTERRUPTED: u8 = 130;
/// Longest `--timeout`.
const TIMEOUT_SECONDS_MAX: f64 = 86_400.0;

/// Run the built-in payloads, or images of your own, and judge them.
#[derive(Args, Clone, Debug)]
pub struct TestArgs {
    /// Images to run; the built-in payloads when there are none
    #[arg(value_name = "IMAGE")]
    pub images: Vec<PathBuf>,
    /// Run only cases whose name contains TEXT, or matches it as a glob when it has * or ?
    #[arg(long, value_name = "TEXT")]
    pub filter: Vec<String>,
    /// Run only cases that assert one of these rules
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    pub rules: Vec<String>,
    /// Run this many cases at a time [default: the number of processors]
    #[arg(long, short, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
    /// End a case after this time, instead of its own limit
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub timeout: Option<Duration>,
    /// Run only part I of N of the cases
    #[arg(long, value_name = "I/N")]
    pub shard: Option<Shard>,
    /// Run everything N times, at most 1000
    #[arg(long, value_name = "N", default_value = "1", hide_default_value = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// List the cases and run none
    #[arg(long, conflicts_with_all = ["tap", "junit"])]
    pub list: bool,
    /// Write TAP 14 to standard output
    #[arg(long)]
    pub tap: bool,
    /// Write a JUnit report to FILE
    #[arg(long, value_name = "FILE")]
    pub junit: Option<PathBuf>,
    /// What runs the cases: kvm; interp, which needs nothing of the host; or auto, which changes
    /// between them [default: kvm or interp, whichever auto begins with here]
    #[arg(long, value_name = "ENGINE", value_parser = ["kvm", "interp", "auto"])]
    pub engine: Option<String>,
    /// Guest memory, passed on to `run`
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub memory: String,
    /// A further option passed on to `run`, such as --run-arg=--hugepages
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub run_arg: Vec<String>,
    /// Run cases even where this host's KVM does not meet their needs
    #[arg(long)]
    pub ignore_needs: bool,
    /// Do not run cases that need this of the host's KVM, whatever it does; WHY is told as the reason
    #[arg(long, value_name = "NEED[=WHY]", value_parser = needs::parse_lacking)]
    #[arg(conflicts_with = "ignore_needs")]
    pub lacking: Vec<(String, String)>,
    /// Run the cases by another VMM: a command with {image}, {cmdline}, {cpus}, {memory}, {timeout}
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["engine", "run_arg"])]
    pub runner: Option<String>,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= TIMEOUT_SECONDS_MAX => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err(format!(
            "a number of seconds, more than 0 and at most {TIMEOUT_SECONDS_MAX}"
        )),
    }
}

/// What surrounds a run of the harness.
pub struct Host<'a> {
    /// What this host's KVM does.
    pub capabilities: &'a dyn Capabilities,
    /// Why no case can be run at all; then every case is listed as skipped for that reason.
    pub problem: Option<String>,
    /// Ends the run when it is set; the reports are still written.
    pub interrupt: &'a AtomicBool,
    /// Columns of the terminal behind `out`; `None` when it is no terminal.
    pub columns: Option<usize>,
    /// Where the lines or the TAP go.
    pub out: &'a mut dyn Write,
}

impl fmt::Debug for Host<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host")
            .field("problem", &self.problem)
            .finish_non_exhaustive()
    }
}

/// Runs `hindsight test` with what this host's KVM was measured to do.
///
/// The status is 0 when nothing failed, 1 when a case failed, 2 when /dev/kvm cannot be used, and
/// 130 after an interrupt.
///
/// # Errors
///
/// Bad usage and bad images, for which the caller is to end with status 2; host errors.
pub fn run(mut args: TestArgs) -> Result<ExitCode> {
    if args.runner.is_none() {
        args.engine.get_or_insert_with(|| {
            let choice = start::auto_policy().decide(EngineDemand::default());
            choice.engine.to_string()
        });
    }
    let needs_kvm = args.engine.as_deref() == Some("kvm") && !args.ignore_needs;
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
    let measured: &dyn Capabilities = if needs_kvm { &HostKvm } else { &Unmeasured };
    let lacking = Lacking::new(&args.lacking, measured);
    let status = run_with(
        &args,
        Host {
            capabilities: &lacking,
            problem: kvm_problem().filter(|_| needs_kvm),
            interrupt: &interrupt,
            columns,
            out: &mut out,
        },
    )?;
    Ok(ExitCode::from(status))
}

/// Runs `hindsight test` in given surroundings, and returns its status.
///
/// # Errors
///
/// As [`run`].
pub fn run_with(args: &TestArgs, host: Host<'_>) -> Result<u8> {
    let runner = runner(args)?;
    let jobs = prepare(args, host.capabilities, host.problem.as_deref())?;
    if args.list {
        list(host.out, &jobs)?;
        return Ok(0);
    }
    let start = Instant::now();
    let columns = host.columns.filter(|_| !args.tap);
    let progress = columns.map(|columns| text::Progress::new(columns.max(20) - 1));
    let mut console = Console {
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
            .or(args.engine.as_deref())
            .unwrap_or("hindsight");
        let xml = junit::to_xml(&results, name, start.elapsed()).context("JUnit report")?;
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
            .map(|engine| format!("--engine={engine}")),
    );
    Ok(Runner::Hindsight { program, options })
}

/// The payloads that are built into this program.
///
/// # Errors
///
/// When the host gives no memory files.
pub fn builtin_images() -> Result<Vec<Arc<Image>>> {
    crate::harness::BUILTIN_PAYLOADS
        .iter()
        .map(|(name, bytes)| Ok(Arc::new(Image::builtin(name, bytes)?)))
        .collect()
}

/// ForcedSwitch case of the built-in payloads, at every level.
///
/// # Errors
///
/// As [`builtin_images`].
pub fn builtin_jobs() -> Result<Vec<Job>> {
    Ok(select::jobs(&builtin_images()?))
}

/// The jobs of a command line, those that cannot run here marked.
fn prepare(
    args: &TestArgs,
    capabilities: &dyn Capabilities,
    host_problem: Option<&str>,
) -> Result<Vec<Job>> {
    let images = if args.images.is_empty() {
        builtin_images()?
    } else {
        args.images
            .iter()
            .map(|path| Ok(Arc::new(Image::open(path)?)))
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
    if args.engine.as_deref() == Some("kvm") {
        select::mark_profiles(&mut jobs, Facilities::KVM);
    }
    Ok(repeat(jobs, args.repeat))
}

fn list(out: &mut dyn Write, jobs: &[Job]) -> io::Result<()> {
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
    jobs: &[Job],
    interrupt: &AtomicBool,
    console: &mut Console<'_>,
) -> Result<Vec<CaseResult>> {
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let run = |index: usize| -> Result<CaseResult> {
        run_job(&jobs[index], runner, &args.memory, args.timeout, interrupt)
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
                Event::Running(running, ended) => console.progress(jobs, running, ended)?,
                // A case that was cut short says nothing.
                Event::Done(_) if interrupt.load(Ordering::Relaxed) => {}
                Event::Done(result) => {
                    console.result(results.len() + 1, &result)?;
                    results.push(result);
                }
            }
            Ok(())
        },
    )?;
    Ok(results)
}

/// Runs one job to its verdict; `timeout` takes the place of the job's own limit.
///
/// # Errors
///
/// When the host cannot start the child.
pub fn run_job(
    job: &Job,
    runner: &Runner,
    memory: &str,
    timeout: Option<Duration>,
    interrupt: &AtomicBool,
) -> Result<CaseResult> {
    if let Some(reason) = &job.skip {
        return Ok(CaseResult::skipped(job.clone(), reason.clone()));
    }
    let limit = timeout.unwrap_or(job.timeout());
    let command = runner.command(job, memory, limit);
    let program = command.get_program().to_owned();
    let finished = supervise(command, limit + GRACE, interrupt)
        .with_context(|| format!("cannot run {}", program.display()))?;
    Ok(CaseResult::judged(job.clone(), limit, &finished))
}

/// The output: people's lines or TAP, and the progress line.
struct Console<'a> {
    out: &'a mut dyn Write,
    tap: bool,
    progress: Option<text::Progress>,
}

impl Console<'_> {
    fn begin(&mut self, count: usize) -> io::Result<()> {
        if self.tap {
            tap::write_plan(&mut self.out, count)
        } else {
            Ok(())
        }
    }

    fn progress(&mut self, jobs: &[Job], running: &[usize], ended: usize) -> io::Result<()> {
        let Some(progress) = &mut self.progress else {
            return Ok(());
        };
        let names: Vec<String> = running.iter().map(|index| jobs[*index].id()).collect();
        progress.show(&mut self.out, ended, jobs.len(), &names)
    }

    fn clear(&mut self) -> io::Result<()> {
        self.progress
            .as_mut()
            .map_or(Ok(()), |progress| progress.clear(&mut self.out))
    }

    fn result(&mut self, number: usize, result: &CaseResult) -> io::Result<()> {
        self.clear()?;
        if self.tap {
            tap::write_result(&mut self.out, number, result)
        } else {
            text::write_result(&mut self.out, result)
        }
    }

    /// Writes the summary: the last line, also when it is written as a TAP comment.
    fn end(
        &mut self,
        results: &[CaseResult],
        count: usize,
        interrupted: bool,
    ) -> io::Result<Summary> {
        self.clear()?;
        let mut summary = Summary::default();
        results.iter().for_each(|result| summary.count(result));
        if interrupted {
            let missing = format!("interrupted: {} cases not run", count - results.len());
            if self.tap {
                tap::write_bail_out(&mut self.out, &missing)?;
            } else {
                writeln!(self.out, "{missing}")?;
            }
        }
        writeln!(self.out, "{}{summary}", if self.tap { "# " } else { "" })?;
        self.out.flush()?;
        Ok(summary)
    }
}
