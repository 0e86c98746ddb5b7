//! Runs the payloads on every machine at hand, and makes the conformance page.
//!
//! The page is docs/reports/conformance.md.

mod parts;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};

use crate::artifacts::build_static_binary;
use crate::lab::Lab;
use crate::packages;
use crate::process::{absolute, existing_file, judge, root, say};

/// A machine that runs the payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TestMachine {
    /// This machine.
    Host,
    /// The lab with kvm_amd.
    Amd,
    /// The lab with kvm_intel.
    Intel,
    /// QEMU's own processor, the judge.
    Qemu,
}

/// An engine of hindsight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TestEngine {
    /// The interpreter.
    Interp,
    /// KVM.
    Kvm,
    /// The engine that `--engine auto` chooses.
    Auto,
}

impl TestEngine {
    /// The engine's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interp => "interp",
            Self::Kvm => "kvm",
            Self::Auto => "auto",
        }
    }
}

/// Runs `hindsight test` on all machines, and writes the conformance page.
///
/// The payloads run in the interpreter, under KVM and with `--engine auto`, on this machine and in
/// the labs, and on QEMU's own processor as a judge. The results go to conformance.json and
/// conformance.md in docs/reports. A machine or engine that is not run keeps its last results.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Exit status: 0 when the page was made, whatever the cases say, 1 when a machine gave no report, 2 for
wrong arguments.")]
pub struct ConformanceArguments {
    /// The machines.
    #[arg(long, value_delimiter = ',', default_values = ["host", "amd", "intel", "qemu"], value_name = "LIST")]
    pub machines: Vec<TestMachine>,
    /// The engines.
    #[arg(long, value_delimiter = ',', default_values = ["interp", "kvm", "auto"], value_name = "LIST")]
    pub engines: Vec<TestEngine>,
    /// The name of this machine on the page [default: pvm with that KVM, else host].
    #[arg(long, value_name = "NAME")]
    pub host_name: Option<String>,
    /// A statically linked hindsight [default: builds one in target/lab/build].
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,
    /// Where reports and logs go [default: target/conformance].
    #[arg(long, value_name = "DIR")]
    pub results: Option<PathBuf>,
    /// Keeps the parts that an earlier run in the labs has finished, if it ran the same program.
    #[arg(long = "continue")]
    pub continued: bool,
    /// Runs, and leaves docs/ unchanged.
    #[arg(long)]
    pub reports_only: bool,
    /// More arguments for `hindsight test`.
    #[arg(last = true, value_name = "TEST-ARGUMENT")]
    pub test_arguments: Vec<String>,
}

/// A run of all payloads, with the defaults of the arguments filled in.
struct Conformance<'a> {
    arguments: &'a ConformanceArguments,
    binary: PathBuf,
    results: PathBuf,
    host: String,
}

/// Runs the payloads and makes the page.
pub fn run(arguments: &ConformanceArguments) -> Result<()> {
    let default = root().join("target/conformance");
    let results = absolute(arguments.results.as_deref().unwrap_or(&default))?;
    fs::create_dir_all(&results)?;
    for entry in fs::read_dir(&results)? {
        let path = entry?.path();
        // The reports of labs are in folders of their own.
        if path.extension().is_some_and(|extension| extension == "xml") {
            fs::remove_file(path)?;
        }
    }
    let binary = match &arguments.binary {
        Some(binary) => existing_file("--binary", binary)?,
        None => build_static_binary()?,
    };
    let pvm = Path::new("/sys/module/kvm_pvm").is_dir();
    let host = arguments.host_name.clone();
    let host = host.unwrap_or_else(|| if pvm { "pvm" } else { "host" }.to_owned());
    let conformance = Conformance {
        arguments,
        binary,
        results,
        host,
    };
    conformance.run_machines()?;
    conformance.collect()
}

impl Conformance<'_> {
    /// Runs each lab in a thread, and the other machines in this thread at the same time.
    fn run_machines(&self) -> Result<()> {
        let has = |machine| self.arguments.machines.contains(&machine);
        std::thread::scope(|scope| {
            let mut labs = Vec::new();
            for (machine, lab) in [
                (TestMachine::Amd, Lab::Amd),
                (TestMachine::Intel, Lab::Intel),
            ] {
                if has(machine) {
                    labs.push(scope.spawn(move || self.run_lab(lab)));
                }
            }
            if has(TestMachine::Host) {
                self.run_host()?;
            }
            if has(TestMachine::Qemu) {
                self.run_qemu()?;
            }
            for lab in labs {
                match lab.join() {
                    Ok(result) => result?,
                    Err(_) => bail!("the thread of a lab panicked"),
                }
            }
            Ok(())
        })
    }

    /// Runs the cases with each engine on this machine. A failed case is a result, not an error.
    fn run_host(&self) -> Result<()> {
        for engine in &self.arguments.engines {
            let name = format!("{}.{}", self.host, engine.name());
            say(format!("{}: {}", self.host, engine.name()));
            self.test(&name, &["--engine", engine.name(), "--timeout", "30"])?;
        }
        Ok(())
    }

    /// Runs the cases on QEMU's own processor.
    fn run_qemu(&self) -> Result<()> {
        say("judge: qemu");
        packages::install(&["qemu-system-x86", "seabios"])?;
        let runner = "qemu-system-x86_64 -accel tcg -cpu max -m {memory} -smp {cpus} -kernel {image} \
                      -append {cmdline} -display none -serial stdio -no-reboot \
                      -device isa-debug-exit,iobase=0xf4,iosize=4";
        self.test("judge.qemu", &["--timeout", "60", "--runner", runner])
    }

    /// Runs `hindsight test` on this machine. Its report is NAME.xml, and its output NAME.log.
    fn test(&self, name: &str, options: &[&str]) -> Result<()> {
        let log = File::create(self.results.join(format!("{name}.log")))?;
        Command::new(&self.binary)
            .arg("test")
            .args(options)
            .arg("--junit")
            .arg(self.results.join(format!("{name}.xml")))
            .args(&self.arguments.test_arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .status()?;
        Ok(())
    }

    /// Returns the reports that this run should have made, by column of the page.
    fn expected_reports(&self) -> Vec<(String, Vec<PathBuf>)> {
        let mut reports = Vec::new();
        let file = |name: String| vec![self.results.join(format!("{name}.xml"))];
        for machine in &self.arguments.machines {
            let engines = self.arguments.engines.iter().map(|engine| engine.name());
            match machine {
                TestMachine::Qemu => {
                    reports.push(("judge/qemu".to_owned(), file("judge.qemu".to_owned())));
                }
                TestMachine::Host => reports.extend(engines.map(|engine| {
                    let name = format!("{}.{engine}", self.host);
                    (format!("{}/{engine}", self.host), file(name))
                })),
                TestMachine::Amd | TestMachine::Intel => {
                    let lab = match machine {
                        TestMachine::Amd => Lab::Amd,
                        _ => Lab::Intel,
                    };
                    reports.extend(engines.map(|engine| {
                        let column = format!("{}/{engine}", lab.name());
                        (column, self.lab_reports(lab, engine))
                    }));
                }
            }
        }
        reports
    }

    fn collect(&self) -> Result<()> {
        let mut found = Vec::new();
        let mut missing = Vec::new();
        for (column, files) in self.expected_reports() {
            if files.iter().all(|file| is_report(file)) {
                let files = files.iter().map(|file| file.display());
                found.extend(files.map(|file| format!("{column}={file}")));
            } else {
                missing.push(column);
            }
        }
        if !self.arguments.reports_only && !found.is_empty() {
            // A run of some cases leaves the results of the others.
            let is_whole = self.arguments.test_arguments.is_empty();
            let command = if is_whole { "update" } else { "merge" };
            found.insert(0, command.to_owned());
            judge("conformance_report", &found)?;
            say("made docs/reports/conformance.md");
        }
        if !missing.is_empty() {
            bail!("no report of {}", missing.join(", "));
        }
        Ok(())
    }
}

/// Whether a file exists and contains a report.
fn is_report(file: &Path) -> bool {
    file.metadata().is_ok_and(|data| data.len() > 0)
}
