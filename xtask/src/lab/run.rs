//! Runs a lab once: makes its initramfs, runs the emulator and collects the results.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown, register_usize};

use super::emulator::{Emulator, Work};
use super::frames::{DONE, last_frame, plain_console};
use super::{LAB_DIED, LabArguments, Supplies, TIMED_OUT, steps};
use crate::guests::initramfs::{self, GuestFile};
use crate::process::{root, say};

/// The result files. A run first removes those of an earlier run.
const RESULTS: [&str; 9] = [
    "status.txt",
    "console.txt",
    "doctor.json",
    "doctor.txt",
    "junit.xml",
    "test.txt",
    "stdout.txt",
    "stderr.txt",
    "table.md",
];

/// The console's line after which the user is shown its output.
const READY: &str = "lab: ready";

/// How a lab ended.
struct LabEnd {
    timed_out: bool,
    /// The signal that killed the emulator, unless this process sent it.
    signal: Option<i32>,
    seconds: u64,
}

pub fn run(arguments: &LabArguments, supplies: &Supplies) -> Result<u8> {
    let folder = tempfile::Builder::new()
        .prefix("hindsight-lab.")
        .tempdir()?;
    let work = Work {
        folder: folder.path().to_path_buf(),
    };
    let result = run_in(arguments, supplies, &work);
    if arguments.keep {
        say(format!("kept {}", folder.keep().display()));
    }
    result
}

fn run_in(arguments: &LabArguments, supplies: &Supplies, work: &Work) -> Result<u8> {
    File::create(work.console())?;
    File::create(work.result())?;
    make_initramfs(arguments, supplies, work)?;
    let out = arguments.out()?;
    fs::create_dir_all(&out)?;
    for name in RESULTS {
        fs::remove_file(out.join(name)).ok();
    }
    arguments.progress("starting");
    let end = emulate(arguments, supplies, work)?;
    let (console, result) = (fs::read(work.console())?, fs::read(work.result())?);
    fs::write(out.join("console.txt"), plain_console(&result, &console))?;
    let collected = collect(&result, work, &out)?;
    let status = exit_status(arguments, &end, work, collected.then_some(&out))?;
    if collected {
        report(arguments, &out)?;
    }
    arguments.progress(&format!(
        "ended with status {status} after {} s",
        end.seconds
    ));
    Ok(status)
}

fn make_initramfs(arguments: &LabArguments, supplies: &Supplies, work: &Work) -> Result<()> {
    let tree = work.folder.join("root");
    initramfs::add_program(&tree, &GuestFile::new(&supplies.busybox, "bin/busybox"))?;
    initramfs::add_program(&tree, &GuestFile::new(&supplies.binary, "bin/hindsight"))?;
    initramfs::add_program(
        &tree,
        &GuestFile::new(root().join("ci/guest/lab-init"), "init"),
    )?;
    fs::create_dir_all(tree.join("lab"))?;
    for module in ["irqbypass", "kvm", &format!("kvm-{}", arguments.lab.name())] {
        let name = format!("{module}.ko");
        let file = supplies.kernel.join(&name);
        if file.exists() {
            initramfs::add(&tree, &GuestFile::new(file, Path::new("lab").join(name)))?;
        }
    }
    fs::write(tree.join("lab/steps"), steps(arguments))?;
    for file in &arguments.files {
        initramfs::add(&tree, file)?;
    }
    // Not compressed: reading more is cheaper than decompressing in an emulator.
    initramfs::pack(&tree, &work.initrd())
}

/// Runs the emulator until it ends or the time limit passes.
///
/// The lab's init powers the machine off, which ends the emulator. If it does not end, it is killed
/// five seconds after the line [`DONE`].
fn emulate(arguments: &LabArguments, supplies: &Supplies, work: &Work) -> Result<LabEnd> {
    let interrupted = interruption()?;
    let start = Instant::now();
    let mut emulator = Emulator::start(arguments, &supplies.kernel, work)?;
    let followers = Followers::start(arguments, work);
    let mut grace = None;
    let mut timed_out = false;
    while emulator.is_running()? {
        let signal = interrupted.load(Ordering::Relaxed);
        ensure!(signal == 0, "interrupted by signal {signal}");
        match grace {
            Some(end) if Instant::now() >= end => break,
            Some(_) => {}
            None if contains(&work.result(), DONE)? => {
                grace = Some(Instant::now() + Duration::from_secs(5));
            }
            None if start.elapsed() >= arguments.timeout() => {
                timed_out = true;
                break;
            }
            None => {}
        }
        thread::sleep(Duration::from_millis(300));
    }
    let signal = emulator.end()?;
    followers.end();
    Ok(LabEnd {
        timed_out,
        signal,
        seconds: start.elapsed().as_secs(),
    })
}

/// Returns a flag with the number of the signal that asks this process to end, or 0.
///
/// Installs handlers for these signals, because the emulator must be killed before this process
/// ends. A second signal ends the process at once.
fn interruption() -> Result<&'static AtomicUsize> {
    static SIGNAL: OnceLock<Arc<AtomicUsize>> = OnceLock::new();
    if SIGNAL.get().is_none() {
        let flag = Arc::new(AtomicUsize::new(0));
        let again = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let number = usize::try_from(signal).context("a signal is positive")?;
            // The first signal sets the flag, the second one ends the process at once.
            register_conditional_shutdown(signal, 128 + signal, Arc::clone(&again))?;
            register(signal, Arc::clone(&again))?;
            register_usize(signal, Arc::clone(&flag), number)?;
        }
        // Another thread may have been first, and then its flag is set as well.
        SIGNAL.set(flag).ok();
    }
    SIGNAL
        .get()
        .map(|flag| &**flag)
        .context("the flag was set just now")
}

fn contains(path: &Path, text: &str) -> Result<bool> {
    let bytes = fs::read(path)?;
    Ok(bytes
        .windows(text.len())
        .any(|window| window == text.as_bytes()))
}

/// Unpacks the last frame to `out`; returns whether there was one.
fn collect(result: &[u8], work: &Work, out: &Path) -> Result<bool> {
    let Some(archive) = last_frame(result) else {
        return Ok(false);
    };
    let frame = work.folder.join("frame");
    fs::write(&frame, archive)?;
    let status = Command::new("tar")
        .arg("-C")
        .arg(out)
        .args(["--no-same-owner", "--touch", "-xzf"])
        .arg(frame)
        .stdin(Stdio::null())
        .status()?;
    Ok(status.success())
}

/// Returns the exit status: that of a lab that failed, or of the first step that failed.
fn exit_status(
    arguments: &LabArguments,
    end: &LabEnd,
    work: &Work,
    collected: Option<&PathBuf>,
) -> Result<u8> {
    let lab = arguments.lab.name();
    if !contains(&work.result(), DONE)? {
        let ready = contains(&work.console(), READY)?;
        if end.timed_out {
            say(format!(
                "{lab}: time is up: no end after {} s",
                arguments.timeout().as_secs()
            ));
        } else if let Some(signal) = end.signal {
            let name = signal_name(signal);
            say(format!(
                "{lab}: the emulator died of {name} after {} s",
                end.seconds
            ));
        } else if ready {
            say(format!("{lab}: the lab died after {} s", end.seconds));
        } else {
            say(format!("{lab}: the lab did not come up"));
        }
        show_console_end(work)?;
        return Ok(if end.timed_out && ready {
            TIMED_OUT
        } else {
            LAB_DIED
        });
    }
    let Some(out) = collected else {
        say(format!("{lab}: what came back is damaged"));
        return Ok(LAB_DIED);
    };
    let steps = fs::read_to_string(out.join("status.txt"))?;
    let statuses = steps
        .lines()
        .filter_map(|line| line.split('\t').nth(1)?.parse::<u8>().ok());
    Ok(statuses
        .into_iter()
        .find(|status| *status != 0)
        .unwrap_or(0))
}

fn signal_name(signal: i32) -> String {
    use signal_hook::consts::{SIGABRT, SIGKILL, SIGSEGV};
    match signal {
        SIGSEGV => "SIGSEGV".to_owned(),
        SIGABRT => "SIGABRT".to_owned(),
        SIGKILL => "SIGKILL".to_owned(),
        _ => format!("signal {signal}"),
    }
}

fn show_console_end(work: &Work) -> Result<()> {
    let text = plain_console(&fs::read(work.result())?, &fs::read(work.console())?);
    let (title, text) = if text.is_empty() {
        let log = fs::read(work.log())?;
        (
            "its console is empty; the output of the emulator:",
            String::from_utf8_lossy(&log).into(),
        )
    } else {
        ("the end of its console:", text)
    };
    say(title);
    let lines: Vec<&str> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(30)..] {
        eprintln!("{line}");
    }
    Ok(())
}

/// Prints the command's output, or makes the table of the default steps.
fn report(arguments: &LabArguments, out: &Path) -> Result<()> {
    if !arguments.command.is_empty() {
        let stdout = fs::read(out.join("stdout.txt")).unwrap_or_default();
        std::io::stdout().write_all(&stdout)?;
        let stderr = fs::read(out.join("stderr.txt")).unwrap_or_default();
        std::io::stderr().write_all(&stderr)?;
        return Ok(());
    }
    if !arguments.commands.is_empty() {
        return Ok(());
    }
    let lab = arguments.lab.name();
    let mut results = Vec::new();
    for name in ["doctor.json", "junit.xml"] {
        let file = out.join(name);
        if file.metadata().is_ok_and(|data| data.len() > 0) {
            results.push(format!("{lab}={}", file.display()));
        }
    }
    if !results.is_empty() && write_table(&results, &out.join("table.md")).is_err() {
        say(format!("{lab}: no table could be made"));
    }
    arguments.progress(&format!("results are in {}", out.display()));
    Ok(())
}

/// Writes the table of the results of doctor and test; each of `results` is `MACHINE=FILE`.
fn write_table(results: &[String], to: &Path) -> Result<()> {
    let output = Command::new("python3")
        .args(["-B", "-m", "hindsight_ci.lab_table"])
        .args(results)
        .env("PYTHONPATH", root().join("ci/judges"))
        .stdin(Stdio::null())
        .output()?;
    ensure!(output.status.success(), "lab_table failed");
    Ok(fs::write(to, output.stdout)?)
}

/// Threads that show the console while the emulator runs.
struct Followers {
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Followers {
    /// Starts to show all output of the console, or the part after [`READY`].
    ///
    /// A long command may report its progress in the kernel's log, in lines that begin with "lab:
    /// ": these lines arrive over the second serial port and are shown too.
    fn start(arguments: &LabArguments, work: &Work) -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        if !arguments.quiet {
            let mut is_ready = arguments.console;
            threads.push(follow(work.console(), &ended, move |line| {
                is_ready |= line.contains(READY);
                is_ready.then(|| line.to_owned())
            }));
            threads.push(follow(work.result(), &ended, |line| {
                let text = line.strip_prefix('[')?.split_once("] ")?.1;
                text.starts_with("lab: ").then(|| text.to_owned())
            }));
        }
        Self { ended, threads }
    }

    fn end(self) {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().ok();
        }
    }
}

/// Prints each line that is appended to a file, as `select` changes it.
fn follow(
    path: PathBuf,
    ended: &Arc<AtomicBool>,
    mut select: impl FnMut(&str) -> Option<String> + Send + 'static,
) -> JoinHandle<()> {
    let ended = Arc::clone(ended);
    thread::spawn(move || {
        let (mut position, mut pending) = (0, Vec::new());
        loop {
            let last = ended.load(Ordering::Relaxed);
            if let Ok(bytes) = read_from(&path, position) {
                position += bytes.len() as u64;
                pending.extend(bytes);
            }
            while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                if let Some(text) = select(String::from_utf8_lossy(&line).trim_end()) {
                    eprintln!("{text}");
                }
            }
            if last {
                return;
            }
            thread::sleep(Duration::from_millis(500));
        }
    })
}

fn read_from(path: &Path, position: u64) -> Result<Vec<u8>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(position))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}
