//! Builds the test payloads and a table of them, which `hindsight test` embeds.
//!
//! The payloads are a workspace of their own for another target. The same cargo builds them into
//! the build directory, without this build's flags and compiler wrappers.

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const GUEST_TARGET: &str = "x86_64-unknown-none";
const PACKAGE: &str = "hindsight-payloads";
/// The first program of guests of `hindsight exec`.
const INIT_PACKAGE: &str = "hindsight-init";
const INIT: &str = "init";
/// If set, the program is built without payloads. That makes builds for checks much faster.
const WITHOUT_PAYLOADS: &str = "HINDSIGHT_WITHOUT_PAYLOADS";

type Result<T> = std::result::Result<T, String>;

fn main() {
    if let Err(error) = build() {
        for line in error.lines() {
            println!("cargo::error={line}");
        }
        std::process::exit(1);
    }
}

fn build() -> Result<()> {
    let manifest_dir = path_variable("CARGO_MANIFEST_DIR")?;
    let root = manifest_dir
        .parent()
        .ok_or("no workspace above the package")?;
    let guest_tests = root.join("guest-tests");
    print_inputs(root, &guest_tests)?;
    println!("cargo::rerun-if-env-changed={WITHOUT_PAYLOADS}");
    let with_payloads = env::var_os(WITHOUT_PAYLOADS).is_none();
    let mut payloads = if with_payloads && guest_tests.join("Cargo.toml").exists() {
        check_target()?;
        build_payloads(&guest_tests)?
    } else {
        Vec::new()
    };
    let init = payloads.iter().position(|(name, _)| name == INIT);
    let init = init.map(|index| payloads.remove(index).1);
    let source = path_variable("OUT_DIR")?.join("init.rs");
    let text = init.map_or_else(
        || "None".to_owned(),
        |file| format!("Some(include_bytes!({file:?}).as_slice())"),
    );
    fs::write(&source, text).map_err(|e| format!("{}: {e}", source.display()))?;
    let table = path_variable("OUT_DIR")?.join("payloads.rs");
    fs::write(&table, render_table(&payloads)?).map_err(|e| format!("{}: {e}", table.display()))
}

/// Prints the files and folders that the payloads are built from.
///
/// Cargo scans whole folders, so these must not contain build output.
fn print_inputs(root: &Path, guest_tests: &Path) -> Result<()> {
    for path in [
        "Cargo.toml",
        "rust-toolchain.toml",
        "cpu/regs/Cargo.toml",
        "cpu/regs/src",
    ] {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    if !guest_tests.is_dir() {
        println!("cargo::rerun-if-changed={}", guest_tests.display());
        return Ok(());
    }
    let failed = |e| format!("cannot read {}: {e}", guest_tests.display());
    for entry in fs::read_dir(guest_tests).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name() != "target" {
            println!("cargo::rerun-if-changed={}", entry.path().display());
        }
    }
    Ok(())
}

/// Fails with one instruction if the guests' target is missing, instead of many compiler errors.
fn check_target() -> Result<()> {
    let mut rustc = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    remove_build_variables(&mut rustc);
    let output = rustc
        .args(["--print", "target-libdir", "--target", GUEST_TARGET])
        .output()
        .map_err(|e| format!("cannot run rustc: {e}"))?;
    let libdir = String::from_utf8_lossy(&output.stdout);
    if output.status.success() && Path::new(libdir.trim()).is_dir() {
        return Ok(());
    }
    Err(format!(
        "the payloads need the Rust target {GUEST_TARGET}, which is not installed.\n\
         Run: rustup target add {GUEST_TARGET}"
    ))
}

/// Builds the payloads, and returns their names and files in the order of the names.
fn build_payloads(guest_tests: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    remove_build_variables(&mut cargo);
    let output = cargo
        .current_dir(guest_tests)
        .args([
            "build",
            "--release",
            "--package",
            PACKAGE,
            "--package",
            INIT_PACKAGE,
            "--target",
            GUEST_TARGET,
        ])
        // The embedded copies need no line tables.
        .args(["--config", "profile.release.strip=\"debuginfo\""])
        .args([
            "--message-format",
            "json-render-diagnostics",
            "--target-dir",
        ])
        .arg(path_variable("OUT_DIR")?.join("guest-tests"))
        .stderr(Stdio::piped())
        .output()
        .map_err(|e| format!("cannot run cargo: {e}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!(
            "the payloads in guest-tests do not build:\n{stderr}"
        ));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let mut payloads: Vec<_> = messages.lines().filter_map(executable).collect();
    payloads.sort();
    Ok(payloads)
}

/// The name and file of the executable that a message of cargo reports.
fn executable(message: &str) -> Option<(String, PathBuf)> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    let file = message["executable"].as_str()?;
    Some((
        message["target"]["name"].as_str()?.to_owned(),
        PathBuf::from(file),
    ))
}

fn render_table(payloads: &[(String, PathBuf)]) -> Result<String> {
    let mut table = String::from("&[\n");
    for (name, file) in payloads {
        let file = file
            .to_str()
            .ok_or("the build directory's name is not UTF-8")?;
        writeln!(table, "    ({name:?}, include_bytes!({file:?})),").map_err(|e| e.to_string())?;
    }
    table.push_str("]\n");
    Ok(table)
}

/// Removes the variables that configure the build of *this* package.
///
/// They are flags, targets, profiles, and the compiler wrappers of clippy and other tools. Those
/// that configure cargo's home, network and number of jobs stay.
fn remove_build_variables(command: &mut Command) {
    const CARGO_CONFIGURATION: [&str; 8] = [
        "CARGO_BUILD_JOBS",
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTRIES_",
        "CARGO_REGISTRY_",
        "CARGO_SOURCE_",
        "CARGO_MAKEFLAGS",
    ];
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        let configures_build = ["CARGO", "RUSTC", "RUSTFLAGS", "RUSTDOC"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
            || ["TARGET", "HOST", "OUT_DIR", "PROFILE", "OPT_LEVEL", "DEBUG"].contains(&&*text);
        let configures_cargo = CARGO_CONFIGURATION
            .iter()
            .any(|prefix| text.starts_with(prefix));
        if configures_build && !configures_cargo {
            command.env_remove(&name);
        }
    }
}

fn path_variable(name: &str) -> Result<PathBuf> {
    let value: OsString = env::var_os(name).ok_or_else(|| format!("{name} is not set"))?;
    Ok(PathBuf::from(value))
}
