//! The report: about the host, and a row for each probe; as a table, as JSON, saved to a file.

use std::fs;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use crate::probe::finding::{Finding, Verdict};

/// Version of the JSON form.
pub const FORMAT: u32 = 1;

/// What the host says it is. Nothing here tells one machine of a model from another.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// CPUID vendor, such as `GenuineIntel`.
    pub cpu_vendor: String,
    /// Model name.
    pub cpu_model: String,
    /// Kernel release.
    pub kernel: String,
    /// KVM's modules, loaded or built in.
    pub modules: Vec<String>,
}

impl Host {
    /// This host; what cannot be read is left empty.
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

/// One row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The probe.
    pub name: String,
    /// What it found.
    #[serde(flatten)]
    pub finding: Finding,
}

/// A whole report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// `FORMAT`.
    pub format: u32,
    /// Version of this program.
    pub hindsight: String,
    /// Where it was measured.
    pub host: Host,
    /// What was found, in the order in which it was measured.
    pub probes: Vec<Row>,
}

impl Report {
    /// A report without rows.
    pub fn new(host: Host) -> Self {
        Self {
            format: FORMAT,
            hindsight: env!("CARGO_PKG_VERSION").to_owned(),
            host,
            probes: Vec::new(),
        }
    }

    /// The report as JSON, a line for each row.
    ///
    /// # Errors
    ///
    /// When `out` fails.
    pub fn write_json(&self, mut out: impl Write) -> io::Result<()> {
        json_head(&mut out, self)?;
        for (n, row) in self.probes.iter().enumerate() {
            json_row(&mut out, row, n == 0)?;
        }
        json_tail(&mut out)
    }
}

/// How rows are shown as they come, so that what was measured is seen even if a later probe takes
/// the machine down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// For people.
    Table,
    /// For programs.
    Json,
}

/// Shows a report row by row.
#[derive(Debug)]
pub(crate) struct Printer<W> {
    out: W,
    form: Form,
    first: bool,
}

impl<W: Write> Printer<W> {
    pub(crate) fn new(mut out: W, form: Form, report: &Report) -> io::Result<Self> {
        match form {
            Form::Table => {
                let host = &report.host;
                writeln!(out, "CPU     {} ({})", host.cpu_model, host.cpu_vendor)?;
                writeln!(out, "kernel  {}, {}", host.kernel, host.modules.join(", "))?;
                writeln!(out)?;
            }
            Form::Json => json_head(&mut out, report)?,
        }
        out.flush()?;
        Ok(Self {
            out,
            form,
            first: true,
        })
    }

    pub(crate) fn row(&mut self, row: &Row) -> io::Result<()> {
        match self.form {
            Form::Table => {
                let Finding { verdict, detail } = &row.finding;
                writeln!(self.out, "{:<18} {verdict:<8} {detail}", row.name)?;
            }
            Form::Json => json_row(&mut self.out, row, self.first)?,
        }
        self.first = false;
        self.out.flush()
    }

    pub(crate) fn finish(mut self, report: &Report) -> io::Result<()> {
        match self.form {
            Form::Table => {
                let count = |verdict| {
                    report
                        .probes
                        .iter()
                        .filter(|row| row.finding.verdict == verdict)
                        .count()
                };
                writeln!(
                    self.out,
                    "\n{} probes: {} work, {} differ, {} broken, {} absent, {} skipped",
                    report.probes.len(),
                    count(Verdict::Works),
                    count(Verdict::Differs),
                    count(Verdict::Broken),
                    count(Verdict::Absent),
                    count(Verdict::Skipped),
                )?;
            }
            Form::Json => json_tail(&mut self.out)?,
        }
        self.out.flush()
    }
}

fn json_head(out: &mut impl Write, report: &Report) -> io::Result<()> {
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

fn json_row(out: &mut impl Write, row: &Row, first: bool) -> io::Result<()> {
    let comma = if first { "" } else { "," };
    write!(out, "{comma}\n{}", serde_json::to_string(row)?)
}

fn json_tail(out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "\n]}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let host = Host {
            cpu_vendor: "GenuineIntel".into(),
            cpu_model: "A \"model\"".into(),
            kernel: "6.1.0".into(),
            modules: vec!["kvm".into(), "kvm_intel".into()],
        };
        let mut report = Report::new(host);
        for (name, finding) in [
            ("step-cpl0", Finding::differs("stops; duplicates")),
            ("smi", Finding::absent("KVM_SMI: ENOTTY")),
        ] {
            report.probes.push(Row {
                name: name.into(),
                finding,
            });
        }
        report
    }

    fn printed(form: Form, report: &Report) -> String {
        let mut out = Vec::new();
        let mut printer = Printer::new(&mut out, form, report).unwrap();
        report
            .probes
            .iter()
            .for_each(|row| printer.row(row).unwrap());
        printer.finish(report).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn json_row_by_row_is_the_report() {
        let report = report();
        let read: Report = serde_json::from_str(&printed(Form::Json, &report)).unwrap();
        assert_eq!(read, report);
    }

    #[test]
    fn json_at_once_and_row_by_row_are_the_same() {
        let mut whole = Vec::new();
        report().write_json(&mut whole).unwrap();
        assert_eq!(
            String::from_utf8(whole).unwrap(),
            printed(Form::Json, &report())
        );
    }

    #[test]
    fn json_of_no_rows_is_well_formed() {
        let report = Report::new(Host::default());
        let read: Report = serde_json::from_str(&printed(Form::Json, &report)).unwrap();
        assert_eq!(read.probes, []);
    }

    #[test]
    fn table_has_a_line_for_each_row_and_counts_them() {
        let table = printed(Form::Table, &report());
        assert!(table.contains("step-cpl0          differs  stops; duplicates\n"));
        assert!(table.ends_with("2 probes: 0 work, 1 differ, 0 broken, 1 absent, 0 skipped\n"));
    }

    #[test]
    fn cpuinfo_field_is_taken_from_its_first_line() {
        let cpuinfo =
            "vendor_id\t: AuthenticAMD\nmodel\t: 1\nmodel name\t: X: 1\nmodel name\t: Y\n";
        assert_eq!(cpuinfo_field(cpuinfo, "model name"), "X: 1");
        assert_eq!(cpuinfo_field(cpuinfo, "flags"), "");
    }
}
