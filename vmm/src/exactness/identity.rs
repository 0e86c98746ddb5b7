//! Identifies this host's KVM. A verdict is valid as long as this identity stays the same.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

/// Fields of /proc/cpuinfo that identify the processor and its microcode. `flags` shows a
/// hypervisor and mitigations.
const CPUINFO: [&str; 6] = [
    "vendor_id",
    "cpu family",
    "model",
    "stepping",
    "microcode",
    "flags",
];

/// Returns a hash of the kernel's version, KVM's modules and parameters, and the CPU.
///
/// `None` if /proc or /sys cannot be read.
pub(super) fn kvm_identity() -> Option<String> {
    let kernel = fs::read_to_string("/proc/version").ok()?;
    let cpuinfo = first_processor(&mut BufReader::new(File::open("/proc/cpuinfo").ok()?));
    let modules = modules(Path::new("/sys/module"));
    Some(identity(&kernel, &cpuinfo, &modules))
}

/// Returns the lines of /proc/cpuinfo about the first processor.
///
/// The other processors have the same model and microcode, and reading the whole file takes
/// milliseconds on a host with many of them.
fn first_processor(cpuinfo: &mut dyn BufRead) -> String {
    let mut text = String::new();
    while let Ok(len) = cpuinfo.read_line(&mut text) {
        if len <= 1 {
            break;
        }
    }
    text
}

fn identity(kernel: &str, cpuinfo: &str, modules: &[String]) -> String {
    let mut hash = Xxh3::new();
    let mut add = |text: &str| {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    add(kernel);
    for line in cpuinfo.lines() {
        let name = line.split(':').next().unwrap_or("").trim();
        if CPUINFO.contains(&name) {
            add(line);
        }
    }
    modules.iter().for_each(|line| add(line));
    format!("{:032x}", hash.digest128())
}

/// Returns a line for each parameter, source version and build ID of KVM's modules.
fn modules(folder: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    for module in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = module.path();
        if !module.file_name().to_string_lossy().starts_with("kvm") {
            continue;
        }
        let mut files = vec![
            path.join("srcversion"),
            path.join("version"),
            path.join("notes/.note.gnu.build-id"),
        ];
        let parameters = fs::read_dir(path.join("parameters"));
        files.extend(parameters.into_iter().flatten().flatten().map(|f| f.path()));
        for file in files {
            // Some parameters cannot be read by an ordinary user; they are then the same each time.
            if let Ok(content) = fs::read(&file) {
                lines.push(format!("{} {content:02x?}", file.display()));
            }
        }
    }
    lines.sort();
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: &str = "processor : 0\nmodel : 85\nmicrocode : 0x1\ncpu MHz : 2000\nflags : a b\n";

    #[test]
    fn identity_follows_kernel_microcode_flags_and_modules() {
        let modules = vec!["kvm nested Y".to_owned()];
        let base = identity("Linux 6.1", CPU, &modules);
        assert_eq!(base, identity("Linux 6.1", CPU, &modules));
        assert_ne!(base, identity("Linux 6.2", CPU, &modules));
        assert_ne!(
            base,
            identity("Linux 6.1", &CPU.replace("0x1", "0x2"), &modules)
        );
        assert_ne!(
            base,
            identity("Linux 6.1", &CPU.replace("a b", "a"), &modules)
        );
        assert_ne!(
            base,
            identity("Linux 6.1", CPU, &["kvm nested N".to_owned()])
        );
    }

    #[test]
    fn identity_ignores_what_changes_while_the_host_runs() {
        let busy = CPU.replace("2000", "3100");
        assert_eq!(identity("k", CPU, &[]), identity("k", &busy, &[]));
        let both = format!("{CPU}\n{}", CPU.replace("processor : 0", "processor : 1"));
        assert_eq!(
            first_processor(&mut both.as_bytes()).trim_end(),
            CPU.trim_end()
        );
    }

    #[test]
    fn parameters_of_kvm_modules_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let parameters = folder.path().join("kvm_intel/parameters");
        fs::create_dir_all(&parameters).unwrap();
        fs::write(parameters.join("nested"), "Y\n").unwrap();
        fs::create_dir_all(folder.path().join("other")).unwrap();
        let before = modules(folder.path());
        assert_eq!(before.len(), 1);
        fs::write(parameters.join("nested"), "N\n").unwrap();
        assert_ne!(before, modules(folder.path()));
    }
}
