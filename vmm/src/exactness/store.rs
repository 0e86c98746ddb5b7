//! Verdicts on disk: `kvm-verdicts.json`, beside the findings of the probes.
//!
//! The file belongs to one KVM and one build of this program. A file of another KVM, build or
//! format, or one that does not parse, counts as empty.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::Verdicts;
use super::identity::kvm_identity;
use crate::kvm::exactness::{FacilityGroup, GroupVerdict};
use crate::probe::findings_cache::{build_id, cache_folder};

/// Version of the file's format.
const FORMAT: u32 = 1;

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VerdictFile {
    format: u32,
    key: String,
    groups: BTreeMap<FacilityGroup, GroupVerdict>,
}

/// The verdict file of one KVM and build.
#[derive(Clone, Debug)]
pub struct VerdictStore {
    file: PathBuf,
    /// Identifies the KVM and the build.
    key: String,
}

impl VerdictStore {
    /// Returns the store of this user's verdicts on this host's KVM.
    ///
    /// `None` if there is no home directory, or the KVM cannot be identified.
    pub fn of_this_kvm() -> Option<Self> {
        let file = cache_folder()?.join("hindsight/kvm-verdicts.json");
        let key = format!("{} {}", kvm_identity()?, build_id());
        Some(Self { file, key })
    }

    /// Returns the verdicts that this build has saved for this KVM; empty if there are none.
    pub fn load(&self) -> Verdicts {
        let content = fs::read_to_string(&self.file).ok();
        let content = content.and_then(|text| serde_json::from_str::<VerdictFile>(&text).ok());
        let valid = content.filter(|file| file.format == FORMAT && file.key == self.key);
        Verdicts(valid.map(|file| file.groups).unwrap_or_default())
    }

    /// Replaces the saved verdicts, atomically.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn save(&self, verdicts: &Verdicts) -> io::Result<()> {
        let text = serde_json::to_string_pretty(&VerdictFile {
            format: FORMAT,
            key: self.key.clone(),
            groups: verdicts.0.clone(),
        })?;
        if let Some(folder) = self.file.parent() {
            fs::create_dir_all(folder)?;
        }
        let extension = format!("{}.tmp", std::process::id());
        let temporary = self.file.with_extension(extension);
        let renamed = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, &self.file));
        if renamed.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        renamed
    }

    /// Replaces the saved verdicts, or logs the error. The next start then measures them again.
    pub fn save_or_log(&self, verdicts: &Verdicts) {
        if let Err(error) = self.save(verdicts) {
            tracing::debug!(%error, "verdicts are not saved");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::exactness::Exactness;

    fn store(folder: &std::path::Path, key: &str) -> VerdictStore {
        VerdictStore {
            file: folder.join("new/kvm-verdicts.json"),
            key: key.to_owned(),
        }
    }

    fn verdicts() -> Verdicts {
        let verdict = GroupVerdict {
            alone: Exactness::Inexact("tf/hlt: no #DB".to_owned()),
            moving: Exactness::Exact,
        };
        Verdicts(BTreeMap::from([(FacilityGroup::SingleStep, verdict)]))
    }

    #[test]
    fn saved_verdicts_are_loaded_for_the_same_kvm_only() {
        let folder = tempfile::tempdir().unwrap();
        store(folder.path(), "kvm 1").save(&verdicts()).unwrap();
        assert_eq!(store(folder.path(), "kvm 1").load(), verdicts());
        assert_eq!(store(folder.path(), "kvm 2").load(), Verdicts::default());
    }

    #[test]
    fn file_that_is_cut_or_of_another_format_counts_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "kvm 1");
        store.save(&verdicts()).unwrap();
        let text = fs::read_to_string(&store.file).unwrap();
        for len in 0..text.len() {
            fs::write(&store.file, &text[..len]).unwrap();
            assert_eq!(store.load(), Verdicts::default(), "cut at {len}");
        }
        let newer = text.replace("\"format\": 1", "\"format\": 2");
        assert_ne!(newer, text);
        fs::write(&store.file, newer).unwrap();
        assert_eq!(store.load(), Verdicts::default());
    }
}
