//! Runs Linux's own tests of breakpoints and single-stepping in a guest.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use clap::Args;

use super::{Lab, LabArguments, folder, run};
use crate::artifacts::build_static_binary;
use crate::conformance::TestEngine;
use crate::guests::initramfs::GuestFile;
use crate::guests::linux::{self, Tools};
use crate::process::{existing_file, root, say};

/// The prefix of the line that the guest prints for each test.
const MARK: &str = "linux-breakpoints: ";
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 nmi_watchdog=0 cryptomgr.notests \
                            hindsight.script=/files/guest-breakpoints";

/// Runs in a Linux guest the kernel's selftest of breakpoints, a session of gdb, and perf's tests
/// of breakpoints; prints a line for each.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Exit status: 0 all passed, 1 some failed or did not run.")]
pub struct LinuxBreakpointsArguments {
    /// The lab [default: this machine].
    #[arg(long, value_name = "LAB")]
    pub lab: Option<Lab>,
    /// The engine.
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub engine: TestEngine,
    /// A statically linked hindsight [default: builds one in target/lab/build].
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,
    /// Time limit in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    pub timeout: u64,
}

/// Runs the guest; returns the exit status.
pub fn run_guest(arguments: &LinuxBreakpointsArguments) -> Result<u8> {
    let binary = match &arguments.binary {
        Some(binary) => existing_file("--binary", binary)?,
        None => build_static_binary()?,
    };
    let files = root().join("target/guests/breakpoints");
    linux::make(Tools::Breakpoints, &files)?;
    let log = match arguments.lab {
        Some(lab) => in_lab(arguments, lab, &binary, &files)?,
        None => here(arguments, &binary, &files)?,
    };
    let lines = log
        .lines()
        .filter_map(|line| line.trim_end().split_once(MARK));
    let verdicts: Vec<&str> = lines.map(|(_, verdict)| verdict).collect();
    let failed = verdicts.iter().any(|verdict| verdict.starts_with("FAIL"));
    let passed = verdicts.contains(&"complete") && !failed;
    for verdict in verdicts {
        println!("{verdict}");
    }
    if !passed {
        let end: Vec<&str> = log.lines().collect();
        say("not all tests passed; the end of the guest's output:");
        for line in &end[end.len().saturating_sub(60)..] {
            println!("{line}");
        }
    }
    Ok(u8::from(!passed))
}

fn words(arguments: &LinuxBreakpointsArguments, files: &Path) -> Vec<String> {
    vec![
        "run".to_owned(),
        files.join("vmlinuz").display().to_string(),
        format!("--initrd={}", files.join("initramfs").display()),
        "--memory=512M".to_owned(),
        format!("--engine={}", arguments.engine.name()),
        format!("--timeout={}", arguments.timeout),
        format!("--cmdline={COMMAND_LINE}"),
    ]
}

fn here(arguments: &LinuxBreakpointsArguments, binary: &Path, files: &Path) -> Result<String> {
    let output = Command::new(binary)
        .args(words(arguments, files))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", binary.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn in_lab(
    arguments: &LinuxBreakpointsArguments,
    lab: Lab,
    binary: &Path,
    files: &Path,
) -> Result<String> {
    let mut options = LabArguments::new(lab);
    let out = folder(&format!("{}-linux-breakpoints", lab.name()));
    options.out = Some(out.clone());
    options.binary = Some(binary.to_path_buf());
    options.quiet = true;
    // The guest, and its files once in the lab's initramfs and once in memory.
    options.memory = 2048;
    (options.limit, options.timeout) = (Some(arguments.timeout), Some(arguments.timeout + 300));
    for name in ["vmlinuz", "initramfs"] {
        options.files.push(GuestFile::in_files(files.join(name))?);
    }
    let script = "hindsight \"$@\" >/out/guest.txt";
    options.command = ["sh", "-c", script, "sh"].map(str::to_owned).to_vec();
    options
        .command
        .extend(words(arguments, Path::new("/files")));
    let log = out.join("guest.txt");
    fs::remove_file(&log).ok();
    run(&options)?;
    Ok(String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned())
}
