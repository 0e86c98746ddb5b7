//! The Linux kernel of the labs and of the Linux guests, from Debian's or Ubuntu's packages.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use xshell::{Shell, cmd};

use crate::packages::{self, cache_dir, fetch, find_file, is_known, update_lists};
use crate::process::{has_program, shell};

/// The modules that a lab loads; irqbypass is built into some kernels.
const MODULES: [&str; 5] = ["irqbypass", "kvm", "kvm-amd", "kvm-intel", "msr"];

/// Makes the cached folder kernel/ with vmlinuz, version and the modules; returns it.
///
/// `$HINDSIGHT_LAB_KERNEL_REFRESH` replaces a cached kernel by the current one. The cache's lock must
/// be held.
pub fn fetch_kernel() -> Result<PathBuf> {
    let folder = cache_dir()?.join("kernel");
    let cached = folder.join("version").exists() && folder.join("msr.ko").exists();
    if cached && std::env::var_os("HINDSIGHT_LAB_KERNEL_REFRESH").is_none_or(|v| v.is_empty()) {
        return Ok(folder);
    }
    let shell = shell()?;
    let mut names = kernel_packages(&shell);
    if names.is_empty() {
        update_lists(&shell)?;
        names = kernel_packages(&shell);
    }
    ensure!(
        !names.is_empty(),
        "apt knows neither linux-image-cloud-amd64 (Debian) nor linux-image-virtual (Ubuntu)"
    );
    let work = tempfile::Builder::new()
        .prefix(".kernel.")
        .tempdir_in(cache_dir()?)?;
    for name in &names {
        let package = fetch(name)?;
        if let Some(image) = find_file(&package.join("boot"), &|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
        }) {
            fs::copy(image, work.path().join("vmlinuz"))?;
        }
        for module in MODULES {
            let prefix = format!("{module}.ko");
            if let Some(file) = find_file(&package, &|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
            }) {
                unpack_module(&shell, &file, &work.path().join(&prefix))?;
            }
        }
        fs::remove_dir_all(package)?;
    }
    for module in MODULES {
        let file = work.path().join(format!("{module}.ko"));
        let required = module != "irqbypass";
        ensure!(
            !required || file.exists(),
            "no {module}.ko in {}",
            names.join(" ")
        );
    }
    ensure!(
        work.path().join("vmlinuz").exists(),
        "no vmlinuz in {}",
        names.join(" ")
    );
    let version = names[0]
        .trim_start_matches("linux-image-")
        .trim_start_matches("unsigned-");
    fs::write(work.path().join("version"), format!("{version}\n"))?;
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::rename(work.keep(), &folder)?;
    Ok(folder)
}

/// The packages of the first kernel meta package that exists; none if apt knows neither.
///
/// Debian's cloud kernel is one package. Ubuntu's kernel for virtual machines has a package of modules
/// besides.
fn kernel_packages(shell: &Shell) -> Vec<String> {
    for meta in ["linux-image-cloud-amd64", "linux-image-virtual"] {
        if !is_known(shell, meta) {
            continue;
        }
        let depends = cmd!(
            shell,
            "apt-cache depends --no-recommends --no-suggests {meta}"
        );
        let text = depends.quiet().read().unwrap_or_default();
        let versioned = |name: &&str| {
            ["linux-image-", "linux-modules-"].iter().any(|prefix| {
                let rest = name.strip_prefix(prefix);
                rest.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
            })
        };
        let depends = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "));
        let mut names: Vec<String> = depends.filter(versioned).map(String::from).collect();
        if names.is_empty() {
            continue;
        }
        if meta == "linux-image-virtual" {
            let images: Vec<String> = names
                .iter()
                .filter_map(|name| name.strip_prefix("linux-image-"))
                .map(|rest| format!("linux-modules-{}", rest.trim_start_matches("unsigned-")))
                .collect();
            names.extend(images);
        }
        return names;
    }
    Vec::new()
}

/// Decompresses a kernel module and drops what makes it slow to load in an emulator: BTF, which the
/// kernel would parse, and the signature, which it would check.
fn unpack_module(shell: &Shell, from: &Path, to: &Path) -> Result<()> {
    let compression = from
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or("");
    let output = match compression {
        "xz" => cmd!(shell, "xz -dc {from}").quiet().output()?.stdout,
        "zst" => cmd!(shell, "zstd -qdc {from}").quiet().output()?.stdout,
        "gz" => cmd!(shell, "gzip -dc {from}").quiet().output()?.stdout,
        _ => fs::read(from)?,
    };
    fs::write(to, output).with_context(|| format!("cannot write {}", to.display()))?;
    if has_program("objcopy") {
        cmd!(shell, "objcopy --strip-debug --remove-section .BTF {to}")
            .quiet()
            .run()?;
    }
    Ok(())
}

/// Installs the tools that [`fetch_kernel`] requires.
pub fn install_tools() -> Result<()> {
    packages::install(&["binutils", "xz-utils", "zstd"])
}
