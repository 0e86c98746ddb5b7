//! The report of `hindsight doctor`, as a table or as JSON.

use std::fmt;
use std::fs;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use crate::kvm::exactness::{FacilityGroup, GroupAction, GroupVerdict, UNMEASURED};
use crate::probe::finding::{Finding, ProbeVerdict};

/// Version of the JSON format.
pub const FORMAT: u32 = 1;

/// What kind of host it is. Nothing here identifies an individual machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInfo {
    /// CPUID vendor, such as `GenuineIntel`.
    pub cpu_vendor: String,
    /// Model name.
    pub cpu_model: String,
    /// Kernel release.
    pub kernel: String,
    /// KVM's modules, loaded or built in.
    pub modules: Vec<String>,
}

impl HostInfo {
    /// This host. Fields that cannot be read are empty.
    pub fn here() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut modules: Vec<String> = fs::read_dir("/sys/module")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.starts_with("kvm"))
            .collect();
        modules.sort();
        Self {
            cpu_vendor: cpuinfo_field(&cpuinfo, "vendor_id"),
            cpu_model: cpuinfo_field(&cpuinfo, "model name"),
            kernel: kernel.trim().to_owned(),
            modules,
        }
    }
}

fn cpuinfo_field(cpuinfo: &str, name: &str) -> String {
    cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map_or_else(String::new, |(_, value)| value.trim().to_owned())
}

/// A probe and its finding: one row of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeResult {
    /// The probe's name.
    pub name: String,
    /// The probe's finding.
    #[serde(flatten)]
    pub finding: Finding,
}

/// The report of all probes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorReport {
    /// [`FORMAT`].
    pub format: u32,
    /// Version of this program.
    pub hindsight: String,
    /// The host.
    pub host: HostInfo,
    /// The results, in the order of measurement.
    pub probes: Vec<ProbeResult>,
    /// How exact KVM is, by group of facilities; empty if that was not measured.
    #[serde(default)]
    pub facilities: Vec<FacilityResult>,
    /// What `hindsight run --engine auto` does on this host; empty if unknown.
    #[serde(default)]
    pub auto: String,
}

/// How exact KVM is in a group of facilities: one row of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FacilityResult {
    /// The group.
    pub group: FacilityGroup,
    /// The verdict.
    #[serde(flatten)]
    pub verdict: GroupVerdict,
}

impl fmt::Display for FacilityResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, detail) = match self.verdict.action(self.group.visibility()) {
            GroupAction::Stay => ("exact", "under KVM"),
            GroupAction::MoveWhenArmed => ("exact", "in the interpreter once the guest arms it"),
            GroupAction::Interpret(reason) if reason == UNMEASURED => {
                return write!(f, "{:<18} unknown  not all cases were run", self.group);
            }
            GroupAction::Interpret(reason) => {
                return write!(f, "{:<18} inexact  {reason}", self.group);
            }
        };
        write!(f, "{:<18} {word:<8} {detail}", self.group)
    }
}

impl DoctorReport {
    /// A report without results.
    pub fn new(host: HostInfo) -> Self {
        Self {
            format: FORMAT,
            hindsight: env!("CARGO_PKG_VERSION").to_owned(),
            host,
            probes: Vec::new(),
            facilities: Vec::new(),
            auto: String::new(),
        }
    }

    /// Writes the report as JSON, one line for each result.
    ///
    /// # Errors
    ///
    /// Writing to `out` fails.
    pub fn write_json(&self, mut out: impl Write) -> io::Result<()> {
        json_head(&mut out, self)?;
        for (n, row) in self.probes.iter().enumerate() {
            json_row(&mut out, row, n == 0)?;
        }
        json_tail(&mut out, self)
    }
}

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReportFormat {
    /// For people.
    Table,
    /// For programs.
    Json,
}

/// Prints each result as soon as it is known: a later probe may crash the host.
#[derive(Debug)]
pub(crate) struct ReportPrinter<W> {
    out: W,
    form: ReportFormat,
    first: bool,
}

impl<W: Write> ReportPrinter<W> {
    pub(crate) fn new(mut out: W, form: ReportFormat, report: &DoctorReport) -> io::Result<Self> {
        match form {
            ReportFormat::Table => {
                let host = &report.host;
                writeln!(out, "CPU     {} ({})", host.cpu_model, host.cpu_vendor)?;
                writeln!(out, "kernel  {}, {}", host.kernel, host.modules.join(", "))?;
                writeln!(out)?;
            }
            ReportFormat::Json => json_head(&mut out, report)?,
        }
        out.flush()?;
        Ok(Self {
            out,
            form,
            first: true,
        })
    }

    pub(crate) fn result(&mut self, row: &ProbeResult) -> io::Result<()> {
        match self.form {
            ReportFormat::Table => {
                let Finding { verdict, detail } = &row.finding;
                writeln!(self.out, "{:<18} {verdict:<8} {detail}", row.name)?;
            }
            ReportFormat::Json => json_row(&mut self.out, row, self.first)?,
        }
        self.first = false;
        self.out.flush()
    }

    /// Prints the count of verdicts, before the facilities.
    pub(crate) fn finish_probes(&mut self, report: &DoctorReport) -> io::Result<()> {
        match self.form {
            ReportFormat::Table => {
                let count = |verdict| {
                    report
                        .probes
                        .iter()
                        .filter(|row| row.finding.verdict == verdict)
                        .count()
                };
                writeln!(
                    self.out,
                    "\n{} probe{}: {} work, {} differ, {} broken, {} absent, {} skipped",
                    report.probes.len(),
                    if report.probes.len() == 1 { "" } else { "s" },
                    count(ProbeVerdict::Works),
                    count(ProbeVerdict::Differs),
                    count(ProbeVerdict::Broken),
                    count(ProbeVerdict::Absent),
                    count(ProbeVerdict::Skipped),
                )?;
            }
            ReportFormat::Json => {}
        }
        self.out.flush()
    }

    /// Prints how exact KVM is in one group. JSON has all groups at the end.
    pub(crate) fn facility(&mut self, row: &FacilityResult, first: bool) -> io::Result<()> {
        if self.form == ReportFormat::Table {
            if first {
                writeln!(self.out)?;
            }
            writeln!(self.out, "{row}")?;
        }
        self.out.flush()
    }

    /// Prints what `--engine auto` does.
    pub(crate) fn finish(mut self, report: &DoctorReport) -> io::Result<()> {
        match self.form {
            ReportFormat::Table if report.auto.is_empty() => {}
            ReportFormat::Table => writeln!(self.out, "\n--engine auto: {}", report.auto)?,
            ReportFormat::Json => json_tail(&mut self.out, report)?,
        }
        self.out.flush()
    }
}

fn json_head(out: &mut impl Write, report: &DoctorReport) -> io::Result<()> {
    let (version, host) = (
        serde_json::to_string(&report.hindsight)?,
        serde_json::to_string(&report.host)?,
    );
    writeln!(
        out,
        "{{\"format\":{},\"hindsight\":{version},",
        report.format
    )?;
    write!(out, "\"host\":{host},\n\"probes\":[")
}

fn json_row(out: &mut impl Write, row: &impl Serialize, first: bool) -> io::Result<()> {
    let comma = if first { "" } else { "," };
    write!(out, "{comma}\n{}", serde_json::to_string(row)?)
}

fn json_tail(out: &mut impl Write, report: &DoctorReport) -> io::Result<()> {
    write!(out, "\n],\n\"facilities\":[")?;
    for (index, row) in report.facilities.iter().enumerate() {
        json_row(out, row, index == 0)?;
    }
    let auto = serde_json::to_string(&report.auto)?;
    writeln!(out, "\n],\n\"auto\":{auto}}}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::exactness::Exactness;

    fn report() -> DoctorReport {
        let host = HostInfo {
            cpu_vendor: "GenuineIntel".into(),
            cpu_model: "A \"model\"".into(),
            kernel: "6.1.0".into(),
            modules: vec!["kvm".into(), "kvm_intel".into()],
        };
        let mut report = DoctorReport::new(host);
        for (name, finding) in [
            ("step-cpl0", Finding::differs("stops; duplicates")),
            ("smi", Finding::absent("KVM_SMI: ENOTTY")),
        ] {
            report.probes.push(ProbeResult {
                name: name.into(),
                finding,
            });
        }
        for (group, alone) in [
            (FacilityGroup::Time, Exactness::Exact),
            (
                FacilityGroup::Exceptions,
                Exactness::Inexact("swi/x cpl=0: lost".into()),
            ),
            (FacilityGroup::Interrupts, Exactness::Unmeasured),
        ] {
            let moving = Exactness::Unmeasured;
            let verdict = GroupVerdict { alone, moving };
            report.facilities.push(FacilityResult { group, verdict });
        }
        report.auto = "the interpreter, because \"x\"".into();
        report
    }

    fn printed(form: ReportFormat, report: &DoctorReport) -> String {
        let mut out = Vec::new();
        let mut printer = ReportPrinter::new(&mut out, form, report).unwrap();
        report
            .probes
            .iter()
            .for_each(|row| printer.result(row).unwrap());
        printer.finish_probes(report).unwrap();
        for (index, row) in report.facilities.iter().enumerate() {
            printer.facility(row, index == 0).unwrap();
        }
        printer.finish(report).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn json_printed_row_by_row_parses_as_the_report() {
        let report = report();
        let read: DoctorReport =
            serde_json::from_str(&printed(ReportFormat::Json, &report)).unwrap();
        assert_eq!(read, report);
    }

    #[test]
    fn json_written_at_once_equals_json_printed_row_by_row() {
        let mut whole = Vec::new();
        report().write_json(&mut whole).unwrap();
        assert_eq!(
            String::from_utf8(whole).unwrap(),
            printed(ReportFormat::Json, &report())
        );
    }

    #[test]
    fn json_without_rows_is_well_formed() {
        let report = DoctorReport::new(HostInfo::default());
        let read: DoctorReport =
            serde_json::from_str(&printed(ReportFormat::Json, &report)).unwrap();
        assert_eq!(read.probes, []);
    }

    #[test]
    fn table_has_a_line_for_each_row_and_a_count_of_verdicts() {
        let table = printed(ReportFormat::Table, &report());
        assert!(table.contains("step-cpl0          differs  stops; duplicates\n"));
        assert!(table.contains("2 probes: 0 work, 1 differ, 0 broken, 1 absent, 0 skipped\n"));
        let mut one = report();
        one.probes.truncate(1);
        let table = printed(ReportFormat::Table, &one);
        assert!(table.contains("\n1 probe: 0 work, 1 differ,"), "{table}");
    }

    #[test]
    fn table_ends_with_a_line_for_each_group_and_the_engine() {
        let expected = "\n\
            time               exact    under KVM\n\
            exceptions         inexact  swi/x cpl=0: lost\n\
            interrupts         unknown  not all cases were run\n\n\
            --engine auto: the interpreter, because \"x\"\n";
        let table = printed(ReportFormat::Table, &report());
        assert!(table.ends_with(expected), "{table}");
    }

    #[test]
    fn cpuinfo_field_is_read_from_its_first_line() {
        let cpuinfo =
            "vendor_id\t: AuthenticAMD\nmodel\t: 1\nmodel name\t: X: 1\nmodel name\t: Y\n";
        assert_eq!(cpuinfo_field(cpuinfo, "model name"), "X: 1");
        assert_eq!(cpuinfo_field(cpuinfo, "flags"), "");
    }
}
