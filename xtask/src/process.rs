//! Paths of the checkout, messages, and the processes that steps run.

use std::ffi::OsStr;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

/// The folder of the checkout.
pub fn root() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest
        .parent()
        .map_or(manifest.clone(), Path::to_path_buf)
}

/// A shell whose current directory is the checkout.
pub fn shell() -> Result<Shell> {
    let shell = Shell::new()?;
    shell.change_dir(root());
    Ok(shell)
}

/// Prints a message on standard error.
pub fn say(text: impl Display) {
    eprintln!("ci: {text}");
}

/// Whether a program is on the PATH.
pub fn has_program(name: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()))
}

/// The absolute form of a path that the user gave, which may not exist yet.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("{} is no path", path.display()))
}

/// The file if it exists, else an error that names the option.
pub fn existing_file(option: &str, path: &Path) -> Result<PathBuf> {
    if !path.is_file() {
        bail!("{option}: there is no file {}", path.display());
    }
    absolute(path)
}

/// Runs a module of the Python package in ci/judges.
pub fn judge<S: AsRef<OsStr>>(module: &str, arguments: &[S]) -> Result<()> {
    let shell = shell()?;
    let module = format!("hindsight_ci.{module}");
    cmd!(shell, "python3 -B -m {module} {arguments...}")
        .env("PYTHONPATH", root().join("ci/judges"))
        .run()?;
    Ok(())
}

/// Whether this user may use /dev/kvm.
pub fn has_kvm() -> bool {
    use rustix::fs::{Access, access};
    access("/dev/kvm", Access::WRITE_OK).is_ok()
}
