//! Debian packages: installed with apt, or downloaded and unpacked to the cache folder.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use xshell::{Cmd, Shell, cmd};

use crate::process::{has_program, root, say, shell};

/// The cache folder: `$HINDSIGHT_CACHE`, else `$XDG_CACHE_HOME/hindsight`, else .cache in the checkout.
pub fn cache_dir() -> Result<PathBuf> {
    let folder = match (
        std::env::var_os("HINDSIGHT_CACHE"),
        std::env::var_os("XDG_CACHE_HOME"),
    ) {
        (Some(cache), _) => PathBuf::from(cache),
        (None, Some(cache)) => PathBuf::from(cache).join("hindsight"),
        (None, None) => root().join(".cache"),
    };
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder.canonicalize()?)
}

/// Runs `action` with the cache's lock held, so that two labs that start together share downloads.
pub fn with_cache_lock<T>(action: impl FnOnce() -> Result<T>) -> Result<T> {
    let lock = File::create(cache_dir()?.join("lock"))?;
    lock.lock().context("cannot lock the cache folder")?;
    action()
}

/// Installs the named packages that are missing.
pub fn install(packages: &[&str]) -> Result<()> {
    require_apt()?;
    let shell = shell()?;
    let missing: Vec<&str> = packages
        .iter()
        .copied()
        .filter(|package| !is_installed(&shell, package))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !missing.iter().all(|package| is_known(&shell, package)) {
        update_lists(&shell)?;
    }
    say(format!("installing {}", missing.join(" ")));
    if apt_install(&shell, &missing).is_err() {
        // The lists may be older than what the mirror still has.
        update_lists(&shell)?;
        apt_install(&shell, &missing)
            .with_context(|| format!("could not install {}", missing.join(" ")))?;
    }
    Ok(())
}

/// Downloads and unpacks a package to the cache without installing it; returns the folder.
///
/// The cache's lock must be held.
pub fn fetch(name: &str) -> Result<PathBuf> {
    let cache = cache_dir()?.join("packages");
    let folder = cache.join(name);
    if folder.join(".complete").exists() {
        return Ok(folder);
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&cache)?;
    let work = tempfile::Builder::new()
        .prefix(".fetch.")
        .tempdir_in(&cache)?;
    say(format!("downloading {name}"));
    let shell = shell()?;
    if download(&shell, work.path(), name).is_err() {
        update_lists(&shell)?;
        download(&shell, work.path(), name)
            .with_context(|| format!("could not download the package {name}"))?;
    }
    let unpacked = work.path().join("root");
    for file in fs::read_dir(work.path())? {
        let archive = file?.path();
        if archive
            .extension()
            .is_some_and(|extension| extension == "deb")
        {
            cmd!(shell, "dpkg -x {archive} {unpacked}").quiet().run()?;
        }
    }
    fs::write(unpacked.join(".complete"), "")?;
    fs::rename(&unpacked, &folder)?;
    Ok(folder)
}

/// Fetches busybox, statically linked; returns the program.
///
/// The package is not installed, because it would replace the usual busybox. The cache's lock must be
/// held.
pub fn fetch_busybox() -> Result<PathBuf> {
    require_apt()?;
    know("busybox-static")?;
    let folder = fetch("busybox-static")?;
    find_file(&folder, &|path| path.ends_with("bin/busybox"))
        .context("the package busybox-static holds no busybox")
}

/// Refreshes the package lists if apt does not know the package.
pub fn know(package: &str) -> Result<()> {
    let shell = shell()?;
    if !is_known(&shell, package) {
        update_lists(&shell)?;
    }
    Ok(())
}

/// Whether apt has a version of the package that it can download.
pub fn is_known(shell: &Shell, package: &str) -> bool {
    let policy = cmd!(shell, "apt-cache policy {package}")
        .quiet()
        .ignore_stderr()
        .read();
    policy.is_ok_and(|text| {
        text.lines()
            .filter_map(|line| line.trim().strip_prefix("Candidate: "))
            .any(|candidate| candidate != "(none)")
    })
}

/// The first regular file under a folder that satisfies the condition, in the order of names.
pub fn find_file(folder: &Path, condition: &dyn Fn(&Path) -> bool) -> Option<PathBuf> {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    entries.sort();
    let file = entries
        .iter()
        .find(|path| path.is_file() && condition(path))
        .cloned();
    file.or_else(|| {
        let folders = entries
            .iter()
            .filter(|path| path.is_dir() && !path.is_symlink());
        folders
            .into_iter()
            .find_map(|folder| find_file(folder, condition))
    })
}

/// Refreshes the package lists, once in a process.
pub fn update_lists(shell: &Shell) -> Result<()> {
    static UPDATED: AtomicBool = AtomicBool::new(false);
    if UPDATED.load(Ordering::Relaxed) {
        return Ok(());
    }
    say("refreshing the package lists");
    as_root(shell, &["apt-get", "-qq", "update"])?
        .run()
        .context("apt-get update failed")?;
    UPDATED.store(true, Ordering::Relaxed);
    Ok(())
}

fn require_apt() -> Result<()> {
    ensure!(
        has_program("apt-get") && has_program("dpkg-query"),
        "apt-get and dpkg are missing: this runs on Debian and Ubuntu"
    );
    Ok(())
}

fn is_installed(shell: &Shell, package: &str) -> bool {
    let format = "${db:Status-Status}";
    let status = cmd!(shell, "dpkg-query -W -f {format} {package}");
    status
        .quiet()
        .ignore_stderr()
        .read()
        .is_ok_and(|status| status == "installed")
}

fn apt_install(shell: &Shell, packages: &[&str]) -> Result<()> {
    let options = [
        "-qq",
        "-y",
        "--no-install-recommends",
        "-o",
        "Dpkg::Use-Pty=0",
        "install",
    ];
    let words: Vec<&str> = ["apt-get"]
        .iter()
        .chain(&options)
        .chain(packages)
        .copied()
        .collect();
    // To standard error: standard output is for results.
    let output = as_root(shell, &words)?
        .env("NEEDRESTART_MODE", "l")
        .output()?;
    eprint!("{}", String::from_utf8_lossy(&output.stdout));
    Ok(())
}

fn download(shell: &Shell, folder: &Path, name: &str) -> Result<()> {
    let _folder = shell.push_dir(folder);
    // As the caller: apt's own download user may not be able to write to the cache.
    cmd!(
        shell,
        "apt-get -qq -o APT::Sandbox::User=root download {name}"
    )
    .quiet()
    .run()?;
    Ok(())
}

/// A command that runs as root: directly, or through sudo.
fn as_root<'a>(shell: &'a Shell, words: &[&str]) -> Result<Cmd<'a>> {
    let environment = "DEBIAN_FRONTEND=noninteractive";
    let command = if rustix::process::getuid().is_root() {
        cmd!(shell, "env {environment} {words...}")
    } else if has_program("sudo") {
        cmd!(shell, "sudo env {environment} {words...}")
    } else {
        bail!("'{}' must run as root, and sudo is not installed", words[0]);
    };
    Ok(command.quiet())
}
