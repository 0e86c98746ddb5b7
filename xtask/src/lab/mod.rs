//! The labs run hindsight on an upstream KVM that this machine does not have.
//!
//! docs/internals/labs.md describes them.
//!
//! A lab is Debian's cloud kernel in an emulator: `kvm_amd` in QEMU's emulated SVM, or `kvm_intel`
//! in Bochs' emulated VMX. Its init, ci/guest/lab-init, runs a script of steps and sends /out back
//! over the second serial port.

pub mod arming;
pub mod breakpoints;
pub mod emulator;
pub mod frames;
pub mod gdb;
mod run;
pub mod suite;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};

use crate::artifacts::build_static_binary;
use crate::guests::initramfs::GuestFile;
use crate::kernel::fetch_kernel;
use crate::packages::{self, fetch_busybox, with_cache_lock};
use crate::process::{absolute, existing_file, has_program, root, say};

/// A lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Lab {
    /// Upstream kvm_amd in QEMU's emulated SVM.
    Amd,
    /// Upstream kvm_intel in Bochs' emulated VMX.
    Intel,
}

impl Lab {
    /// The lab's name on the command line and in the names of folders.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amd => "amd",
            Self::Intel => "intel",
        }
    }

    fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Amd => &[
                "cpio",
                "binutils",
                "xz-utils",
                "zstd",
                "qemu-system-x86",
                "seabios",
            ],
            Self::Intel => &[
                "cpio",
                "binutils",
                "xz-utils",
                "zstd",
                "bochs",
                "bochs-term",
                "bochsbios",
                "vgabios",
                "grub-common",
                "grub-pc-bin",
                "xorriso",
                "mtools",
                "bsdutils",
            ],
        }
    }

    fn default_limit(self) -> u64 {
        match self {
            Self::Amd => 300,
            Self::Intel => 1200,
        }
    }

    /// Seconds that a lab may take with its default steps.
    pub fn default_timeout(self) -> u64 {
        match self {
            Self::Amd => 600,
            Self::Intel => 1800,
        }
    }
}

/// The steps of a lab without a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LabStep {
    /// `hindsight doctor`.
    Doctor,
    /// `hindsight test`.
    Test,
}

const AFTER_HELP: &str = "\
Without COMMAND: `hindsight doctor` and `hindsight test`. With it: that command, in /out, with its
output and its exit status. hindsight is on the PATH there, and so is busybox.

Exit status: that of the first command that failed, 124 when time ran out, 2 for wrong arguments, and 3
when the lab did not come up or died; then the end of its console is shown.";

/// Brings up upstream kvm_amd (in QEMU's emulated SVM) or kvm_intel (in Bochs' emulated VMX), runs
/// hindsight in it, and brings back what it wrote.
#[derive(Args, Clone, Debug)]
#[command(after_help = AFTER_HELP)]
pub struct LabArguments {
    /// The lab.
    pub lab: Lab,
    /// Where results go: status.txt, console.txt, whatever was written to /out, and doctor.json,
    /// doctor.txt, junit.xml, test.txt, table.md [default: target/lab/NAME].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// A statically linked hindsight [default: builds one in target/lab/build].
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,
    /// Puts a file inside, at /files/NAME or GUEST; repeatable.
    #[arg(long = "file", value_name = "HOST[:GUEST]")]
    pub files: Vec<GuestFile>,
    /// Of the default steps only these.
    #[arg(long, value_delimiter = ',', value_name = "STEPS")]
    pub only: Vec<LabStep>,
    /// More arguments for `hindsight test`, split at spaces.
    #[arg(
        long,
        value_name = "ARGS",
        default_value = "",
        allow_hyphen_values = true
    )]
    pub test_args: String,
    /// Memory of the lab in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub memory: u32,
    /// Processors of the amd lab; the intel lab has 1.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub cpus: u32,
    /// Time limit of each command inside [default: 300 amd, 1200 intel].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,
    /// Time limit of all of it [default: 600 amd, 1800 intel].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: Option<u64>,
    /// Shows the whole console of the lab.
    #[arg(long)]
    pub console: bool,
    /// Shows no progress.
    #[arg(long)]
    pub quiet: bool,
    /// Keeps the work folder and names it.
    #[arg(long)]
    pub keep: bool,
    /// The command to run inside.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
    /// Commands that run one after the other instead. The output of each is /out/NAME.log.
    #[arg(skip)]
    pub commands: Vec<NamedCommand>,
}

/// A command of a lab with the name of its step.
#[derive(Clone, Debug)]
pub struct NamedCommand {
    pub name: String,
    pub words: Vec<String>,
}

impl LabArguments {
    /// The defaults of a lab.
    pub fn new(lab: Lab) -> Self {
        Self {
            lab,
            out: None,
            binary: None,
            files: Vec::new(),
            only: Vec::new(),
            test_args: String::new(),
            memory: 1024,
            cpus: 1,
            limit: None,
            timeout: None,
            console: false,
            quiet: false,
            keep: false,
            command: Vec::new(),
            commands: Vec::new(),
        }
    }

    /// The folder for the results.
    pub fn out(&self) -> Result<PathBuf> {
        match &self.out {
            Some(out) => absolute(out),
            None => Ok(root().join("target/lab").join(self.lab.name())),
        }
    }

    fn runs(&self, step: LabStep) -> bool {
        self.only.is_empty() || self.only.contains(&step)
    }

    fn limit(&self) -> u64 {
        self.limit.unwrap_or(self.lab.default_limit())
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(self.lab.default_timeout()))
    }

    fn progress(&self, text: &str) {
        if !self.quiet {
            say(format!("{}: {text}", self.lab.name()));
        }
    }
}

/// The files that every run of a lab requires.
struct Supplies {
    busybox: PathBuf,
    kernel: PathBuf,
    binary: PathBuf,
}

/// The exit status for arguments that the lab does not support.
const WRONG_ARGUMENTS: u8 = 2;
/// The exit status if the lab did not boot, or its emulator died.
pub const LAB_DIED: u8 = 3;
/// The exit status if the lab's time limit passed.
pub const TIMED_OUT: u8 = 124;

/// Runs a lab; returns the exit status that [`LabArguments`] describes.
pub fn run(arguments: &LabArguments) -> Result<u8> {
    if arguments.lab == Lab::Intel && arguments.cpus != 1 {
        say("the intel lab has one processor");
        return Ok(WRONG_ARGUMENTS);
    }
    match supply(arguments) {
        Ok(supplies) => run::run(arguments, &supplies),
        Err(error) => {
            say(format!("{}: {error:#}", arguments.lab.name()));
            Ok(LAB_DIED)
        }
    }
}

fn supply(arguments: &LabArguments) -> Result<Supplies> {
    let binary = match &arguments.binary {
        Some(binary) => Some(existing_file("--binary", binary)?),
        None => None,
    };
    let (busybox, kernel) = with_cache_lock(|| {
        packages::install(arguments.lab.packages())?;
        if !has_program("python3") {
            packages::install(&["python3"])?;
        }
        Ok((fetch_busybox()?, fetch_kernel()?))
    })?;
    let binary = match binary {
        Some(binary) => binary,
        None => {
            arguments.progress("building the static binary");
            build_static_binary()?
        }
    };
    Ok(Supplies {
        busybox,
        kernel,
        binary,
    })
}

/// Quotes words for the shell inside.
pub fn quote<S: AsRef<str>>(words: &[S]) -> String {
    let quoted = words
        .iter()
        .map(|word| format!("'{}'", word.as_ref().replace('\'', r"'\''")));
    quoted.collect::<Vec<_>>().join(" ")
}

/// The script of steps that the lab's init runs.
fn steps(arguments: &LabArguments) -> String {
    let limit = arguments.limit();
    if !arguments.command.is_empty() {
        let console = u8::from(arguments.console);
        let command = quote(&arguments.command);
        return format!(
            "step command /out/stdout.txt /out/stderr.txt {console} {limit} {command}\n"
        );
    }
    let mut script = String::new();
    for NamedCommand { name, words } in &arguments.commands {
        let command = quote(words);
        script += &format!("step {name} /out/{name}.log /out/{name}.err 0 {limit} {command}\n");
    }
    if !arguments.commands.is_empty() {
        return script;
    }
    if arguments.runs(LabStep::Doctor) {
        script += &format!(
            "step doctor-json /out/doctor.json /out/doctor-json.err 0 {limit} hindsight doctor --facilities short --json\n\
             step doctor /out/doctor.txt /out/doctor.err 1 {limit} hindsight doctor --facilities none\n"
        );
    }
    if arguments.runs(LabStep::Test) {
        let words: Vec<&str> = arguments.test_args.split_whitespace().collect();
        script += &format!(
            "step test /out/test.txt /out/test.err 1 {limit} \
             hindsight test --junit /out/junit.xml {}\n",
            quote(&words)
        );
    }
    script
}

/// Fails unless a lab ended with status 0.
pub fn require_success(name: &str, status: u8) -> Result<()> {
    if status != 0 {
        bail!("{name} ended with status {status}");
    }
    Ok(())
}

/// A folder under target/lab.
pub fn folder(name: &str) -> PathBuf {
    Path::new(&root()).join("target/lab").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quote_protects_single_quotes() {
        assert_eq!(quote(&["a b", "it's"]), r"'a b' 'it'\''s'");
    }

    #[test]
    fn command_replaces_default_steps() {
        let mut arguments = LabArguments::new(Lab::Amd);
        arguments.command = vec!["dmesg".to_owned()];
        assert_eq!(
            steps(&arguments),
            "step command /out/stdout.txt /out/stderr.txt 0 300 'dmesg'\n"
        );
    }

    #[test]
    fn each_named_command_is_a_step() {
        let mut arguments = LabArguments::new(Lab::Amd);
        arguments.commands = ["one", "two"]
            .map(|name| NamedCommand {
                name: name.to_owned(),
                words: vec!["echo".to_owned(), name.to_owned()],
            })
            .to_vec();
        assert_eq!(
            steps(&arguments),
            "step one /out/one.log /out/one.err 0 300 'echo' 'one'\n\
             step two /out/two.log /out/two.err 0 300 'echo' 'two'\n"
        );
    }

    #[test]
    fn only_test_leaves_doctor_out() {
        let mut arguments = LabArguments::new(Lab::Intel);
        arguments.only = vec![LabStep::Test];
        arguments.test_args = "--filter msr".to_owned();
        assert_eq!(
            steps(&arguments),
            "step test /out/test.txt /out/test.err 1 1200 \
             hindsight test --junit /out/junit.xml '--filter' 'msr'\n"
        );
    }
}
