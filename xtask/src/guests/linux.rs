//! Linux guests from Debian's packages: kernel, busybox, and perf, rr, gdb or pqos with their libraries.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use xshell::{Shell, cmd};

use super::initramfs::{self, GuestFile};
use super::{gdb, programs};
use crate::kernel::fetch_kernel;
use crate::packages::{self, fetch, find_file, know, with_cache_lock};
use crate::process::{root, shell};

/// The tools that a Linux guest has besides busybox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tools {
    /// None.
    None,
    /// Debian's perf and rr, and the program whose events are known.
    Perf,
    /// Debian's perf and gdb, Linux's test of breakpoints, and a program to debug.
    Breakpoints,
    /// Debian's pqos, the module msr, and a program that reads memory.
    Rdt,
}

/// Puts `vmlinuz` and `initramfs` into a folder, and with perf also the program `measured`.
///
/// The initramfs is not compressed: a guest in the interpreter would take seconds to decompress it.
pub fn make(tools: Tools, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let kernel = with_cache_lock(fetch_kernel)?;
    let work = tempfile::tempdir()?;
    let files = match tools {
        Tools::None => Vec::new(),
        Tools::Perf => measured_files(to)?,
        Tools::Breakpoints => breakpoint_files(work.path())?,
        Tools::Rdt => rdt_files(&kernel, work.path())?,
    };
    fs::copy(kernel.join("vmlinuz"), to.join("vmlinuz"))?;
    initramfs::make(&to.join("initramfs"), &files)
}

/// perf, rr and the program that they measure.
fn measured_files(to: &Path) -> Result<Vec<GuestFile>> {
    let mut files = perf_files()?;
    let measured = to.join("measured");
    programs::make_measured(&measured)?;
    files.push(GuestFile::new(measured, "files/measured"));
    files.push(GuestFile::in_files(root().join("ci/guest/guest-perf"))?);
    Ok(files)
}

fn breakpoint_files(work: &Path) -> Result<Vec<GuestFile>> {
    let mut files = perf_files()?;
    // The libraries that gdb takes along replace those of the same name.
    files.extend(gdb::make_gdb(work)?);
    let (test, watched) = (work.join("breakpoint_test"), work.join("watched"));
    programs::make_breakpoint_test(&test)?;
    programs::make_watched(&watched)?;
    let script = root().join("ci/guest/guest-breakpoints");
    let session = root().join("resources/guests/watched/session.gdb");
    for file in [test, watched, script, session] {
        files.push(GuestFile::in_files(file)?);
    }
    Ok(files)
}

fn perf_files() -> Result<Vec<GuestFile>> {
    with_cache_lock(|| {
        packages::install(&["binutils", "gcc"])?;
        know("linux-perf")?;
        let shell = shell()?;
        let perf = fetch("linux-perf")?;
        let rr = fetch("rr")?;
        let mut roots = vec![perf.clone(), rr.clone()];
        for library in perf_libraries(&shell)? {
            roots.push(fetch(&library)?);
        }
        let program = find_file(&perf.join("usr/bin"), &|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("perf") && fs::metadata(path).is_ok_and(|data| data.len() > 1 << 20)
        })
        .context("the package linux-perf holds no perf")?;
        let mut files = vec![GuestFile::new(&program, "usr/bin/perf")];
        // rr is its program and what it puts into the processes that it records.
        files.extend(rr_files(&rr)?);
        files.extend(library_files(
            &shell,
            &roots,
            &[program, rr.join("usr/bin/rr")],
        )?);
        Ok(files)
    })
}

fn rdt_files(kernel: &Path, work: &Path) -> Result<Vec<GuestFile>> {
    let mut files = with_cache_lock(|| {
        packages::install(&["binutils", "gcc", "libc6-dev"])?;
        know("intel-cmt-cat")?;
        let roots = [fetch("intel-cmt-cat")?, fetch("libc6")?];
        let program = roots[0].join("usr/sbin/pqos");
        let mut files = vec![GuestFile::new(&program, "usr/sbin/pqos")];
        files.extend(library_files(&shell()?, &roots, &[program])?);
        Ok(files)
    })?;
    let walk = work.join("walk");
    programs::make_walk(&walk)?;
    files.push(GuestFile::new(walk, "files/walk"));
    files.push(GuestFile::new(kernel.join("msr.ko"), "files/msr.ko"));
    files.push(GuestFile::new(
        root().join("ci/guest/guest-rdt"),
        "files/guest-rdt",
    ));
    Ok(files)
}

/// The packages of the libraries on which perf and rr depend.
fn perf_libraries(shell: &Shell) -> Result<BTreeSet<String>> {
    let text = cmd!(
        shell,
        "apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts"
    )
    .args([
        "--no-breaks",
        "--no-replaces",
        "--no-enhances",
        "linux-perf",
        "rr",
    ])
    .quiet()
    .read()?;
    let is_library = |name: &&str| {
        let rest = name
            .strip_prefix("lib")
            .or_else(|| name.strip_prefix("zlib"));
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ".+-".contains(c);
        rest.is_some_and(|rest| rest.chars().all(plain))
    };
    Ok(text.lines().filter(is_library).map(String::from).collect())
}

fn rr_files(package: &Path) -> Result<Vec<GuestFile>> {
    let mut files = Vec::new();
    let mut folders = vec![package.join("usr")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            let guest = path.strip_prefix(package)?;
            let text = guest.to_string_lossy();
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
            } else if path.is_file() && text.contains("/rr") && !text.contains("/share/") {
                files.push(GuestFile::new(&path, guest));
            }
        }
    }
    Ok(files)
}

/// The libraries of programs, from the unpacked packages in `roots`, and the dynamic loader.
fn library_files(shell: &Shell, roots: &[PathBuf], programs: &[PathBuf]) -> Result<Vec<GuestFile>> {
    let find = |name: &str| {
        let found = roots.iter().find_map(|root| find_entry(root, name));
        found.and_then(|path| path.canonicalize().ok())
    };
    let mut files = Vec::new();
    let mut done = BTreeSet::new();
    let mut queue: Vec<String> = Vec::new();
    for program in programs {
        queue.extend(needed_by(shell, program)?);
    }
    while let Some(name) = queue.pop() {
        if !done.insert(name.clone()) {
            continue;
        }
        if let Some(file) = find(&name) {
            queue.extend(needed_by(shell, &file)?);
            files.push(GuestFile::new(file, format!("lib/x86_64-linux-gnu/{name}")));
        }
    }
    let loader = find("ld-linux-x86-64.so.2").context("no package holds the dynamic loader")?;
    files.push(GuestFile::new(loader, "lib64/ld-linux-x86-64.so.2"));
    Ok(files)
}

/// A file or symbolic link of this name under a folder.
fn find_entry(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    entries.sort();
    let here = entries
        .iter()
        .find(|path| path.file_name().is_some_and(|n| n == name))
        .cloned();
    here.or_else(|| {
        let mut folders = entries
            .iter()
            .filter(|path| path.is_dir() && !path.is_symlink());
        folders.find_map(|folder| find_entry(folder, name))
    })
}

/// The names of the libraries that a program or library requires.
fn needed_by(shell: &Shell, file: &Path) -> Result<Vec<String>> {
    let headers = cmd!(shell, "objdump -p {file}").quiet().read()?;
    let needed = headers
        .lines()
        .filter_map(|line| line.trim().strip_prefix("NEEDED"));
    Ok(needed.map(|name| name.trim().to_owned()).collect())
}
