//! Files of a Linux guest, in a directory of the host.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use hindsight_export::ElfCode;

use super::export::{IMAGE_MAX, warn};
use super::read::read;

/// Maximum number of warnings: a guest chooses how many files it has.
const WARNINGS_MAX: usize = 20;

/// A directory that has a guest's files at their paths, or debug files by build ID as debug
/// packages do.
#[derive(Debug)]
pub(super) struct GuestFiles {
    /// The directory, without symbolic links; `None` if it cannot be read.
    directory: Option<PathBuf>,
    /// The code of each file that was read; `None` if it has none.
    codes: HashMap<PathBuf, Option<Rc<ElfCode>>>,
    warnings: Vec<String>,
}

impl GuestFiles {
    /// The files in `directory`.
    pub(super) fn new(directory: Option<&Path>) -> Self {
        Self {
            directory: directory.and_then(|path| path.canonicalize().ok()),
            codes: HashMap::new(),
            warnings: Vec::new(),
        }
    }

    /// The code of the file at `path` in the guest. A file with another build ID is not used.
    pub(super) fn find(&mut self, path: &str, build_id: &str) -> Option<Rc<ElfCode>> {
        let directory = self.directory.clone()?;
        let mut candidates = vec![directory.join(path.trim_start_matches('/'))];
        if let Some((first, rest)) = build_id.split_at_checked(2) {
            let folder = directory.join(".build-id").join(first);
            candidates.push(folder.join(format!("{rest}.debug")));
            candidates.push(folder.join(rest));
        }
        candidates.into_iter().find_map(|file| {
            // A guest chooses its paths: they must not lead out of the directory.
            let file = file.canonicalize().ok()?;
            if !file.starts_with(&directory) {
                return None;
            }
            let code = self.code(&file)?;
            let name = file.display();
            if build_id.is_empty() {
                self.warn(format!(
                    "{name} may not be the guest's {path:?}: its build ID is not known"
                ));
            } else if code.build_id != build_id {
                self.warn(format!(
                    "{name} is not the guest's {path:?}: its build ID differs"
                ));
                return None;
            }
            Some(code)
        })
    }

    /// The code of a file, which is read once.
    fn code(&mut self, file: &Path) -> Option<Rc<ElfCode>> {
        if let Some(code) = self.codes.get(file) {
            return code.clone();
        }
        let bytes = read("symbols", file, IMAGE_MAX).ok();
        let code = bytes.and_then(|bytes| ElfCode::of(&bytes)).map(Rc::new);
        self.codes.insert(file.to_owned(), code.clone());
        code
    }

    fn warn(&mut self, text: String) {
        match self.warnings.len() {
            0..WARNINGS_MAX => warn(&text),
            WARNINGS_MAX => warn("other files may not be the guest's either"),
            _ => return,
        }
        self.warnings.push(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_of_the_host_is_read_once_and_warnings_are_few() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("program");
        std::fs::copy("/proc/self/exe", &program).unwrap();
        let mut files = GuestFiles::new(Some(directory.path()));
        let first = files.find("/program", "").unwrap();
        std::fs::write(&program, b"").unwrap();
        let second = files.find("/program", "").unwrap();
        assert!(Rc::ptr_eq(&first, &second));
        for n in 0..100 {
            assert!(files.find("/program", &format!("00{n}")).is_none());
        }
        assert_eq!(files.warnings.len(), WARNINGS_MAX + 1);
        assert!(files.find("/../../../proc/self/exe", "").is_none());
        assert!(GuestFiles::new(None).find("/program", "").is_none());
    }
}
