//! Findings cached for this boot of the host, so that each probe runs at most once, when it is
//! needed.
//!
//! The file is `doctor.json` in `$XDG_CACHE_HOME/hindsight` or `~/.cache/hindsight`. It belongs to
//! one boot and one build of this program. A file of another boot or build, or one that does not
//! parse, counts as empty.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use std::{env, fs, io};

use serde::{Deserialize, Serialize};

use crate::probe::finding::Finding;

/// Findings by the name of the probe.
pub type Findings = BTreeMap<String, Finding>;

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct CacheFile {
    key: String,
    findings: Findings,
}

/// The cache file of one boot and build.
#[derive(Debug, Clone)]
pub(crate) struct FindingsCache {
    file: PathBuf,
    /// Identifies the boot and the build.
    key: String,
}

impl FindingsCache {
    /// This user's cache for this boot. `None` if there is no home directory or no boot id.
    pub(crate) fn of_this_boot() -> Option<Self> {
        let folder = cache_folder()?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let key = format!("{} {}", boot.trim(), build_id());
        Some(Self {
            file: folder.join("hindsight/doctor.json"),
            key,
        })
    }

    #[cfg(test)]
    fn at(file: &Path, key: &str) -> Self {
        Self {
            file: file.to_owned(),
            key: key.to_owned(),
        }
    }

    /// The cached findings; empty if there are none of this boot and build.
    pub(crate) fn load(&self) -> Findings {
        fs::read_to_string(&self.file)
            .ok()
            .and_then(|text| serde_json::from_str::<CacheFile>(&text).ok())
            .filter(|content| content.key == self.key)
            .map(|content| content.findings)
            .unwrap_or_default()
    }

    /// Adds findings. It replaces the file atomically.
    pub(crate) fn store(&self, new: &Findings) -> io::Result<()> {
        let mut findings = self.load();
        findings.extend(
            new.iter()
                .map(|(name, finding)| (name.clone(), finding.clone())),
        );
        let text = serde_json::to_string(&CacheFile {
            key: self.key.clone(),
            findings,
        })?;
        let folder = self.file.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        let temporary = self
            .file
            .with_extension(format!("{}.tmp", std::process::id()));
        let renamed = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, &self.file));
        if renamed.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        renamed
    }
}

/// This user's folder for caches; `None` if there is no home directory.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    folder(env::var_os("XDG_CACHE_HOME"), env::var_os("HOME"))
}

fn folder(xdg: Option<std::ffi::OsString>, home: Option<std::ffi::OsString>) -> Option<PathBuf> {
    // The specification of XDG_CACHE_HOME requires that a relative path is ignored.
    let xdg = xdg.map(PathBuf::from).filter(|path| path.is_absolute());
    xdg.or_else(|| Some(PathBuf::from(home.filter(|home| !home.is_empty())?).join(".cache")))
}

/// Identifies the build of this program, because another build may have other probes.
pub(crate) fn build_id() -> String {
    let changed = env::current_exe()
        .and_then(|path| fs::metadata(path)?.modified())
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
        .map_or(0, |time| time.as_nanos());
    format!("{} {changed}", env!("CARGO_PKG_VERSION"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(name: &str) -> Findings {
        Findings::from([(name.to_owned(), Finding::works("yes"))])
    }

    #[test]
    fn stored_findings_are_added_to_those_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let cache = FindingsCache::at(&folder.path().join("new/doctor.json"), "boot 1");
        cache.store(&findings("nmi")).unwrap();
        cache.store(&findings("smi")).unwrap();
        assert_eq!(cache.load().into_keys().collect::<Vec<_>>(), ["nmi", "smi"]);
    }

    #[test]
    fn findings_of_another_boot_are_not_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("doctor.json");
        FindingsCache::at(&file, "boot 1")
            .store(&findings("nmi"))
            .unwrap();
        assert_eq!(FindingsCache::at(&file, "boot 2").load(), Findings::new());
    }

    #[test]
    fn file_that_does_not_parse_counts_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("doctor.json");
        fs::write(&file, "{\"key\":").unwrap();
        assert_eq!(FindingsCache::at(&file, "boot 1").load(), Findings::new());
    }

    #[test]
    fn folder_prefers_an_absolute_xdg_path_over_home() {
        let path = |text: &str| Some(text.into());
        assert_eq!(folder(path("/x"), path("/h")), Some("/x".into()));
        assert_eq!(folder(path("x"), path("/h")), Some("/h/.cache".into()));
        assert_eq!(folder(None, None), None);
    }
}
