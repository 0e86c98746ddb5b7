//! Builds the guests' payloads and makes a table of them, for `hindsight test` to carry.
//!
//! The payloads are a workspace of their own for another target. The same cargo builds them into
//! the build directory, without what this build's flags and wrappers would do to them.

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const GUEST_TARGET: &str = "x86_64-unknown-none";
const PACKAGE: &str = "hindsight-payloads";
/// If set, the program is built without payloads: for checks that do not run it, which are much faster so.
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
    watch(root, &guest_tests)?;
    println!("cargo::rerun-if-env-changed={WITHOUT_PAYLOADS}");
    let wanted = env::var_os(WITHOUT_PAYLOADS).is_none();
    let payloads = if wanted && guest_tests.join("Cargo.toml").exists() {
        check_target()?;
        build_payloads(&guest_tests)?
    } else {
        Vec::new()
    };
    let table = path_variable("OUT_DIR")?.join("payloads.rs");
    fs::write(&table, render_table(&payloads)?).map_err(|e| format!("{}: {e}", table.display()))
}

/// Names what the payloads are made of. Cargo looks through whole folders, so those named here must
/// not hold build output.
fn watch(root: &Path, guest_tests: &Path) -> Result<()> {
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

/// Says what to do when the guests' target is missing, instead of a page of compiler errors.
fn check_target() -> Result<()> {
    let mut rustc = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    clean(&mut rustc);
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
    clean(&mut cargo);
    let output = cargo
        .current_dir(guest_tests)
        .args([
            "build",
            "--release",
            "--package",
            PACKAGE,
            "--target",
            GUEST_TARGET,
        ])
        // Line tables are for debuggers; the embedded copies go without.
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

/// The name and file of the executable that a message of cargo speaks of.
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

/// Takes away what says how *this* package is built: flags, targets, profiles, and the wrappers by
/// which clippy and others look at it. Where cargo finds its home, its network and its job slots
/// stays.
fn clean(command: &mut Command) {
    const KEPT: [&str; 8] = [
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
        let about_this_build = ["CARGO", "RUSTC", "RUSTFLAGS", "RUSTDOC"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
            || ["TARGET", "HOST", "OUT_DIR", "PROFILE", "OPT_LEVEL", "DEBUG"].contains(&&*text);
        if about_this_build && !KEPT.iter().any(|kept| text.starts_with(kept)) {
            command.env_remove(&name);
        }
    }
}

fn path_variable(name: &str) -> Result<PathBuf> {
    let value: OsString = env::var_os(name).ok_or_else(|| format!("{name} is not set"))?;
    Ok(PathBuf::from(value))
}
