//! The tests that `ci/test labs` runs in each lab.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use super::arming::{self, ArmingArguments, ArmingMachine};
use super::breakpoints::{self, LinuxBreakpointsArguments};
use super::gdb::{LabGdbArguments, run_tests};
use super::{Lab, LabArguments, LabStep, folder, require_success, run};
use crate::conformance::TestEngine;
use crate::guests::initramfs::GuestFile;
use crate::guests::{gdb, make_images};
use crate::process::{existing_file, root, say};

/// The payloads that run under KVM in both labs.
///
/// Payloads that arm breakpoints are left out because they crash the emulator of the amd lab
/// (docs/internals/labs.md). Payloads of facilities that no KVM provides are left out because they
/// run in the interpreter, which needs no lab.
const PAYLOADS: &[&str] = &[
    "apic/",
    "apic_timer/",
    "cpuid/",
    "debug_basic/",
    "devices/",
    "exceptions/",
    "hello/",
    "hlt/",
    "ioapic_pic/",
    "ipi_smp/",
    "msr/",
    "stress_exits/",
    "sysregs/",
    "timer/",
    "tsc/",
    "tsc_smp/",
    "workload/",
];

/// The payloads that run with `--engine auto`.
///
/// They use debug registers and single-stepping, which a guest can use without an exit.
const AUTO_PAYLOADS: &[&str] = &["debug_basic/", "tf/", "shadow/", "rf/", "gd/", "iob/"];

/// The path of this program, which stays valid after cargo has replaced its file.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Number of random sequences of arming and disarming that run in each lab.
const SEQUENCES: u64 = 1000;

/// Runs the tests of one lab.
///
/// They are doctor, the payloads, the gdb sessions and random sequences of arming; in the amd lab
/// also guest images and Linux's tests of breakpoints.
pub fn run_suite(lab: Lab, binary: &Path) -> Result<()> {
    let binary = existing_file("BINARY", binary)?;
    payloads(lab, &binary)?;
    gdb_sessions(lab, &binary)?;
    random_sequences(lab, &binary)?;
    if lab == Lab::Amd {
        images(&binary)?;
        linux_breakpoints(lab, &binary)?;
    }
    Ok(())
}

/// Runs the suites of both labs at the same time; prints the output of each when both have ended.
pub fn run_both(binary: &Path, results: &Path) -> Result<()> {
    let mut suites = Vec::new();
    for lab in [Lab::Amd, Lab::Intel] {
        let path = results.join(format!("lab-{}.log", lab.name()));
        let log = File::create(&path)?;
        let child = Command::new(THIS_PROGRAM)
            .args(["lab-suite", lab.name()])
            .arg(binary)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        suites.push((lab, path, child));
    }
    let mut failed = Vec::new();
    for (lab, path, mut child) in suites {
        if !child.wait()?.success() {
            say(format!("lab {} failed", lab.name()));
            failed.push(lab.name());
        }
        print!("{}", String::from_utf8_lossy(&fs::read(path)?));
    }
    if !failed.is_empty() {
        bail!("the suite of lab {} failed", failed.join(" and "));
    }
    Ok(())
}

/// Returns the arguments of a lab: no progress output, and time limits for a busy machine.
fn quiet_lab(lab: Lab, binary: &Path) -> LabArguments {
    let mut arguments = LabArguments::new(lab);
    arguments.binary = Some(binary.to_path_buf());
    arguments.quiet = true;
    (arguments.limit, arguments.timeout) = (Some(1200), Some(1800));
    arguments
}

fn payloads(lab: Lab, binary: &Path) -> Result<()> {
    let mut arguments = quiet_lab(lab, binary);
    run_payloads(&mut arguments, "kvm", PAYLOADS)?;
    arguments.out = Some(folder(&format!("{}-auto", lab.name())));
    arguments.only = vec![LabStep::Test];
    run_payloads(&mut arguments, "auto", AUTO_PAYLOADS)
}

fn run_payloads(arguments: &mut LabArguments, engine: &str, payloads: &[&str]) -> Result<()> {
    // The limits of the cases are meant for real processors.
    arguments.test_args = format!("--timeout 60 --engine {engine}");
    for payload in payloads {
        arguments.test_args += &format!(" --filter {payload}");
    }
    let status = run(arguments)?;
    let out = arguments.out()?;
    for name in ["status.txt", "table.md"] {
        print!("{}", fs::read_to_string(out.join(name)).unwrap_or_default());
    }
    if status != 0 {
        let text = fs::read_to_string(out.join("test.txt")).unwrap_or_default();
        for line in text.lines() {
            if !line.starts_with("pass ") && !line.starts_with("skip ") {
                println!("{line}");
            }
        }
    }
    require_success("the lab's doctor and payloads", status)
}

/// Runs the gdb tests with `--engine auto`, then gdb sessions under KVM alone.
fn gdb_sessions(lab: Lab, binary: &Path) -> Result<()> {
    let status = run_tests(&LabGdbArguments {
        lab,
        binary: Some(binary.to_path_buf()),
        linux: false,
        timeout: None,
        names: Vec::new(),
    })?;
    require_success("the lab's gdb tests", status)?;
    let mut arguments = quiet_lab(lab, binary);
    arguments.out = Some(folder(&format!("{}-gdb", lab.name())));
    arguments.files = gdb::make(&folder(&format!("{}-gdb-files", lab.name())))?;
    arguments.command = ["env", "ENGINE=--engine kvm", "sh", "/files/gdb-sessions"]
        .map(str::to_owned)
        .to_vec();
    require_success("the lab's gdb sessions", run(&arguments)?)
}

/// Runs random sequences of arming, and compares their log with that of the interpreter.
fn random_sequences(lab: Lab, binary: &Path) -> Result<()> {
    let machine = match lab {
        Lab::Amd => ArmingMachine::Amd,
        Lab::Intel => ArmingMachine::Intel,
    };
    let status = arming::compare(&ArmingArguments {
        machines: vec![machine],
        sequences: SEQUENCES,
        first: 0,
        binary: Some(binary.to_path_buf()),
    })?;
    require_success("the lab's random sequences", status)
}

fn linux_breakpoints(lab: Lab, binary: &Path) -> Result<()> {
    let status = breakpoints::run_guest(&LinuxBreakpointsArguments {
        lab: Some(lab),
        engine: TestEngine::Auto,
        binary: Some(binary.to_path_buf()),
        timeout: 2400,
    })?;
    require_success("Linux's tests of breakpoints", status)
}

/// Runs guest images under kvm_amd.
fn images(binary: &Path) -> Result<()> {
    let guests: PathBuf = root().join("target/guests");
    make_images(&guests)?;
    let mut arguments = LabArguments::new(Lab::Amd);
    arguments.binary = Some(binary.to_path_buf());
    arguments.quiet = true;
    arguments.out = Some(folder("amd-images"));
    for name in [
        "vmlinuz",
        "initrd.gz",
        "memtest86+x64.bin",
        "grub-multiboot",
        "multiboot",
    ] {
        arguments
            .files
            .push(GuestFile::in_files(guests.join(name))?);
    }
    arguments
        .files
        .push(GuestFile::in_files(root().join("ci/guest/image-tests"))?);
    arguments.command = ["sh", "/files/image-tests"].map(str::to_owned).to_vec();
    require_success("the lab's guest images", run(&arguments)?)
}
