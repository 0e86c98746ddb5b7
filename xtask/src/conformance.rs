//! Runs the payloads on every machine at hand, and makes docs/reports/conformance.md of the results.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};

use crate::artifacts::build_static_binary;
use crate::lab::{self, Lab, LabArguments};
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
    /// The better one for the machine, as `--engine auto` finds it.
    Auto,
}

impl TestEngine {
    fn name(self) -> &'static str {
        match self {
            Self::Interp => "interp",
            Self::Kvm => "kvm",
            Self::Auto => "auto",
        }
    }
}

/// Runs `hindsight test` in the interpreter, under KVM and with `--engine auto` on this machine and in the labs, and with
/// QEMU's own processor as a judge, and writes conformance.json and conformance.md in docs/reports.
/// What is not run keeps its last results.
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
    /// Runs, and leaves docs/ unchanged.
    #[arg(long)]
    pub reports_only: bool,
    /// More arguments for `hindsight test`.
    #[arg(last = true, value_name = "TEST-ARGUMENT")]
    pub test_arguments: Vec<String>,
}

/// A run of all payloads: what the settings resolve to.
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
    /// Runs the labs in threads of their own, and the other machines meanwhile.
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

    /// Both engines on this machine. Failed cases are results: only a missing report is an error.
    fn run_host(&self) -> Result<()> {
        for engine in &self.arguments.engines {
            let name = format!("{}.{}", self.host, engine.name());
            say(format!("{}: {}", self.host, engine.name()));
            self.test(&name, &["--engine", engine.name(), "--timeout", "30"])?;
        }
        Ok(())
    }

    /// QEMU's own processor runs the cases.
    fn run_qemu(&self) -> Result<()> {
        say("judge: qemu");
        packages::install(&["qemu-system-x86", "seabios"])?;
        let runner = "qemu-system-x86_64 -accel tcg -cpu max -m {memory} -smp {cpus} -kernel {image} \
                      -append {cmdline} -display none -serial stdio -no-reboot \
                      -device isa-debug-exit,iobase=0xf4,iosize=4";
        self.test("judge.qemu", &["--timeout", "60", "--runner", runner])
    }

    /// Runs `hindsight test` here; its report is NAME.xml and its output NAME.log.
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

    /// Both engines in a lab, each in a lab of its own: a crash of the emulator takes all results of
    /// the lab with it.
    fn run_lab(&self, lab: Lab) -> Result<()> {
        for engine in &self.arguments.engines {
            say(format!("{}: {}", lab.name(), engine.name()));
            let name = format!("{}.{}", lab.name(), engine.name());
            let out = self.results.join(&name);
            if out.exists() {
                fs::remove_dir_all(&out)?;
            }
            let mut arguments = LabArguments::new(lab);
            arguments.binary = Some(self.binary.clone());
            arguments.out = Some(out.clone());
            arguments.quiet = true;
            // The limits of the cases are meant for real processors.
            (arguments.limit, arguments.timeout) = (Some(7200), Some(7800));
            let script =
                "hindsight test --timeout 300 --junit /out/junit.xml \"$@\" >/out/test.log 2>&1";
            arguments.command = ["sh", "-c", script, "sh", "--engine", engine.name()]
                .map(str::to_owned)
                .to_vec();
            arguments.command.extend(lacking(lab, *engine));
            arguments
                .command
                .extend(self.arguments.test_arguments.iter().cloned());
            lab::run(&arguments)?;
            let report = out.join("junit.xml");
            if report.metadata().is_ok_and(|data| data.len() > 0) {
                fs::copy(report, self.results.join(format!("{name}.xml")))?;
            } else {
                say(format!(
                    "{}: see {}",
                    lab.name(),
                    out.join("console.txt").display()
                ));
            }
        }
        Ok(())
    }

    /// The reports that this run should have made: the column of the page, and the file.
    fn expected_reports(&self) -> Vec<(String, PathBuf)> {
        let mut reports = Vec::new();
        for machine in &self.arguments.machines {
            let name = match machine {
                TestMachine::Qemu => {
                    reports.push(("judge/qemu".to_owned(), self.results.join("judge.qemu.xml")));
                    continue;
                }
                TestMachine::Host => &self.host,
                TestMachine::Amd => "amd",
                TestMachine::Intel => "intel",
            };
            for engine in &self.arguments.engines {
                let file = self.results.join(format!("{name}.{}.xml", engine.name()));
                reports.push((format!("{name}/{}", engine.name()), file));
            }
        }
        reports
    }

    fn collect(&self) -> Result<()> {
        let mut found = Vec::new();
        let mut missing = Vec::new();
        for (column, file) in self.expected_reports() {
            if file.metadata().is_ok_and(|data| data.len() > 0) {
                found.push(format!("{column}={}", file.display()));
            } else {
                missing.push(column);
            }
        }
        if !self.arguments.reports_only && !found.is_empty() {
            found.insert(0, "update".to_owned());
            judge("conformance_report", &found)?;
            say("made docs/reports/conformance.md");
        }
        if !missing.is_empty() {
            bail!("no report of {}", missing.join(", "));
        }
        Ok(())
    }
}

/// Needs that a lab's KVM has, and whose cases are left out: armed debug registers crash the emulator
/// of `amd` (docs/internals/labs.md).
fn lacking(lab: Lab, engine: TestEngine) -> Vec<String> {
    let needs: &[&str] = match (lab, engine) {
        (Lab::Amd, TestEngine::Kvm) => &[
            "gd",
            "guestbp-data",
            "guestbp-disabled",
            "guestbp-exec-cpl0",
            "guestbp-exec-cpl3",
            "shadow-int3-cpl3",
        ],
        _ => &[],
    };
    let reason = "armed debug registers crash the emulator";
    needs
        .iter()
        .flat_map(|need| ["--lacking".to_owned(), format!("{need}={reason}")])
        .collect()
}
