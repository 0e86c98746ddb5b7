//! Builds, tests and checks Hindsight: see `cargo xtask --help`.
//!
//! `ci/test`, `ci/lab` and `ci/conformance` are launchers of this program. The judges and benchmarks
//! that it runs are a Python package, ci/judges; the scripts that run inside guests are in ci/guest.

mod advisories;
mod artifacts;
mod check;
mod conformance;
mod coverage;
mod fuzz;
mod guests;
mod kernel;
mod kvm_unit_tests;
mod lab;
mod nightly;
mod packages;
mod process;
mod python;
mod style;
mod test;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};

use crate::conformance::ConformanceArguments;
use crate::guests::initramfs::GuestFile;
use crate::guests::linux::Tools;
use crate::kvm_unit_tests::KvmUnitTestsArguments;
use crate::lab::arming::ArmingArguments;
use crate::lab::breakpoints::LinuxBreakpointsArguments;
use crate::lab::gdb::LabGdbArguments;
use crate::lab::{Lab, LabArguments};

#[derive(Parser)]
#[command(
    about = "Builds, tests and checks Hindsight",
    disable_help_subcommand = true
)]
struct TaskLine {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Sets up what is missing (Debian packages, Rust targets, tools) and runs all tests, or only the
    /// named steps.
    #[command(after_help = test::list())]
    Test {
        /// Removes what a step has built for itself alone as soon as it has run, to save space.
        #[arg(long)]
        tidy: bool,
        /// The steps.
        steps: Vec<String>,
    },

    /// Builds the payloads of guest-tests and copies them to a folder.
    Payloads {
        /// The folder [default: guest-tests/target/payloads].
        out: Option<PathBuf>,
    },
    /// Builds the statically linked program and prints its path.
    StaticBinary,

    #[command(flatten)]
    Guest(GuestTask),

    /// Runs hindsight on an upstream KVM that this machine does not have. See docs/internals/labs.md.
    Lab(LabArguments),
    /// Runs the gdb tests in a lab.
    LabGdb(LabGdbArguments),
    /// Runs Linux's own tests of breakpoints, gdb and perf in a guest, here or in a lab.
    LinuxBreakpoints(LinuxBreakpointsArguments),
    /// Runs in one lab what `ci/test labs` expects of it.
    LabSuite {
        /// The lab.
        lab: Lab,
        /// A statically linked hindsight.
        binary: PathBuf,
    },
    /// Prints the doctor and JUnit results of several machines as one markdown table.
    LabTable {
        /// doctor.json or junit.xml of a machine.
        #[arg(required = true, value_name = "[MACHINE=]FILE")]
        files: Vec<String>,
    },
    /// Runs the payloads on every machine at hand and makes docs/reports/conformance.md of the results.
    Conformance(ConformanceArguments),
    /// Compares `--engine auto` with the interpreter on random sequences of arming and disarming.
    Arming(ArmingArguments),
    /// Makes docs/reports/conformance.md again from the results that are known, after a change of spec/.
    ConformancePage,
    /// Makes the table in docs/reports/hosts/README.md of the reports in that folder.
    HostsPage,
    /// Runs kvm-unit-tests from built checkouts and makes docs/reports/kvm-unit-tests.md of the results.
    KvmUnitTests(KvmUnitTestsArguments),

    /// Runs the fuzz targets under AddressSanitizer, with a nightly toolchain.
    Fuzz(fuzz::FuzzArguments),
    /// Runs tests of the interpreter under a memory checker.
    Sanitize {
        /// The checker.
        checker: Checker,
        /// Arguments of the tests.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },

    /// Finds names that the project does not use, and types that are defined twice.
    CheckNames,
    /// Finds import circles, and imports and unsafe code that docs/internals/design.md does not have.
    CheckHouse {
        /// Prints the blocks of docs/internals/design.md that match the tree.
        #[arg(long)]
        print: bool,
    },
    /// Finds files and functions that are too long.
    CheckSize,
    /// Finds rules without text, and citations of rules that do not exist.
    CheckSpec,
    /// Finds pages that docs/SUMMARY.md does not list, and links of pages that lead nowhere.
    CheckBook,
}

/// Guest images.
#[derive(Subcommand)]
enum GuestTask {
    /// Puts the Linux kernel of the labs and memtest86+ into a folder; nothing is installed.
    FetchGuests {
        /// The folder.
        dir: PathBuf,
    },
    /// Puts the images that ci/guest/image-tests boots into a folder.
    Images {
        /// The folder.
        dir: PathBuf,
    },
    /// Makes a busybox initramfs to boot as a Linux guest.
    ///
    /// As a guest it prints "hindsight-guest: ready" and gives a shell on the console; `poweroff -f` or
    /// `exit` ends it. With "hindsight.selftest" on the kernel command line it runs a few commands,
    /// prints "hindsight-guest: selftest passed" and powers off.
    Initramfs {
        /// The file, which is compressed if its name ends in .gz.
        out: PathBuf,
        /// Puts a file into it, at /files/NAME or GUEST; repeatable.
        #[arg(long = "with", value_name = "FILE[:GUEST]")]
        files: Vec<GuestFile>,
    },
    /// Makes a Linux guest from Debian packages. See docs/guide/linux-guests.md.
    #[command(name = "guest-linux")]
    Linux {
        /// The folder, which gets vmlinuz and initramfs, and with --perf the program measured.
        dir: PathBuf,
        /// With Debian's perf and rr.
        #[arg(long, conflicts_with = "rdt")]
        perf: bool,
        /// With Debian's pqos.
        #[arg(long)]
        rdt: bool,
    },
    /// Makes a multiboot image of GRUB that prints "hello from GRUB".
    GrubMultiboot {
        /// The image.
        out: PathBuf,
    },
    /// Makes a multiboot image that prints its command line.
    Multiboot {
        /// The image.
        out: PathBuf,
    },
    /// Puts gdb and the guests of ci/guest/gdb-sessions into a folder; prints the options of ci/lab that
    /// take them along.
    LabGdbFiles {
        /// The folder.
        dir: PathBuf,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Checker {
    /// Tests of the core and of its stops under valgrind: about a minute.
    Valgrind,
    /// All tests under AddressSanitizer, with a nightly toolchain.
    Address,
}

fn main() -> ExitCode {
    match run(TaskLine::parse().command) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            process::say(format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs a command; returns its exit status.
fn run(command: Task) -> Result<u8> {
    match command {
        Task::Test { steps, tidy } => return test::run(&steps, tidy),
        Task::Payloads { out: Some(out) } => artifacts::build_payloads(&out)?,
        Task::Payloads { out: None } => println!("{}", test::default_payloads()?.display()),
        Task::StaticBinary => println!("{}", artifacts::build_static_binary()?.display()),
        Task::Guest(guest) => run_guest(guest)?,
        Task::Lab(arguments) => return lab::run(&arguments),
        Task::LabGdb(arguments) => return lab::gdb::run_tests(&arguments),
        Task::LinuxBreakpoints(arguments) => return lab::breakpoints::run_guest(&arguments),
        Task::LabSuite { lab, binary } => lab::suite::run_suite(lab, &binary)?,
        Task::LabTable { files } => process::judge("lab_table", &files)?,
        Task::Conformance(arguments) => conformance::run(&arguments)?,
        Task::Arming(arguments) => return lab::arming::compare(&arguments),
        Task::ConformancePage => process::judge("conformance_report", &["render"])?,
        Task::HostsPage => process::judge::<&str>("host_reports", &[])?,
        Task::KvmUnitTests(arguments) => return kvm_unit_tests::run(&arguments),
        Task::Sanitize {
            checker: Checker::Valgrind,
            arguments,
        } => nightly::valgrind(&arguments)?,
        Task::Sanitize {
            checker: Checker::Address,
            arguments,
        } => {
            nightly::address_sanitizer(&arguments)?;
        }
        Task::Fuzz(arguments) => fuzz::run(&arguments)?,
        Task::CheckNames => check::names::run()?,
        Task::CheckHouse { print: false } => check::house::run()?,
        Task::CheckHouse { print: true } => check::house::print()?,
        Task::CheckSize => check::size::run()?,
        Task::CheckSpec => check::spec::run()?,
        Task::CheckBook => check::book::run()?,
    }
    Ok(0)
}

fn run_guest(guest: GuestTask) -> Result<()> {
    match guest {
        GuestTask::FetchGuests { dir } => guests::fetch_guests(&dir),
        GuestTask::Images { dir } => guests::make_images(&dir),
        GuestTask::Initramfs { out, files } => guests::initramfs::make(&out, &files),
        GuestTask::Linux {
            dir, perf: true, ..
        } => guests::linux::make(Tools::Perf, &dir),
        GuestTask::Linux { dir, rdt: true, .. } => guests::linux::make(Tools::Rdt, &dir),
        GuestTask::Linux { dir, .. } => guests::linux::make(Tools::None, &dir),
        GuestTask::GrubMultiboot { out } => guests::grub::make(&out),
        GuestTask::Multiboot { out } => guests::programs::make_multiboot(&out),
        GuestTask::LabGdbFiles { dir } => {
            for file in guests::gdb::make(&dir)? {
                println!("--file {}:/{}", file.host.display(), file.guest.display());
            }
            Ok(())
        }
    }
}
