//! The kernel modules that the guest loads, in their order.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use object::{Object, ObjectSection};

/// The modules that a guest of `hindsight exec` requires.
const REQUIRED: [&str; 4] = ["virtio_pci", "virtio_console", "virtiofs", "overlay"];
/// Maximum size of a module in bytes.
const MODULE_MAX: u64 = 64 << 20;
/// Depth to which the directory of modules is searched.
const DEPTH_MAX: usize = 8;

/// A module to load.
#[derive(Debug)]
pub(super) struct KernelModule {
    pub(super) name: String,
    pub(super) contents: Vec<u8>,
}

/// Reads the modules that the guest requires, and those of `more`, from `folder`.
///
/// Returns each module after the modules on which it depends. A required module without a file
/// counts as built into the kernel.
///
/// # Errors
///
/// A module cannot be read, or the directory has none of them.
pub(super) fn collect(folder: &Path, more: &[&str]) -> anyhow::Result<Vec<KernelModule>> {
    let mut files = HashMap::new();
    find(folder, DEPTH_MAX, &mut files);
    let mut chosen = ModuleOrder {
        files,
        visited: HashSet::new(),
        modules: Vec::new(),
    };
    for name in REQUIRED.iter().chain(more) {
        chosen.add(name)?;
    }
    Ok(chosen.modules)
}

/// Returns the name of the module in a file: `virtio-rng.ko.xz` has `virtio_rng`.
fn module_name(file: &str) -> Option<String> {
    let (name, rest) = file.split_once(".ko")?;
    let known = ["", ".xz", ".zst", ".gz"];
    known.contains(&rest).then(|| name.replace('-', "_"))
}

fn find(folder: &Path, depth: usize, files: &mut HashMap<String, PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        if kind.is_dir() && depth > 0 {
            find(&entry.path(), depth - 1, files);
        } else if let Some(name) = entry.file_name().to_str().and_then(module_name) {
            files.insert(name, entry.path());
        }
    }
}

/// Modules in the order of loading: each after the modules on which it depends.
struct ModuleOrder {
    files: HashMap<String, PathBuf>,
    visited: HashSet<String>,
    modules: Vec<KernelModule>,
}

impl ModuleOrder {
    fn add(&mut self, name: &str) -> anyhow::Result<()> {
        if !self.visited.insert(name.to_owned()) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            return Ok(());
        };
        let contents = read_module(path).with_context(|| format!("module {}", path.display()))?;
        for dependency in dependencies(&contents) {
            self.add(&dependency)?;
        }
        self.modules.push(KernelModule {
            name: name.to_owned(),
            contents,
        });
        Ok(())
    }
}

/// Reads a module, and decompresses it if it is compressed.
fn read_module(path: &Path) -> anyhow::Result<Vec<u8>> {
    let extension = path.extension().and_then(|extension| extension.to_str());
    let program = match extension {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => {
            let len = fs::metadata(path)?.len();
            if len > MODULE_MAX {
                bail!("it has more than 64 MiB");
            }
            return Ok(fs::read(path)?);
        }
    };
    let output = Command::new(program).arg("-dc").arg(path).output();
    let output = output.with_context(|| format!("{program} is needed to decompress it"))?;
    if !output.status.success() {
        bail!("{program} cannot decompress it");
    }
    Ok(output.stdout)
}

/// The modules on which a module depends, as its section .modinfo says.
fn dependencies(module: &[u8]) -> Vec<String> {
    let info = object::File::parse(module).ok().and_then(|file| {
        let section = file.section_by_name(".modinfo")?;
        section.data().ok().map(<[u8]>::to_vec)
    });
    let info = info.unwrap_or_default();
    let mut records = info.split(|byte| *byte == 0);
    let names = records.find_map(|record| record.strip_prefix(b"depends="));
    let names = String::from_utf8_lossy(names.unwrap_or_default()).into_owned();
    let names = names.split(',').filter(|name| !name.is_empty());
    names.map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_names_have_underscores_and_no_suffix() {
        let rows = [
            ("virtio-rng.ko", Some("virtio_rng")),
            ("fuse.ko.xz", Some("fuse")),
            ("overlay.ko.zst", Some("overlay")),
            ("a.ko.sig", None),
            ("modules.dep", None),
        ];
        for (file, name) in rows {
            assert_eq!(module_name(file).as_deref(), name, "{file}");
        }
    }

    #[test]
    fn folder_without_modules_needs_none() {
        let folder = tempfile::tempdir().unwrap();
        assert!(collect(folder.path(), &[]).unwrap().is_empty());
        fs::write(folder.path().join("virtio_pci.ko"), "not an ELF file").unwrap();
        let modules = collect(folder.path(), &[]).unwrap();
        assert_eq!(modules.len(), 1);
        assert!(dependencies(&modules[0].contents).is_empty());
    }
}
