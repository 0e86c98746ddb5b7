//! Starts and ends the emulators.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use xshell::cmd;

use super::{Lab, LabArguments};
use crate::process::shell;

/// Kernel options of both labs.
///
/// The kernel panics if its check of the timer fails, which it may on a busy machine because the
/// emulated timer is late. `no_timer_check` leaves the check out.
const COMMON: &str = "console=ttyS1,115200 printk.devkmsg=on quiet panic=-1 mitigations=off \
                      no_timer_check tsc=reliable cryptomgr.notests";
/// Bochs counts 50 million TSC ticks a second, whatever its CPUID says.
const BOCHS: &str =
    "nokaslr tsc_early_khz=50000 lpj=200000 initcall_blacklist=load_system_certificate_list";

/// The files of a running lab.
#[derive(Clone, Debug)]
pub struct Work {
    /// The folder.
    pub folder: PathBuf,
}

impl Work {
    /// The file with the output of the first serial port: the steps and their output.
    pub fn console(&self) -> PathBuf {
        self.folder.join("console")
    }

    /// The file with the output of the second serial port: the kernel's console and the results.
    pub fn result(&self) -> PathBuf {
        self.folder.join("result")
    }

    /// The file with the output of the emulator itself.
    pub fn log(&self) -> PathBuf {
        self.folder.join("emulator.log")
    }

    /// The initramfs.
    pub fn initrd(&self) -> PathBuf {
        self.folder.join("initrd")
    }

    fn bochs_pid(&self) -> PathBuf {
        self.folder.join("bochs.pid")
    }
}

/// A running emulator, which is killed when it is dropped.
#[derive(Debug)]
pub struct Emulator {
    lab: Lab,
    work: Work,
    child: Child,
    status: Option<ExitStatus>,
    ended: Arc<AtomicBool>,
    drain: Option<JoinHandle<()>>,
}

impl Emulator {
    /// Starts the emulator of a lab.
    pub fn start(arguments: &LabArguments, kernel: &Path, work: &Work) -> Result<Self> {
        let mut command = match arguments.lab {
            Lab::Amd => qemu(arguments, kernel, work),
            Lab::Intel => bochs(arguments, kernel, work)?,
        };
        let log = File::create(work.log())?;
        let child = command
            .stdin(Stdio::null())
            .stderr(log.try_clone()?)
            .stdout(log)
            .spawn()
            .context("cannot start the emulator")?;
        let ended = Arc::new(AtomicBool::new(false));
        let drain = (arguments.lab == Lab::Intel).then(|| {
            let (log, ended) = (work.log(), Arc::clone(&ended));
            thread::spawn(move || drain_display(&log, &ended))
        });
        Ok(Self {
            lab: arguments.lab,
            work: work.clone(),
            child,
            status: None,
            ended,
            drain,
        })
    }

    /// Whether the emulator still runs.
    pub fn is_running(&mut self) -> Result<bool> {
        if self.status.is_none() {
            self.status = self.child.try_wait()?;
        }
        Ok(self.status.is_none())
    }

    /// Kills the emulator if it still runs. Returns the signal that killed it before, if any.
    pub fn end(&mut self) -> Result<Option<i32>> {
        let died = if self.is_running()? {
            self.kill()?;
            None
        } else {
            self.status
                .and_then(|status| status.signal().or_else(|| shell_signal(status)))
        };
        self.ended.store(true, Ordering::Relaxed);
        if let Some(drain) = self.drain.take() {
            drain.join().ok();
        }
        Ok(died)
    }

    fn kill(&mut self) -> Result<()> {
        // Bochs' pid is surely its own only while its parent, script, lives; script ends when it
        // has reaped it.
        if self.lab == Lab::Intel {
            let pid = fs::read_to_string(self.work.bochs_pid()).unwrap_or_default();
            if let Some(pid) = pid.trim().parse().ok().and_then(Pid::from_raw) {
                kill_process(pid, Signal::KILL).ok();
                for _ in 0..10 {
                    if !self.is_running()? {
                        return Ok(());
                    }
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
        self.child.kill().ok();
        self.status = Some(self.child.wait()?);
        Ok(())
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.end().ok();
    }
}

/// Returns the signal that killed the emulator, which script(1) reports as status 128 + N.
fn shell_signal(status: ExitStatus) -> Option<i32> {
    status
        .code()
        .filter(|code| *code > 128)
        .map(|code| code - 128)
}

fn qemu(arguments: &LabArguments, kernel: &Path, work: &Work) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args("-accel tcg,thread=multi -cpu max,+svm -nodefaults -no-user-config".split(' '))
        .args("-display none -no-reboot".split(' '))
        .args([
            "-smp",
            &arguments.cpus.to_string(),
            "-m",
            &arguments.memory.to_string(),
        ])
        .arg("-kernel")
        .arg(kernel.join("vmlinuz"))
        .arg("-initrd")
        .arg(work.initrd())
        // Without tsc=reliable Linux distrusts the TSC of two processors that do not say it is
        // invariant, and KVM then moves every guest's TSC when a vCPU changes processors.
        .args(["-append", COMMON])
        .args(["-serial", &format!("file:{}", work.console().display())])
        .args(["-serial", &format!("file:{}", work.result().display())]);
    command
}

/// Returns the command that starts Bochs, which boots a CD made by GRUB.
fn bochs(arguments: &LabArguments, kernel: &Path, work: &Work) -> Result<Command> {
    let (cd, image) = (work.folder.join("cd"), work.folder.join("cd.iso"));
    fs::create_dir_all(cd.join("boot/grub"))?;
    fs::copy(kernel.join("vmlinuz"), cd.join("boot/vmlinuz"))?;
    fs::copy(work.initrd(), cd.join("boot/initrd"))?;
    fs::write(
        cd.join("boot/grub/grub.cfg"),
        format!(
            "set timeout=0\nserial --unit=0 --speed=115200\nterminal_output serial\n\
             linux /boot/vmlinuz {COMMON} {BOCHS}\ninitrd /boot/initrd\nboot\n"
        ),
    )?;
    let shell = shell()?;
    let made = cmd!(
        shell,
        "grub-mkrescue -d /usr/lib/grub/i386-pc -o {image} {cd}"
    );
    let output = made.quiet().ignore_status().output()?;
    if !output.status.success() {
        bail!(
            "grub-mkrescue failed:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    fs::remove_dir_all(cd)?;
    fs::write(
        work.folder.join("bochsrc"),
        bochs_configuration(arguments.memory, work),
    )?;
    // Debian's build waits for its debugger's "c".
    fs::write(work.folder.join("rc"), "c\n")?;
    let mut command = Command::new("script");
    // The term display requires a terminal.
    command
        .args([
            "-qec",
            "echo $$ >\"$LAB/bochs.pid\"; exec bochs -q -f \"$LAB/bochsrc\" -rc \"$LAB/rc\"",
        ])
        .arg("/dev/null")
        .env("TERM", "xterm")
        .env("LAB", &work.folder);
    Ok(command)
}

fn bochs_configuration(memory: u32, work: &Work) -> String {
    format!(
        "megs: {memory}
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=corei7_skylake_x, count=1, ips=50000000, reset_on_triple_fault=1, ignore_bad_msrs=1
ata0-master: type=cdrom, path=\"{folder}/cd.iso\", status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=\"{console}\"
com2: enabled=1, mode=file, dev=\"{result}\"
display_library: term
clock: sync=none, time0=local
speaker: enabled=0
sound: waveoutdrv=dummy, waveindrv=dummy, midioutdrv=dummy
panic: action=report
error: action=ignore
info: action=ignore
log: \"{folder}/bochs.log\"
",
        folder = work.folder.display(),
        console = work.console().display(),
        result = work.result().display(),
    )
}

/// Reads and discards the output of Bochs' display until `ended` is set.
///
/// Bochs opens a terminal for its display, and blocks forever once the terminal's buffer is full.
fn drain_display(log: &Path, ended: &AtomicBool) {
    let mut screen = None;
    let mut buffer = [0; 65536];
    while !ended.load(Ordering::Relaxed) {
        if screen.is_none() {
            screen = screen_name(log).and_then(|name| open_terminal(&name));
        }
        let read = screen.as_mut().is_some_and(|file: &mut File| {
            // An error: no output yet, or the terminal has no other end now.
            file.read(&mut buffer).is_ok_and(|length| length > 0)
        });
        if !read {
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Returns the path of the terminal that Bochs names in its output.
fn screen_name(log: &Path) -> Option<String> {
    let bytes = fs::read(log).ok()?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (_, rest) = text.rsplit_once("connected to screen \"")?;
    rest.split_once('"').map(|(name, _)| name.to_owned())
}

fn open_terminal(name: &str) -> Option<File> {
    let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::NONBLOCK;
    rustix::fs::open(name, flags, Mode::empty())
        .ok()
        .map(File::from)
}
