//! The command `hindsight doctor`.

use std::cell::RefCell;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{ValueEnum, ValueHint};

use super::Status;
use super::logging::Logging;
use crate::exactness::{self, Scope};
use crate::machine::start;
use crate::probe::context::ProbeContext;
use crate::probe::finding::{Finding, Probe, ProbeVerdict};
use crate::probe::findings_cache::{Findings, FindingsCache};
use crate::probe::report::{
    DoctorReport, FacilityResult, HostInfo, ProbeResult, ReportFormat, ReportPrinter,
};
use crate::probe::{ProbeError, probes, store_findings};
use crate::vcpu::engine::policy::{EngineDemand, Preference};

/// Measure what this host's KVM does.
///
/// Each probe runs a tiny guest. The findings are cached until the host reboots. Then the cases of the
/// built-in payloads run under KVM, to find the groups of facilities in which it is exact; the
/// verdicts are kept until the kernel, KVM's modules, the processor or its microcode change. `hindsight
/// run` and `hindsight test` use both: the last line says what --engine auto does here.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 the probes ran, 2 KVM cannot be used or the arguments are wrong.

Examples:
  hindsight doctor
  hindsight doctor --only gd,step-cpl0
  hindsight doctor --json --save report.json")]
pub struct DoctorArgs {
    /// Print JSON, a line for each probe
    #[arg(long)]
    json: bool,
    /// Also write a report to contribute [default FILE: hindsight-doctor.json]; it names the CPU model,
    /// the kernel and the KVM modules
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "hindsight-doctor.json")]
    #[arg(value_hint = ValueHint::FilePath, visible_alias = "report")]
    save: Option<PathBuf>,
    /// Cases to measure for each group of facilities
    #[arg(long, value_enum, value_name = "CASES", default_value_t)]
    facilities: FacilitiesArg,
    /// Run only these probes, separated by commas
    #[arg(long, value_name = "PROBES", value_delimiter = ',')]
    only: Vec<String>,
    /// Do not run these probes, separated by commas
    #[arg(long, value_name = "PROBES", value_delimiter = ',')]
    skip: Vec<String>,
    /// List the probes and what each measures
    #[arg(long)]
    list: bool,
}

/// `--facilities`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum FacilitiesArg {
    /// All cases of the built-in payloads: about a minute on a fast KVM.
    #[default]
    All,
    /// The few that a first start runs.
    Short,
    /// None.
    None,
}

/// Runs the command. The status is 2 when KVM cannot be used, after one line that says why.
///
/// # Errors
///
/// When the report cannot be written.
pub fn run(args: DoctorArgs) -> anyhow::Result<ExitCode> {
    Logging::start_from_environment()?;
    match measure(&args) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if is_closed_pipe(&error) => Ok(ExitCode::SUCCESS),
        Err(error) if error.is::<ProbeError>() => {
            let _ = writeln!(io::stderr(), "hindsight: {error:#}");
            Ok(Status::Usage.into())
        }
        Err(error) => Err(error),
    }
}

fn measure(args: &DoctorArgs) -> anyhow::Result<()> {
    if let Some(name) = args
        .only
        .iter()
        .chain(&args.skip)
        .find(|name| probes().all(|probe| probe.name != **name))
    {
        return Err(ProbeError::Unknown(name.clone()).into());
    }
    let chosen = |probe: &&Probe| args.only.is_empty() || args.only.iter().any(|n| n == probe.name);
    if args.list {
        return list(probes().filter(chosen));
    }
    let context = ProbeContext::open().map_err(ProbeError::from)?;
    let mut report = DoctorReport::new(HostInfo::here());
    let form = if args.json {
        ReportFormat::Json
    } else {
        ReportFormat::Table
    };
    let mut printer = ReportPrinter::new(io::stdout().lock(), form, &report)?;
    for probe in probes().filter(chosen) {
        let finding = if args.skip.iter().any(|name| name == probe.name) {
            Finding::new(ProbeVerdict::Skipped, "not asked for")
        } else {
            probe.run(&context)
        };
        let row = ProbeResult {
            name: probe.name.to_owned(),
            finding,
        };
        printer.result(&row)?;
        report.probes.push(row);
    }
    printer.finish_probes(&report)?;
    let measured: Findings = report
        .probes
        .iter()
        .filter(|row| row.finding.verdict != ProbeVerdict::Skipped)
        .map(|row| (row.name.clone(), row.finding.clone()))
        .collect();
    store_findings(FindingsCache::of_this_boot().as_ref(), &measured);
    if args.only.is_empty() && args.skip.is_empty() {
        measure_facilities(args.facilities, &mut report, &mut printer)?;
        let decision = start::auto_policy(Preference::default())
            .policy
            .decide(EngineDemand::default());
        report.auto = format!("{}, because {}", decision.engine, decision.because);
    }
    printer.finish(&report)?;
    args.save
        .as_deref()
        .map_or(Ok(()), |path| save(&report, path))
}

/// Measures how exact KVM is, and saves that for later runs.
fn measure_facilities<W: Write>(
    facilities: FacilitiesArg,
    report: &mut DoctorReport,
    printer: &mut ReportPrinter<W>,
) -> anyhow::Result<()> {
    let scope = match facilities {
        FacilitiesArg::All => Scope::All,
        FacilitiesArg::Short => Scope::Short,
        FacilitiesArg::None => return Ok(()),
    };
    // Elsewhere the engine does not depend on it.
    if !exactness::applies_to_host() {
        return Ok(());
    }
    let mut first = true;
    let line = RefCell::new(CaseCounter::new());
    exactness::measure_all(
        scope,
        &mut |group, result| line.borrow_mut().show(&group, &result.job.id()),
        &mut |group, verdict| {
            line.borrow_mut().clear();
            let row = FacilityResult {
                group,
                verdict: verdict.clone(),
            };
            printer.facility(&row, first)?;
            first = false;
            report.facilities.push(row);
            Ok(())
        },
    )
}

/// Which case has run, on a terminal.
struct CaseCounter {
    terminal: bool,
    cases: usize,
}

impl CaseCounter {
    fn new() -> Self {
        Self {
            terminal: io::stderr().is_terminal(),
            cases: 0,
        }
    }

    fn show(&mut self, group: &impl Display, case: &str) {
        self.cases += 1;
        if self.terminal {
            let cases = self.cases;
            let _ = write!(io::stderr(), "\r\x1b[K{group}: {cases} cases, {case}");
        }
    }

    fn clear(&mut self) {
        if self.terminal && self.cases != 0 {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
        self.cases = 0;
    }
}

fn list<'a>(probes: impl Iterator<Item = &'a Probe>) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    for probe in probes {
        writeln!(out, "{:<18} {}", probe.name, probe.about)?;
    }
    Ok(())
}

fn save(report: &DoctorReport, path: &Path) -> anyhow::Result<()> {
    let context = || format!("cannot write the report to {}", path.display());
    let mut file = BufWriter::new(File::create(path).with_context(context)?);
    report
        .write_json(&mut file)
        .and_then(|()| file.flush())
        .with_context(context)
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}
