//! Which image a disk has, and how it is used: `FILE[,ro][,snapshot][,backing][,format=FORMAT]`.

use std::fmt;
use std::path::{Path, PathBuf};

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFormat {
    /// The disk's bytes.
    Raw,
    /// QEMU's format, with backing files.
    Qcow2,
    /// VMware's format.
    Vmdk,
}

impl DiskFormat {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Raw, "raw"),
        (Self::Qcow2, "qcow2"),
        (Self::Vmdk, "vmdk"),
    ];

    /// The format of this name.
    fn by_name(name: &str) -> Option<Self> {
        let found = Self::ALL.iter().find(|(_, known)| *known == name);
        found.map(|(format, _)| *format)
    }

    /// The name of the format on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vmdk => "vmdk",
        }
    }
}

/// A disk of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// The image.
    pub path: PathBuf,
    /// The guest cannot write.
    pub read_only: bool,
    /// The guest's changes are thrown away.
    pub snapshot: bool,
    /// The image's backing files may be outside of its folder.
    pub any_backing: bool,
    /// The format. `None`: the extension of the file name decides, and raw is the default.
    pub format: Option<DiskFormat>,
}

impl DiskSpec {
    /// Parses `FILE` and options after commas. A comma that no option follows is part of the name.
    ///
    /// # Errors
    ///
    /// There is no file name, or no format of the name.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut spec = Self {
            path: PathBuf::new(),
            read_only: false,
            snapshot: false,
            any_backing: false,
            format: None,
        };
        let mut rest = text;
        while let Some((before, option)) = rest.rsplit_once(',') {
            match option {
                "ro" => spec.read_only = true,
                "snapshot" => spec.snapshot = true,
                "backing" => spec.any_backing = true,
                _ => {
                    let Some(name) = option.strip_prefix("format=") else {
                        break;
                    };
                    let format = DiskFormat::by_name(name);
                    let unknown = || format!("{name} is no format: use raw, qcow2 or vmdk");
                    spec.format = Some(format.ok_or_else(unknown)?);
                }
            }
            rest = before;
        }
        if rest.is_empty() {
            return Err("no file name before the options".to_owned());
        }
        spec.path = rest.into();
        Ok(spec)
    }

    /// The format of the image: the chosen one, or that of the extension. The contents do not
    /// matter, because a guest could write another format's header to a raw disk.
    pub fn format(&self) -> DiskFormat {
        let extension = self
            .path
            .extension()
            .and_then(|extension| extension.to_str());
        let by_extension = extension.and_then(DiskFormat::by_name);
        self.format.or(by_extension).unwrap_or(DiskFormat::Raw)
    }

    /// Whether runs leave the image as it is.
    pub const fn leaves_image(&self) -> bool {
        self.read_only || self.snapshot
    }

    /// The same disk, with its path resolved against `folder`.
    #[must_use]
    pub fn in_folder(self, folder: &Path) -> Self {
        Self {
            path: folder.join(self.path),
            ..self
        }
    }
}

impl fmt::Display for DiskSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        let flags = [
            (self.read_only, ",ro"),
            (self.snapshot, ",snapshot"),
            (self.any_backing, ",backing"),
        ];
        for (_, text) in flags.iter().filter(|(set, _)| *set) {
            f.write_str(text)?;
        }
        match self.format {
            Some(format) => write!(f, ",format={}", format.name()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_follow_the_name_in_any_order() {
        let spec = DiskSpec::parse("a,b.img,snapshot,format=qcow2,ro").unwrap();
        assert_eq!(spec.path, Path::new("a,b.img"));
        assert!(spec.read_only && spec.snapshot && !spec.any_backing);
        assert_eq!(spec.format(), DiskFormat::Qcow2);
        assert_eq!(spec.to_string(), "a,b.img,ro,snapshot,format=qcow2");
    }

    #[test]
    fn format_follows_the_extension() {
        let rows = [
            ("d.qcow2", DiskFormat::Qcow2),
            ("d.vmdk", DiskFormat::Vmdk),
            ("d.img", DiskFormat::Raw),
            ("d", DiskFormat::Raw),
            ("d.qcow2,format=raw", DiskFormat::Raw),
        ];
        for (text, format) in rows {
            assert_eq!(DiskSpec::parse(text).unwrap().format(), format, "{text}");
        }
    }

    #[test]
    fn disks_without_name_or_with_unknown_format_are_refused() {
        for text in ["", ",ro", "d,format=vdi", "format=raw,format="] {
            assert!(DiskSpec::parse(text).is_err(), "{text:?}");
        }
    }
}
