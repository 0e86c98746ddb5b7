//! The programs of resources/guests, built with the host's compiler.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Result;
use xshell::cmd;

use crate::packages::{self, with_cache_lock};
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
