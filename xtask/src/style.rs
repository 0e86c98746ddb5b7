//! Formatting, lints and documentation, of Rust, shell and Python.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use xshell::{Shell, cmd};

use crate::process::{root, say, shell};

/// The version of ruff whose rules the Python package follows.
const RUFF: &str = "ruff>=0.17,<0.18";

/// Checks the format of Rust, shell and Python.
pub fn format() -> Result<()> {
    let shell = shell()?;
    cmd!(shell, "cargo fmt --all --check").run()?;
    let scripts = shell_scripts()?;
    ensure!(!scripts.is_empty(), "no shell script was found");
    cmd!(shell, "shellcheck -x {scripts...}").run()?;
    check_python(&shell)?;
    shell.change_dir(root().join("guest-tests"));
    cmd!(shell, "cargo fmt --all --check").run()?;
    Ok(())
}

/// Clippy, for the workspace, the fuzz targets and the guests' workspace.
pub fn lint() -> Result<()> {
    let shell = shell()?;
    cmd!(
        shell,
        "cargo clippy --workspace --all-targets -- -D warnings"
    )
    .run()?;
    cmd!(
        shell,
        "cargo clippy --manifest-path fuzz/Cargo.toml --target-dir target/fuzz"
    )
    .args(["--", "-D", "warnings"])
    .env("HINDSIGHT_WITHOUT_PAYLOADS", "1")
    .run()?;
    shell.change_dir(root().join("guest-tests"));
    cmd!(shell, "cargo clippy --workspace -- -D warnings").run()?;
    Ok(())
}

/// Builds the API documentation. A warning is an error.
pub fn docs() -> Result<()> {
    let shell = shell()?;
    cmd!(shell, "cargo doc --workspace --no-deps --quiet")
        .env("RUSTDOCFLAGS", "-D warnings")
        .run()?;
    Ok(())
}

/// The public crates can be packaged and published: metadata, files, and each other's versions.
///
/// Nothing is built or uploaded. Before a release, run the command without `--no-verify`.
pub fn publish() -> Result<()> {
    let shell = shell()?;
    cmd!(
        shell,
        "cargo publish --workspace --dry-run --no-verify --allow-dirty --quiet"
    )
    .run()?;
    Ok(())
}

/// The tests of the Python package.
pub fn judge_tests() -> Result<()> {
    let shell = shell()?;
    shell.change_dir(root().join("ci/judges"));
    cmd!(shell, "python3 -B -m unittest discover -q -s tests -t .").run()?;
    Ok(())
}

/// The files with a shebang of a shell.
fn shell_scripts() -> Result<Vec<PathBuf>> {
    let mut scripts = Vec::new();
    for folder in [
        "ci",
        ".ci",
        "ci/guest",
        "packaging",
        "packaging/github-action",
        "vmm/tests/gdb/guests",
    ] {
        for entry in fs::read_dir(root().join(folder))? {
            let path = entry?.path();
            let Ok(text) = fs::read_to_string(&path) else {
                continue;
            };
            let first = text.lines().next().unwrap_or_default();
            let shells = ["sh", "bash"];
            if first.starts_with("#!") && first.split(['/', ' ']).any(|word| shells.contains(&word))
            {
                scripts.push(path);
            }
        }
    }
    scripts.sort();
    Ok(scripts)
}

/// Ruff over the Python packages and examples; where it cannot be installed, only whether it compiles.
fn check_python(shell: &Shell) -> Result<()> {
    let folders = ["ci/judges", "python", "examples/python"].map(|folder| root().join(folder));
    let folders = &folders;
    match ruff(shell) {
        Ok(ruff) => {
            cmd!(shell, "{ruff} check --quiet {folders...}").run()?;
            cmd!(shell, "{ruff} format --quiet --check {folders...}").run()?;
        }
        Err(error) => {
            say(format!(
                "ruff cannot be installed ({error:#}): the Python packages are compiled only"
            ));
            let compile = "import ast, pathlib, sys
for folder in sys.argv[1:]:
    for path in pathlib.Path(folder).rglob('*.py'): ast.parse(path.read_text(), path)";
            cmd!(shell, "python3 -c {compile} {folders...}").run()?;
        }
    }
    Ok(())
}

/// Installs ruff into an environment of its own; returns the program.
fn ruff(shell: &Shell) -> Result<PathBuf> {
    let environment = root().join("target/ci/python");
    let ruff = environment.join("bin/ruff");
    if !ruff.exists() {
        cmd!(shell, "python3 -m venv {environment}").quiet().run()?;
        let pip = environment.join("bin/pip");
        cmd!(
            shell,
            "{pip} install --quiet --disable-pip-version-check {RUFF}"
        )
        .quiet()
        .run()?;
    }
    Ok(ruff)
}
