//! Paths of options, and the folder that relative paths of a file refer to.

use std::cell::RefCell;
use std::ffi::OsString;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use serde::de::{Deserialize, Deserializer};
use serde::ser::{self, Serialize, Serializer};

thread_local! {
    /// The folder of the file that this thread reads. Serde passes no context to [`Deserialize`].
    static FOLDER: RefCell<PathBuf> = const { RefCell::new(PathBuf::new()) };
}

/// Runs `read`, which resolves relative paths that it deserializes against `folder`.
pub fn resolving_against<T>(folder: &Path, read: impl FnOnce() -> T) -> T {
    let before = FOLDER.replace(folder.to_owned());
    let result = read();
    FOLDER.set(before);
    result
}

/// Calls `f` with the folder of the file that is being read; it is empty while none is.
pub fn with_folder<T>(f: impl FnOnce(&Path) -> T) -> T {
    FOLDER.with_borrow(|folder| f(folder))
}

/// The path of a file that an option names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePath(PathBuf);

impl From<OsString> for FilePath {
    fn from(path: OsString) -> Self {
        Self(path.into())
    }
}

impl Deref for FilePath {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl<'de> Deserialize<'de> for FilePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let path = PathBuf::deserialize(deserializer)?;
        Ok(Self(with_folder(|folder| folder.join(path))))
    }
}

impl Serialize for FilePath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let path = std::path::absolute(&self.0).map_err(ser::Error::custom)?;
        path.serialize(serializer)
    }
}
