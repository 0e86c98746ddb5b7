//! The programs of resources/guests, built with the host's compiler.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use xshell::cmd;

use crate::packages::{self, find_file, with_cache_lock};
use crate::process::{absolute, root, shell};

/// Builds the Linux program that perf measures, and whose events the judge knows.
pub fn make_measured(out: &Path) -> Result<()> {
    let out = absolute(out)?;
    let shell = shell()?;
    shell.change_dir(root().join("resources/guests/measured"));
    cmd!(
        shell,
        "gcc -nostdlib -static -no-pie -Wl,--build-id=none -o {out} measured.S"
    )
    .quiet()
    .run()?;
    make_executable(&out)
}

/// Builds the Linux program that reads memory for the RDT tests.
pub fn make_walk(out: &Path) -> Result<()> {
    let out = absolute(out)?;
    let shell = shell()?;
    shell.change_dir(root().join("resources/guests/walk"));
    cmd!(
        shell,
        "gcc -O2 -Wall -Wextra -Werror -static -o {out} walk.c"
    )
    .quiet()
    .run()?;
    make_executable(&out)
}

/// Builds the Linux program that gdb debugs inside a guest.
pub fn make_watched(out: &Path) -> Result<()> {
    let out = absolute(out)?;
    let shell = shell()?;
    shell.change_dir(root().join("resources/guests/watched"));
    cmd!(
        shell,
        "gcc -g -O1 -Wall -Wextra -Werror -static -fcf-protection=none -o {out} watched.c"
    )
    .quiet()
    .run()?;
    make_executable(&out)
}

/// Builds Linux's own test of breakpoints and watchpoints from Debian's source of the kernel.
pub fn make_breakpoint_test(out: &Path) -> Result<()> {
    let source = with_cache_lock(fetch_selftests)?;
    let source = source.join("breakpoints/breakpoint_test.c");
    let shell = shell()?;
    cmd!(shell, "gcc -static -w -o {out} {source}")
        .quiet()
        .run()?;
    make_executable(out)
}

/// Returns a folder with the few files of the kernel's selftests that are built here.
///
/// The caller holds the lock of the cache.
fn fetch_selftests() -> Result<PathBuf> {
    let to = packages::cache_dir()?.join("selftests");
    if to.join(".complete").exists() {
        return Ok(to);
    }
    packages::know("linux-source")?;
    let shell = shell()?;
    let text = cmd!(shell, "apt-cache depends --important linux-source")
        .quiet()
        .read()?;
    let versions = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: linux-source"));
    let version = versions
        .max()
        .context("linux-source depends on no version of itself")?;
    let package = packages::fetch(&format!("linux-source{version}"))?;
    let archive = find_file(&package, &|path| path.to_string_lossy().contains(".tar."))
        .context("the package of the kernel's source holds no archive")?;
    fs::create_dir_all(&to)?;
    // The folder of the kernel, and tools/testing/selftests.
    cmd!(
        shell,
        "tar -C {to} --strip-components=4 -xf {archive} --wildcards"
    )
    .args([
        "*/tools/testing/selftests/breakpoints/*",
        "*/tools/testing/selftests/kselftest.h",
    ])
    .quiet()
    .run()?;
    fs::write(to.join(".complete"), "")?;
    // It is a hundred times as large as what was taken.
    fs::remove_dir_all(package)?;
    Ok(to)
}

/// Builds an ELF32 multiboot image that prints its command line and a verdict.
pub fn make_multiboot(out: &Path) -> Result<()> {
    with_cache_lock(|| packages::install(&["binutils"]))?;
    let work = tempfile::tempdir()?;
    let object = work.path().join("kernel.o");
    let out = absolute(out)?;
    let shell = shell()?;
    cmd!(shell, "as --32 -o {object} resources/guests/multiboot.S")
        .quiet()
        .run()?;
    cmd!(
        shell,
        "ld -m elf_i386 -z noexecstack -z noseparate-code -z max-page-size=0x1000"
    )
    .args(["-Ttext-segment", "0x100000", "-o"])
    .args([&out, &object])
    .quiet()
    .run()?;
    Ok(())
}

fn make_executable(path: &Path) -> Result<()> {
    Ok(fs::set_permissions(
        path,
        fs::Permissions::from_mode(0o755),
    )?)
}
