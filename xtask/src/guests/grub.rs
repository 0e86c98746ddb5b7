//! A multiboot image of GRUB.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

use crate::packages::{self, cache_dir, with_cache_lock};
use crate::process::{absolute, say, shell};

/// What the image does: it greets on COM1, writes the verdict 0 (pass) to port 0xf4, and halts.
const CONFIG: &str = "\
serial --unit=0 --speed=115200
terminal_output serial
terminal_input serial
echo \"hello from GRUB\"
outb 0xf4 0
halt
";

/// Makes a multiboot image of GRUB.
///
/// The modules of GRUB's platform i386-multiboot come from `$GRUB_MODULES`, else from
/// /usr/lib/grub/i386-multiboot. Debian has no package of them: then they are built from its source
/// package, once (two minutes), and kept in the cache folder.
pub fn make(out: &Path) -> Result<()> {
    with_cache_lock(|| packages::install(&["grub-common"]))?;
    let mut modules = std::env::var_os("GRUB_MODULES").map_or_else(
        || PathBuf::from("/usr/lib/grub/i386-multiboot"),
        PathBuf::from,
    );
    if !modules.join("kernel.img").exists() {
        modules = with_cache_lock(fetch_modules)?;
    }
    let config = tempfile::NamedTempFile::new()?;
    fs::write(config.path(), CONFIG)?;
    let (config, out) = (config.path(), absolute(out)?);
    let shell = shell()?;
    cmd!(
        shell,
        "grub-mkimage -O i386-multiboot -d {modules} -p (memdisk)/boot/grub -c {config} -o {out}"
    )
    .args(["serial", "terminal", "echo", "iorw", "halt"])
    .quiet()
    .run()?;
    Ok(())
}

fn fetch_modules() -> Result<PathBuf> {
    let cache = cache_dir()?;
    let modules = cache.join("grub-multiboot");
    if modules.join("kernel.img").exists() {
        return Ok(modules);
    }
    packages::install(&["gcc", "libc6-dev", "make", "bison", "flex", "xz-utils"])?;
    say("building GRUB's modules for i386-multiboot");
    let work = tempfile::Builder::new()
        .prefix(".grub.")
        .tempdir_in(&cache)?;
    let shell = shell()?;
    shell.change_dir(work.path());
    fetch_source(&shell, work.path())?;
    build(&shell, work.path(), &modules)?;
    Ok(modules)
}

/// Downloads GRUB's source package by apt, which checks its signature.
///
/// The lists of source packages are kept apart from the system's, which may have none.
fn fetch_source(shell: &Shell, work: &Path) -> Result<()> {
    fs::create_dir_all(work.join("lists/partial"))?;
    let mut sources = Vec::new();
    for origin in ["Origin: Debian", "Origin: Ubuntu"] {
        let format = "deb-src $(REPO_URI) $(RELEASE) $(COMPONENT)";
        let targets = cmd!(shell, "apt-get indextargets --format {format}")
            .args(["Created-By: Packages", "Component: main", origin])
            .quiet()
            .read()?;
        sources.extend(targets.lines().map(String::from));
    }
    sources.sort();
    sources.dedup();
    let list = work.join("sources.list");
    fs::write(&list, sources.join("\n") + "\n")?;
    let options = [
        "-qq".to_owned(),
        format!("-oDir::Etc::sourcelist={}", list.display()),
        "-oDir::Etc::sourceparts=-".to_owned(),
        format!("-oDir::State::lists={}", work.join("lists").display()),
        "-oAPT::Sandbox::User=root".to_owned(),
    ];
    let arguments = &options;
    cmd!(shell, "apt-get {arguments...} update").quiet().run()?;
    cmd!(shell, "apt-get {arguments...} source --download-only grub2")
        .quiet()
        .run()?;
    Ok(())
}

/// Builds the modules in the work folder, and moves them to the cache.
fn build(shell: &Shell, work: &Path, modules: &Path) -> Result<()> {
    let (source, built) = (work.join("grub"), work.join("built"));
    fs::create_dir(&source)?;
    fs::create_dir(&built)?;
    let archive = packages::find_file(work, &|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("grub2_") && name.ends_with(".orig.tar.xz")
    })
    .context("apt downloaded no source of GRUB")?;
    cmd!(shell, "tar -xf {archive} -C {source} --strip-components=1")
        .quiet()
        .run()?;
    shell.change_dir(&source);
    let jobs = format!("-j{}", std::thread::available_parallelism()?);
    let steps = [
        cmd!(
            shell,
            "./configure --target=i386 --with-platform=multiboot --disable-nls --disable-werror"
        )
        .args(["--disable-grub-mkfont", "--disable-grub-mount"])
        .args(["--disable-device-mapper", "--disable-libzfs"]),
        cmd!(shell, "make {jobs} -C grub-core/lib/gnulib"),
        cmd!(shell, "make {jobs} -C grub-core"),
    ];
    for step in steps {
        let output = step.quiet().ignore_status().output()?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let lines: Vec<&str> = text.lines().collect();
            bail!(
                "GRUB does not build:\n{}",
                lines[lines.len().saturating_sub(20)..].join("\n")
            );
        }
    }
    for file in fs::read_dir(source.join("grub-core"))? {
        let path = file?.path();
        let extension = path.extension().unwrap_or_default();
        if extension == "mod" || extension == "lst" || path.ends_with("kernel.img") {
            fs::copy(&path, built.join(path.file_name().unwrap_or_default()))?;
        }
    }
    fs::rename(built, modules)?;
    Ok(())
}
