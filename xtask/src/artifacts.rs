//! What is built for the tests: the statically linked binary, its test programs, and the payloads.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use xshell::{Cmd, Shell, cmd};

use crate::process::{root, shell};

const HOST: &str = "x86_64-unknown-linux-gnu";
const GUEST: &str = "x86_64-unknown-none";
const STATIC: &str = "-C target-feature=+crt-static";
const STATIC_FOLDER: &str = "target/lab/build";

/// The statically linked binary, which the labs run too.
pub fn static_binary() -> PathBuf {
    static_program("hindsight")
}

fn static_program(name: &str) -> PathBuf {
    let folder = root().join(STATIC_FOLDER).join(HOST);
    folder.join("release").join(name)
}

/// `cargo SUBCOMMAND...` for the release profile, linked statically, in one folder for all steps.
pub fn static_cargo<'a>(shell: &'a Shell, arguments: &[&str]) -> Cmd<'a> {
    cmd!(shell, "cargo {arguments...} --quiet --release")
        .arg(format!("--target={HOST}"))
        .arg(format!("--target-dir={STATIC_FOLDER}"))
        .env("RUSTFLAGS", STATIC)
        .quiet()
}

/// Builds the statically linked binary; returns its path.
pub fn build_static_binary() -> Result<PathBuf> {
    build_static("hindsight", "hindsight")
}

/// Builds a program of a package, linked statically; returns its path.
pub fn build_static(package: &str, program: &str) -> Result<PathBuf> {
    static_cargo(&shell()?, &["build", "--package", package]).run()?;
    Ok(static_program(program))
}

/// Builds a test program of the monitor, linked statically, and copies it to `to` without symbols.
pub fn build_static_test(name: &str, to: &Path) -> Result<()> {
    let shell = shell()?;
    let messages = static_cargo(
        &shell,
        &["test", "-p", "hindsight", "--test", name, "--no-run"],
    )
    .arg("--message-format=json-render-diagnostics")
    .read()?;
    let mut executables = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let target = message.get("target")?.get("name")?.as_str()?;
        let executable = message.get("executable")?.as_str()?;
        (target == name).then(|| executable.to_owned())
    });
    let built = executables
        .next_back()
        .with_context(|| format!("cargo built no test program {name}"))?;
    cmd!(shell, "strip -o {to} {built}").quiet().run()?;
    Ok(())
}

/// Builds the payloads of guest-tests and copies them to a folder.
pub fn build_payloads(to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let to = to.canonicalize()?;
    let shell = shell()?;
    // From its own folder: the target and the lints are those of the guests' workspace.
    let guests = root().join("guest-tests");
    shell.change_dir(&guests);
    cmd!(
        shell,
        "cargo build --quiet --release --package hindsight-payloads --target {GUEST}"
    )
    .arg("--target-dir=target")
    .quiet()
    .run()?;
    for source in fs::read_dir(guests.join("payloads/src/bin"))? {
        let source = source?.path();
        if source
            .extension()
            .is_some_and(|extension| extension == "rs")
        {
            let name = source.file_stem().context("a payload has no name")?;
            let built = guests.join("target").join(GUEST).join("release").join(name);
            fs::copy(&built, to.join(name))
                .with_context(|| format!("cannot copy {}", built.display()))?;
        }
    }
    // The template of docs/guide/payloads.md must build as it stands.
    shell.change_dir(guests.join("template"));
    cmd!(
        shell,
        "cargo build --quiet --release --target-dir ../target/template"
    )
    .quiet()
    .run()?;
    let template = guests
        .join("target/template")
        .join(GUEST)
        .join("release/my-payload");
    fs::copy(template, to.join("my-payload"))?;
    Ok(())
}
