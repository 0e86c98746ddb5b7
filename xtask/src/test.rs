//! `ci/test`: the steps, in their order, and how they are run.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use xshell::cmd;

use crate::artifacts::{
    build_payloads, build_static, build_static_binary, static_binary, static_cargo,
};
use crate::guests::debian;
use crate::guests::linux::{self, Tools};
use crate::guests::make_images;
use crate::lab::suite;
use crate::process::{has_kvm, has_program, judge, root, say, shell};
use crate::{advisories, check, coverage, fuzz, nightly, packages, python, style};

/// A step of `ci/test`.
struct TestStep {
    name: &'static str,
    about: &'static str,
    /// Whether it runs when no step is named.
    default: bool,
    run: fn() -> Result<()>,
    /// The build folders that no other step uses.
    own_folders: &'static [&'static str],
}

impl TestStep {
    /// The step, which alone uses these build folders.
    const fn builds_in(mut self, folders: &'static [&'static str]) -> Self {
        self.own_folders = folders;
        self
    }

    /// Removes the build folders that no other step uses.
    fn tidy(&self) -> Result<()> {
        for folder in self.own_folders {
            let folder = root().join(folder);
            if folder.exists() {
                fs::remove_dir_all(&folder)
                    .with_context(|| format!("cannot remove {}", folder.display()))?;
            }
        }
        Ok(())
    }
}

/// The space that a run of all steps takes with `--tidy`, in GiB.
const SPACE_GIB: u64 = 12;

const fn step(name: &'static str, run: fn() -> Result<()>, about: &'static str) -> TestStep {
    TestStep {
        name,
        about,
        default: true,
        run,
        own_folders: &[],
    }
}

/// A step that runs only when it is named.
const fn named_only(name: &'static str, run: fn() -> Result<()>, about: &'static str) -> TestStep {
    TestStep {
        name,
        about,
        default: false,
        run,
        own_folders: &[],
    }
}

/// All steps. To enable a step by default, make it a `step`.
const STEPS: &[TestStep] = &[
    step(
        "format",
        style::format,
        "rustfmt, shellcheck, and ruff for the Python package",
    ),
    step(
        "words",
        check::names::run,
        "names that the project does not use, and types defined twice",
    ),
    step(
        "house",
        check::house::run,
        "import circles, and imports and unsafe code against docs/internals/design.md",
    ),
    step(
        "size",
        check::size::run,
        "the length of files and functions",
    ),
    step(
        "commits",
        check::commits::run,
        "subjects of new commits: at most 72 characters (a warning)",
    ),
    step(
        "lint",
        style::lint,
        "clippy, for the monitor, the fuzz targets and the guests' payloads",
    ),
    step(
        "docs",
        docs,
        "docs/SUMMARY.md lists all pages, links lead somewhere, and the API documentation builds",
    ),
    step(
        "publish",
        style::publish,
        "the public crates can be packaged: a dry run of cargo publish, without a build",
    ),
    step(
        "deny",
        advisories::run,
        "licences, bans, sources and advisories of the dependencies",
    ),
    step(
        "unit",
        unit,
        "unit, property and integration tests, and the payloads one by one",
    ),
    named_only(
        "coverage",
        measure_coverage,
        "line coverage of cpu, devices, regs and interp",
    ),
    step(
        "miri",
        nightly::miri,
        "unit tests of regs, cpu and devices under Miri",
    )
    .builds_in(&["target/miri"]),
    step(
        "tsan",
        nightly::thread_sanitizer,
        "unit tests under ThreadSanitizer",
    )
    .builds_in(&["target/tsan"]),
    step(
        "fuzz",
        fuzz::short,
        "every fuzz target for some seconds under AddressSanitizer",
    )
    .builds_in(&["target/fuzz", "target/fuzz-asan"]),
    step("loom", nightly::loom, "the tests of run control under loom").builds_in(&["target/loom"]),
    step(
        "lockstep",
        lockstep,
        "a million instructions of each class in the interpreter and on this processor",
    ),
    step(
        "sanitize",
        sanitize,
        "the interpreter's tests under valgrind",
    ),
    step(
        "counts",
        counts,
        "instructions and branches of whole programs, in the interpreter, in QEMU and in KVM's single steps",
    ),
    step(
        "rules",
        rules,
        "spec/ is complete, cited rules exist, the conformance page is up to date, and the judges' own tests",
    ),
    step(
        "python",
        python::run,
        "the Python package hindsight: its tests, and its types against the module and the examples",
    )
    .builds_in(&["target/ci/python-package"]),
    step(
        "release",
        release,
        "the statically linked program, and `hindsight test` with it",
    ),
    step(
        "labs",
        labs,
        "doctor, payloads, sessions of gdb, random sequences and guest images in the amd and the intel lab",
    ),
    step(
        "images",
        images,
        "guest images in the interpreter, on this machine; Linux saved and debugged; exec, shared folders, disks, OVMF",
    ),
    step(
        "rdt",
        rdt,
        "Linux's resctrl and Debian's pqos in a guest: cache and bandwidth monitored and partitioned",
    ),
    step(
        "perf",
        perf,
        "Linux's own perf with each processor model, and rr, against what a program is known to do",
    ),
];

/// The help text's list of steps.
pub fn list() -> String {
    let mut text = "Steps:\n".to_owned();
    for step in STEPS {
        let when = if step.default {
            ""
        } else {
            " (only when it is named)"
        };
        text += &format!("  {:<9} {}{when}\n", step.name, step.about);
    }
    text
}

/// The folder of the results of steps.
fn results() -> PathBuf {
    root().join("target/ci")
}

/// Runs the named steps, or the default ones; returns the exit status: 0, 1 if a step failed, or 2 if
/// there is no step of a name. With `tidy`, the folder of a step's own builds is removed after it.
pub fn run(names: &[String], tidy: bool) -> Result<u8> {
    let mut chosen = Vec::new();
    for name in names {
        match STEPS.iter().find(|step| step.name == name) {
            Some(step) => chosen.push(step),
            None => {
                say(format!("there is no step '{name}'\n\n{}", list()));
                return Ok(2);
            }
        }
    }
    if chosen.is_empty() {
        chosen.extend(STEPS.iter().filter(|step| step.default));
        warn_of_little_space()?;
    }
    setup()?;
    let (mut passed, mut failed) = (Vec::new(), Vec::new());
    let mut times = Vec::new();
    for step in chosen {
        say(format!("--- {}", step.name));
        let start = Instant::now();
        let mut result = (step.run)();
        if tidy {
            result = result.and(step.tidy());
        }
        let seconds = start.elapsed().as_secs();
        times.push(format!("{} {seconds} s", step.name));
        match result {
            Ok(()) => {
                say(format!("--- {} passed after {seconds} s", step.name));
                passed.push(step.name);
            }
            Err(error) => {
                say(format!("{}: {error:#}", step.name));
                say(format!("--- {} FAILED after {seconds} s", step.name));
                failed.push(step.name);
            }
        }
    }
    let names = |list: &[&str]| {
        if list.is_empty() {
            "none".to_owned()
        } else {
            list.join(" ")
        }
    };
    say(format!("times: {}", times.join(", ")));
    say(format!(
        "passed: {}; failed: {}",
        names(&passed),
        names(&failed)
    ));
    println!("{} passed, {} failed", passed.len(), failed.len());
    Ok(u8::from(!failed.is_empty()))
}

/// Says so if the disk may become full on the way.
fn warn_of_little_space() -> Result<()> {
    let shell = shell()?;
    let root = root();
    let listed = cmd!(shell, "df --output=avail --block-size=1G {root}")
        .quiet()
        .read()?;
    let available = listed
        .lines()
        .last()
        .and_then(|line| line.trim().parse::<u64>().ok());
    if let Some(available) = available.filter(|&available| available < SPACE_GIB) {
        say(format!(
            "warning: {available} GiB are free here, and all steps together take about {SPACE_GIB} GiB"
        ));
    }
    Ok(())
}

/// Installs what every step requires.
fn setup() -> Result<()> {
    packages::install(&[
        "ca-certificates",
        "build-essential",
        "shellcheck",
        "binutils",
        "gdb",
        "lldb",
        "python3",
    ])?;
    let shell = shell()?;
    if has_program("rustup") {
        cmd!(shell, "rustup --quiet target add x86_64-unknown-none")
            .quiet()
            .run()?;
        cmd!(shell, "rustup --quiet component add rustfmt clippy")
            .quiet()
            .run()?;
    }
    Ok(fs::create_dir_all(results())?)
}

fn docs() -> Result<()> {
    check::book::run()?;
    style::docs()
}

fn unit() -> Result<()> {
    let shell = shell()?;
    Ok(cmd!(shell, "cargo test --workspace --no-fail-fast").run()?)
}

fn measure_coverage() -> Result<()> {
    coverage::run(&results())
}

/// Half with a seed that is always the same, half with a fresh one, which is printed.
fn lockstep() -> Result<()> {
    let tester = build_static("hindsight-lockstep", "lockstep")?;
    let shell = shell()?;
    cmd!(shell, "{tester} --cases 500000 --seed 0x5eed").run()?;
    cmd!(shell, "{tester} --cases 500000").run()?;
    cmd!(shell, "{tester} --compare software --cases 200000").run()?;
    Ok(cmd!(shell, "{tester} --compare translated --cases 200000").run()?)
}

fn sanitize() -> Result<()> {
    nightly::valgrind(&[])
}

fn counts() -> Result<()> {
    packages::install(&["qemu-system-x86"])?;
    let payloads = default_payloads()?;
    let binary = build_static_binary()?;
    let mut options = vec!["--no-build".to_owned()];
    options.extend(["--hindsight".to_owned(), binary.display().to_string()]);
    judge("counts", &options)?;
    let branches = results().join("branches.txt");
    if has_kvm() {
        let shell = shell()?;
        let workload = payloads.join("workload");
        cmd!(shell, "{binary} diff {workload} --memory 64M")
            .args([
                "--cmdline",
                "trace=none",
                "--b",
                "--engine kvm",
                "--branches",
            ])
            .arg(&branches)
            .run()?;
        options.extend(["--kvm".to_owned(), branches.display().to_string()]);
    }
    judge("branch_judge", &options)
}

fn rules() -> Result<()> {
    style::judge_tests()?;
    check::spec::run()?;
    let binary = build_static_binary()?;
    let shell = shell()?;
    let listed = cmd!(shell, "{binary} test --engine interp --list").read()?;
    let cases = results().join("cases.txt");
    fs::write(&cases, listed + "\n")?;
    judge("host_reports", &["--check"])?;
    judge("conformance_report", &["check".as_ref(), cases.as_os_str()])
}

fn release() -> Result<()> {
    let binary = build_static_binary()?;
    let shell = shell()?;
    cmd!(shell, "{binary} --version").run()?;
    if has_kvm() {
        let report = results().join("host.xml");
        cmd!(shell, "{binary} doctor").run()?;
        cmd!(shell, "{binary} test --junit {report}").run()?;
    } else {
        say("no usable /dev/kvm here: the payloads run in the labs only");
    }
    Ok(())
}

fn labs() -> Result<()> {
    let binary = build_static_binary()?;
    // The images are made before the labs start, which then do not wait for each other.
    make_images(&root().join("target/guests"))?;
    suite::run_both(&binary, &results())
}

fn images() -> Result<()> {
    let binary = build_static_binary()?;
    make_images(&root().join("target/guests"))?;
    let shell = shell()?;
    cmd!(shell, "sh ci/guest/image-tests")
        .env("IMAGES", "target/guests")
        .env("HINDSIGHT", &binary)
        .env("ENGINE", "interp")
        .run()?;
    packages::install(&["e2fsprogs", "mount", "python3", "util-linux"])?;
    packages::install(&["dosfstools", "mtools", "ovmf"])?;
    for tests in ["machine-tests", "firmware-tests"] {
        cmd!(shell, "sh ci/guest/{tests}")
            .env("HINDSIGHT", root().join(&binary))
            .run()?;
    }
    packages::install(&["passt", "qemu-utils", "seabios"])?;
    cmd!(shell, "sh ci/guest/debian-tests")
        .env("HINDSIGHT", root().join(&binary))
        .env("IMAGE", debian::make(&root().join("target/guests"))?)
        .run()?;
    static_cargo(
        &shell,
        &[
            "test",
            "-p",
            "hindsight",
            "--test",
            "snapshot",
            "--test",
            "gdb",
        ],
    )
    .args(["--", "--ignored"])
    .env("HINDSIGHT_GUESTS", root().join("target/guests"))
    .run()?;
    Ok(())
}

fn rdt() -> Result<()> {
    judge_linux("rdt_judge", Tools::Rdt, "guests-rdt", &[&[]])
}

/// Judges Linux's perf with the default model, then shortly with each of the other models.
fn perf() -> Result<()> {
    let runs: [&[&str]; 2] = [&[], &["--models"]];
    judge_linux("perf_judge", Tools::Perf, "guests-perf", &runs)
}

fn judge_linux(module: &str, tools: Tools, folder: &str, runs: &[&[&str]]) -> Result<()> {
    build_static_binary()?;
    let guests = root().join("target").join(folder);
    linux::make(tools, &guests)?;
    let binary = static_binary();
    for options in runs {
        let mut arguments = vec![
            guests.as_os_str(),
            "--hindsight".as_ref(),
            binary.as_os_str(),
        ];
        arguments.extend(options.iter().map(OsStr::new));
        judge(module, &arguments)?;
    }
    Ok(())
}

/// Builds the payloads where the tools expect them.
pub fn default_payloads() -> Result<PathBuf> {
    let folder = root().join("guest-tests/target/payloads");
    build_payloads(&folder)?;
    Ok(folder)
}
