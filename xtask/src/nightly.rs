//! Tests under tools that require a nightly toolchain: Miri, the sanitizers; and under loom.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use xshell::{Cmd, Shell, cmd};

use crate::process::{has_program, root, say, shell};

/// The target of the instrumented programs.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";

/// One run of `cargo test` under a tool.
struct ToolRun {
    package: &'static str,
    /// The targets of the package that cargo builds: `--lib`, or test programs.
    targets: &'static [&'static str],
    /// The arguments of the tests: names to run or to skip.
    filters: &'static [&'static str],
}

/// The tests that run under Miri: all of unsafe code, and others for about a minute.
///
/// Miri is some thousand times slower than the processor. So tests that run all cases or long
/// sequences are left out.
const MIRI: &[ToolRun] = &[
    ToolRun {
        package: "hindsight-regs",
        targets: &["--lib"],
        filters: &[],
    },
    ToolRun {
        package: "hindsight-devices",
        targets: &["--lib"],
        filters: &[
            "acpi_pm::",
            "clock::",
            "ioapic::",
            "pit::",
            "--skip=reset_with_the_clock",
            "--skip=any_accesses",
        ],
    },
    ToolRun {
        package: "hindsight-cpu",
        targets: &["--lib"],
        filters: &[
            "armed::",
            "branch::unit::",
            "debug::",
            "rdt::",
            "transaction::",
            "tsc::",
            "--skip=any_",
            "--skip=saving_and_restoring",
            "--skip=uarch",
        ],
    },
];

/// The tests that run under ThreadSanitizer: those that use threads.
const TSAN: &[ToolRun] = &[
    ToolRun {
        package: "hindsight-interp",
        targets: &["--lib"],
        filters: &[],
    },
    ToolRun {
        package: "hindsight-devices",
        targets: &["--lib"],
        filters: &[],
    },
    ToolRun {
        package: "hindsight-run-control",
        targets: &["--lib"],
        filters: &[],
    },
];

/// The tests that run under loom: those of run control, compiled only with `--cfg loom`.
const LOOM: &[ToolRun] = &[ToolRun {
    package: "hindsight-run-control",
    targets: &["--lib"],
    filters: &[],
}];

/// Runs unit tests under Miri, which finds undefined behaviour.
pub fn miri() -> Result<()> {
    let shell = shell()?;
    require_nightly(&shell, &["miri", "rust-src"])?;
    // Property tests take many cases, of which two must suffice here.
    shell.set_var("PROPTEST_CASES", "2");
    shell.set_var(
        "MIRIFLAGS",
        "-Zmiri-disable-isolation -Zmiri-permissive-provenance",
    );
    let folder = root().join("target/miri");
    shell.set_var("CARGO_TARGET_DIR", folder);
    run_all(&shell, "Miri", MIRI, |shell| {
        nightly(shell).args(["miri", "test", "--quiet"])
    })
}

/// Runs unit tests under ThreadSanitizer, with a standard library that is instrumented too.
pub fn thread_sanitizer() -> Result<()> {
    let shell = shell()?;
    require_nightly(&shell, &["rust-src"])?;
    shell.set_var(
        "RUSTFLAGS",
        "-Zsanitizer=thread -Copt-level=1 -Cunsafe-allow-abi-mismatch=sanitizer",
    );
    shell.set_var("HINDSIGHT_WITHOUT_PAYLOADS", "1");
    shell.set_var("PROPTEST_CASES", "8");
    shell.set_var("TSAN_OPTIONS", "halt_on_error=1");
    run_all(&shell, "ThreadSanitizer", TSAN, |shell| {
        nightly(shell)
            .args(["test", "--quiet", "-Zbuild-std", "--target", TARGET])
            .args(["--target-dir", "target/tsan"])
    })
}

/// Runs the tests of the interpreter under AddressSanitizer.
pub fn address_sanitizer(arguments: &[String]) -> Result<()> {
    let shell = shell()?;
    require_nightly(&shell, &[])?;
    shell.set_var("RUSTFLAGS", "-Zsanitizer=address");
    nightly(&shell)
        .args(["test", "-p", "hindsight-interp", "--target", TARGET])
        .args(["--target-dir", "target/asan", "--lib", "--tests", "--"])
        .args(arguments)
        .run()?;
    Ok(())
}

/// Runs under valgrind those of the interpreter's tests that valgrind can execute.
pub fn valgrind(arguments: &[String]) -> Result<()> {
    crate::packages::install(&["valgrind"])?;
    let shell = shell()?;
    // Translated code changes where it is executed from a file.
    let runner = "valgrind --quiet --smc-check=all --error-exitcode=9";
    cmd!(
        shell,
        "cargo test -p hindsight-interp --test basic --test stops -- --test-threads=1"
    )
    .args(arguments)
    .env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", runner)
    .run()?;
    Ok(())
}

/// Runs the tests of run control under loom, which tries the interleavings of threads.
pub fn loom() -> Result<()> {
    let shell = shell()?;
    let marked = cmd!(
        shell,
        "git grep --untracked --files-with-matches -w loom -- *.rs :!xtask"
    );
    let marked = marked.quiet().ignore_status().read()?;
    if marked.is_empty() {
        println!("loom: no test is compiled with --cfg loom yet");
        return Ok(());
    }
    shell.set_var("RUSTFLAGS", "--cfg loom");
    shell.set_var("HINDSIGHT_WITHOUT_PAYLOADS", "1");
    run_all(&shell, "loom", LOOM, |shell| {
        cmd!(
            shell,
            "cargo test --quiet --release --target-dir target/loom"
        )
    })
}

/// Runs all, and shows how long each took and how many tests it had.
fn run_all(
    shell: &Shell,
    tool: &str,
    runs: &[ToolRun],
    cargo: impl Fn(&Shell) -> Cmd<'_>,
) -> Result<()> {
    for run in runs {
        let start = Instant::now();
        let output = cargo(shell)
            .args(["-p", run.package])
            .args(run.targets)
            .arg("--")
            .args(run.filters)
            .ignore_status()
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let passed = passed_tests(&text);
        if !output.status.success() {
            print!("{text}");
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
            bail!("{tool}: the tests of {} fail", run.package);
        }
        let seconds = start.elapsed().as_secs();
        println!(
            "{tool}: {} {}: {passed} tests passed after {seconds} s",
            run.package,
            run.targets.join(" ")
        );
    }
    Ok(())
}

/// The number of tests that passed, from the output of `cargo test`.
fn passed_tests(text: &str) -> u64 {
    let summaries = text
        .lines()
        .filter_map(|line| line.strip_prefix("test result: ok. "));
    summaries
        .filter_map(|line| line.split(' ').next()?.parse::<u64>().ok())
        .sum()
}

/// cargo of the nightly toolchain.
pub fn nightly(shell: &Shell) -> Cmd<'_> {
    cmd!(shell, "rustup run nightly cargo")
}

/// Installs the nightly toolchain and its components if they are missing.
pub fn require_nightly(shell: &Shell, components: &[&str]) -> Result<()> {
    let how = format!(
        "rustup toolchain install nightly --profile minimal{}",
        option(components)
    );
    ensure!(has_program("rustup"), "rustup is missing; then: {how}");
    let version = cmd!(shell, "rustup run nightly rustc --version")
        .quiet()
        .ignore_stderr()
        .read();
    if version.is_err() {
        say("installing the nightly toolchain");
        cmd!(shell, "rustup toolchain install nightly --profile minimal")
            .quiet()
            .run()
            .with_context(|| format!("there is no nightly toolchain: {how}"))?;
    }
    let installed = cmd!(
        shell,
        "rustup component list --toolchain nightly --installed"
    );
    let installed = installed.quiet().read()?;
    for component in components {
        if !installed.lines().any(|line| line.starts_with(component)) {
            say(format!("installing {component} for the nightly toolchain"));
            cmd!(
                shell,
                "rustup component add --toolchain nightly {component}"
            )
            .quiet()
            .run()
            .with_context(|| format!("nightly lacks {component}: {how}"))?;
        }
    }
    Ok(())
}

fn option(components: &[&str]) -> String {
    components
        .iter()
        .map(|component| format!(" --component {component}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_tests_are_summed_over_programs() {
        let text = "running 2 tests\ntest result: ok. 2 passed; 0 failed\n\
                    test result: ok. 40 passed; 0 failed\n";
        assert_eq!(passed_tests(text), 42);
    }
}
