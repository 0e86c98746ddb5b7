//! The busybox initramfs of Linux guests, and how an initramfs is packed.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use xshell::cmd;

use crate::packages::{self, fetch_busybox, with_cache_lock};
use crate::process::{absolute, root, shell};

/// A file of the host, and its path in a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestFile {
    /// The file of the host.
    pub host: PathBuf,
    /// The path in the guest, without a slash in front.
    pub guest: PathBuf,
}

impl GuestFile {
    /// The file `host` at the path `guest`.
    pub fn new(host: impl Into<PathBuf>, guest: impl Into<PathBuf>) -> Self {
        Self {
            host: host.into(),
            guest: guest.into(),
        }
    }

    /// The file `host` at /files/NAME.
    pub fn in_files(host: impl Into<PathBuf>) -> Result<Self> {
        let host = host.into();
        let name = host
            .file_name()
            .with_context(|| format!("{} is no file", host.display()))?;
        let guest = Path::new("files").join(name);
        Ok(Self { host, guest })
    }
}

impl FromStr for GuestFile {
    type Err = anyhow::Error;

    /// Parses `FILE[:GUEST]`; without GUEST it is /files/NAME.
    fn from_str(text: &str) -> Result<Self> {
        let (host, guest) = text
            .split_once(':')
            .map_or((text, None), |(h, g)| (h, Some(g)));
        ensure!(Path::new(host).is_file(), "there is no file '{host}'");
        let host = absolute(Path::new(host))?;
        match guest {
            Some(guest) => Ok(Self::new(host, guest.trim_start_matches('/'))),
            None => Self::in_files(host),
        }
    }
}

/// Writes the initramfs of Linux guests, with more files in it, compressed if `out` ends in .gz.
pub fn make(out: &Path, files: &[GuestFile]) -> Result<()> {
    let busybox = with_cache_lock(|| {
        packages::install(&["cpio"])?;
        fetch_busybox()
    })?;
    let work = tempfile::Builder::new()
        .prefix("hindsight-initramfs.")
        .tempdir()?;
    let tree = work.path().join("root");
    add_program(&tree, &GuestFile::new(busybox, "bin/busybox"))?;
    add_program(
        &tree,
        &GuestFile::new(root().join("ci/guest/guest-init"), "init"),
    )?;
    for file in files {
        add(&tree, file)?;
    }
    let packed = work.path().join("initramfs");
    pack(&tree, &packed)?;
    if out.extension().is_some_and(|extension| extension == "gz") {
        let shell = shell()?;
        cmd!(shell, "gzip -9 -n {packed}").quiet().run()?;
        fs::copy(work.path().join("initramfs.gz"), out)?;
    } else {
        fs::copy(packed, out)?;
    }
    Ok(())
}

/// Copies a file into the tree of an initramfs.
pub fn add(tree: &Path, file: &GuestFile) -> Result<()> {
    let to = tree.join(&file.guest);
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::copy(&file.host, &to)
        .with_context(|| format!("cannot copy {} to {}", file.host.display(), to.display()))?;
    Ok(())
}

/// Copies a program into the tree of an initramfs, executable for all.
pub fn add_program(tree: &Path, file: &GuestFile) -> Result<()> {
    add(tree, file)?;
    fs::set_permissions(tree.join(&file.guest), fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Packs a tree as an initramfs, not compressed.
pub fn pack(tree: &Path, out: &Path) -> Result<()> {
    let mut names = vec![b".".to_vec()];
    list(tree, Path::new("."), &mut names)?;
    names.sort();
    let mut cpio = Command::new("cpio")
        .args(["--null", "-o", "-H", "newc", "--quiet", "-R", "0:0"])
        .current_dir(tree)
        .stdin(Stdio::piped())
        .stdout(File::create(out)?)
        .spawn()
        .context("cannot run cpio")?;
    let mut input = cpio.stdin.take().context("cpio has no input")?;
    for name in names {
        input.write_all(&name)?;
        input.write_all(&[0])?;
    }
    drop(input);
    if !cpio.wait()?.success() {
        bail!("cpio failed");
    }
    Ok(())
}

fn list(folder: &Path, name: &Path, names: &mut Vec<Vec<u8>>) -> Result<()> {
    use std::os::unix::ffi::OsStrExt;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = name.join(entry.file_name());
        names.push(path.as_os_str().as_bytes().to_vec());
        if entry.file_type()?.is_dir() {
            list(&entry.path(), &path, names)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_without_guest_path_is_put_into_files() {
        let file: GuestFile = "/etc/passwd".parse().unwrap();
        assert_eq!(file, GuestFile::new("/etc/passwd", "files/passwd"));
    }

    #[test]
    fn guest_path_is_relative_to_the_tree() {
        let file: GuestFile = "/etc/passwd:/bin/x".parse().unwrap();
        assert_eq!(file, GuestFile::new("/etc/passwd", "bin/x"));
    }

    #[test]
    fn missing_file_is_refused() {
        assert!("/nonexistent:/bin/x".parse::<GuestFile>().is_err());
    }
}
