//! Parses `DIR=TAG[,rw]`, which names a folder that the guest may mount.

use std::fmt;
use std::path::{Path, PathBuf};

use hindsight_devices::virtio::filesystem::TAG_LEN;

/// A folder that the guest may mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareSpec {
    /// The folder.
    pub folder: PathBuf,
    /// The name by which the guest mounts it.
    pub tag: String,
    /// The guest may change the files.
    pub writable: bool,
}

impl ShareSpec {
    /// Parses `DIR=TAG[,rw]`.
    ///
    /// # Errors
    ///
    /// There is no folder, or the tag is not usable.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (rest, writable) = match text.strip_suffix(",rw") {
            Some(rest) => (rest, true),
            None => (text.strip_suffix(",ro").unwrap_or(text), false),
        };
        let (folder, tag) = rest
            .rsplit_once('=')
            .ok_or("not a folder and a tag: DIR=TAG[,rw]")?;
        let usable = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if tag.is_empty() || tag.len() > TAG_LEN || !tag.bytes().all(usable) {
            return Err(format!(
                "{tag:?} is no tag: use up to {TAG_LEN} letters, digits, and - _ ."
            ));
        }
        if folder.is_empty() {
            return Err("no folder before the =".to_owned());
        }
        Ok(Self {
            folder: folder.into(),
            tag: tag.to_owned(),
            writable,
        })
    }

    /// The same share, with its folder resolved against `folder`.
    #[must_use]
    pub fn in_folder(self, folder: &Path) -> Self {
        Self {
            folder: folder.join(self.folder),
            ..self
        }
    }
}

impl fmt::Display for ShareSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            folder,
            tag,
            writable,
        } = self;
        let suffix = if *writable { ",rw" } else { "" };
        write!(f, "{}={tag}{suffix}", folder.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_tag_and_mode_are_parsed() {
        let spec = ShareSpec::parse("a=b,c=src,rw").unwrap();
        assert_eq!(
            (spec.folder.as_path(), &*spec.tag),
            (Path::new("a=b,c"), "src")
        );
        assert!(spec.writable);
        assert_eq!(spec.to_string(), "a=b,c=src,rw");
        assert!(!ShareSpec::parse("/=root").unwrap().writable);
    }

    #[test]
    fn shares_without_folder_or_usable_tag_are_refused() {
        for text in [
            "",
            "dir",
            "=tag",
            "dir=",
            "dir=a b",
            &format!("d={}", "x".repeat(37)),
        ] {
            assert!(ShareSpec::parse(text).is_err(), "{text:?}");
        }
    }
}
