//! Findings kept for this boot of the host, so that each is measured once and only when wanted.
//!
//! The file is `doctor.json` in `$XDG_CACHE_HOME/hindsight` or `~/.cache/hindsight`. It belongs to
//! one boot and one build of this program; any other, or one that does not parse, counts as empty.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use std::{env, fs, io};

use serde::{Deserialize, Serialize};

use crate::probe::finding::Finding;

/// By the probe's name.
pub type Findings = BTreeMap<String, Finding>;

/// The file's content.
#[derive(Debug, Serialize, Deserialize)]
struct Content {
    key: String,
    findings: Findings,
}

/// Where findings are kept, and for which boot and build.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    file: PathBuf,
    key: String,
}

impl Cache {
    /// This user's cache for this boot. `None` where there is no home or no boot id.
    pub(crate) fn here() -> Option<Self> {
        let folder = folder(env::var_os("XDG_CACHE_HOME"), env::var_os("HOME"))?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let key = format!("{} {}", boot.trim(), build());
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

    /// What is kept; empty when there is nothing of this boot and build.
    pub(crate) fn load(&self) -> Findings {
        fs::read_to_string(&self.file)
            .ok()
            .and_then(|text| serde_json::from_str::<Content>(&text).ok())
            .filter(|content| content.key == self.key)
            .map(|content| content.findings)
            .unwrap_or_default()
    }

    /// Adds to what is kept. Readers see the old file or the new one, never a part.
    pub(crate) fn store(&self, new: &Findings) -> io::Result<()> {
        let mut findings = self.load();
        findings.extend(
            new.iter()
                .map(|(name, finding)| (name.clone(), finding.clone())),
        );
        let text = serde_json::to_string(&Content {
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

fn folder(xdg: Option<std::ffi::OsString>, home: Option<std::ffi::OsString>) -> Option<PathBuf> {
    // The specification of XDG_CACHE_HOME says that a relative path is to be ignored.
    let xdg = xdg.map(PathBuf::from).filter(|path| path.is_absolute());
    xdg.or_else(|| Some(PathBuf::from(home.filter(|home| !home.is_empty())?).join(".cache")))
}

/// Tells builds of this program apart: another build may have other probes.
fn build() -> String {
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
    fn findings_stored_are_loaded_with_those_before() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(&folder.path().join("new/doctor.json"), "boot 1");
        cache.store(&findings("nmi")).unwrap();
        cache.store(&findings("smi")).unwrap();
        assert_eq!(cache.load().into_keys().collect::<Vec<_>>(), ["nmi", "smi"]);
    }

    #[test]
    fn findings_of_another_boot_are_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("doctor.json");
        Cache::at(&file, "boot 1").store(&findings("nmi")).unwrap();
        assert_eq!(Cache::at(&file, "boot 2").load(), Findings::new());
    }

    #[test]
    fn file_that_does_not_parse_counts_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("doctor.json");
        fs::write(&file, "{\"key\":").unwrap();
        assert_eq!(Cache::at(&file, "boot 1").load(), Findings::new());
    }

    #[test]
    fn folder_prefers_an_absolute_xdg_path_over_home() {
        let path = |text: &str| Some(text.into());
        assert_eq!(folder(path("/x"), path("/h")), Some("/x".into()));
        assert_eq!(folder(path("x"), path("/h")), Some("/h/.cache".into()));
        assert_eq!(folder(None, None), None);
    }
}
