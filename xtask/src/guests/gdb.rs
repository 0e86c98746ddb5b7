//! Builds the files that gdb requires inside a lab, and the guests that it debugs there.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use xshell::{Shell, cmd};

use super::initramfs::GuestFile;
use crate::packages::{self, fetch, with_cache_lock};
use crate::process::{root, shell};

/// The functions of libdebuginfod that gdb links, and of its second version.
const DEBUGINFOD: [&str; 6] = [
    "begin",
    "end",
    "find_debuginfo",
    "find_executable",
    "find_source",
    "set_progressfn",
];
const DEBUGINFOD_LATER: [&str; 2] = ["get_user_data", "set_user_data"];

/// Puts Debian's gdb without Python, its libraries and the guests of ci/guest/gdb-sessions into a
/// folder; returns the files that a lab takes.
pub fn make(to: &Path) -> Result<Vec<GuestFile>> {
    let mut files = make_gdb(to)?;
    let to = to.canonicalize()?;
    make_guests(&shell()?, &to)?;
    for image in fs::read_dir(&to)? {
        let image = image?.path();
        if image
            .extension()
            .is_some_and(|extension| extension == "elf" || extension == "bin")
        {
            files.push(GuestFile::in_files(image)?);
        }
    }
    files.push(GuestFile::in_files(root().join("ci/guest/gdb-sessions"))?);
    Ok(files)
}

/// Puts Debian's gdb without Python into a folder; returns it and its libraries.
pub fn make_gdb(to: &Path) -> Result<Vec<GuestFile>> {
    fs::create_dir_all(to)?;
    let to = to.canonicalize()?;
    let package = with_cache_lock(|| {
        packages::install(&["gcc", "binutils", "libc6-dev"])?;
        fetch("gdb-minimal")
    })?;
    let shell = shell()?;
    make_debuginfod(&shell, &to)?;
    let (gdb, original) = (to.join("gdb"), package.join("usr/bin/gdb"));
    cmd!(shell, "strip -o {gdb} {original}").quiet().run()?;
    let mut files = vec![GuestFile::new(&gdb, "bin/gdb")];
    for library in libraries(&shell, &gdb, &to)? {
        let guest = match library.strip_prefix(&to) {
            Ok(name) => Path::new("lib/x86_64-linux-gnu").join(name),
            Err(_) => library.strip_prefix("/")?.to_path_buf(),
        };
        files.push(GuestFile::new(library, guest));
    }
    Ok(files)
}

/// Builds a libdebuginfod without symbols, because the real one needs thirty more libraries.
fn make_debuginfod(shell: &Shell, to: &Path) -> Result<()> {
    let (source, map) = (to.join("debuginfod.c"), to.join("debuginfod.map"));
    let library = to.join("libdebuginfod.so.1");
    let function = |name: &&str| format!("long debuginfod_{name}(void) {{ return 0; }}\n");
    let symbol = |name: &&str| format!("debuginfod_{name};\n");
    let functions: String = DEBUGINFOD
        .iter()
        .chain(&DEBUGINFOD_LATER)
        .map(function)
        .collect();
    fs::write(&source, functions)?;
    let first: String = DEBUGINFOD.iter().map(symbol).collect();
    let second: String = DEBUGINFOD_LATER.iter().map(symbol).collect();
    fs::write(
        &map,
        format!("ELFUTILS_0.178 {{ global:\n{first}}}; ELFUTILS_0.179 {{ global:\n{second}}};\n"),
    )?;
    let script = format!("-Wl,--version-script={}", map.display());
    cmd!(
        shell,
        "gcc -shared -Wl,-soname,libdebuginfod.so.1 {script} -o {library} {source}"
    )
    .quiet()
    .run()?;
    Ok(())
}

/// Builds the guests of the gdb tests.
fn make_guests(shell: &Shell, to: &Path) -> Result<()> {
    // By its relative path, which gdb then finds below /files in the lab.
    let build = "vmm/tests/gdb/guests/build";
    cmd!(shell, "{build} sample {to}")
        .quiet()
        .ignore_stdout()
        .run()?;
    for source in guest_sources()? {
        let name = source.file_stem().unwrap_or_default();
        cmd!(shell, "{build} {name} {to}")
            .quiet()
            .ignore_stdout()
            .run()?;
    }
    Ok(())
}

/// The assembler sources of the gdb tests' guests, which gdb shows.
pub fn guest_sources() -> Result<Vec<PathBuf>> {
    let mut sources = Vec::new();
    for file in fs::read_dir(root().join("vmm/tests/gdb/guests"))? {
        let path = file?.path();
        if path.extension().is_some_and(|extension| extension == "S") {
            sources.push(path);
        }
    }
    sources.sort();
    Ok(sources)
}

/// The libraries that the loader finds for gdb, and the loader itself.
fn libraries(shell: &Shell, gdb: &Path, folder: &Path) -> Result<Vec<PathBuf>> {
    let text = cmd!(shell, "ldd {gdb}")
        .env("LD_LIBRARY_PATH", folder)
        .quiet()
        .read()?;
    let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(paths.map(PathBuf::from).collect())
}
