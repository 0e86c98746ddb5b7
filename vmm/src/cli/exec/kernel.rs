//! Finds a Linux kernel for the guest.
//!
//! It is the one that the user names, else a cached one, else an installed one, else Debian's,
//! which is fetched.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// The package whose newest version is fetched.
const PACKAGE: &str = "linux-image-cloud-amd64";

/// A kernel, and the directory of its modules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GuestKernel {
    pub(super) image: PathBuf,
    pub(super) modules: PathBuf,
}

/// Finds the kernel to use. `image` and `modules` are the paths that the user named, if any.
///
/// # Errors
///
/// No kernel is cached or installed, and none can be fetched.
pub(super) fn find(image: Option<&Path>, modules: Option<&Path>) -> anyhow::Result<GuestKernel> {
    if let Some(image) = image {
        let modules = match modules {
            Some(modules) => modules.to_owned(),
            None => modules_of(image),
        };
        return Ok(GuestKernel {
            image: image.to_owned(),
            modules,
        });
    }
    let cache = cache_folder();
    let cached = cache.as_deref().and_then(newest_cached);
    if let Some(kernel) =
        cached.or_else(|| newest_in(Path::new("/boot"), Path::new("/lib/modules")))
    {
        return Ok(kernel);
    }
    let cache = cache.context("neither XDG_CACHE_HOME nor HOME names a folder for the kernel")?;
    fetch(&cache).context(
        "there is no Linux kernel for the guest; name one with --kernel FILE, and --modules DIR if its \
         modules are not in /lib/modules",
    )?;
    newest_cached(&cache).context("the fetched package holds no kernel")
}

/// The folder of cached kernels.
fn cache_folder() -> Option<PathBuf> {
    let absolute = |name| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("hindsight/linux"))
}

/// Returns the version in an image's name: 6.1.0-1-amd64 for vmlinuz-6.1.0-1-amd64.
fn version_of(image: &Path) -> Option<String> {
    let name = image.file_name()?.to_str()?;
    name.strip_prefix("vmlinuz-").map(str::to_owned)
}

fn modules_of(image: &Path) -> PathBuf {
    let version = version_of(image).unwrap_or_default();
    let beside = image.parent().and_then(Path::parent);
    let beside = beside.map(|root| root.join("lib/modules").join(&version));
    match beside {
        Some(folder) if folder.is_dir() && !version.is_empty() => folder,
        _ => Path::new("/lib/modules").join(version),
    }
}

/// The newest kernel in `boot` that has modules and can be read.
fn newest_in(boot: &Path, modules: &Path) -> Option<GuestKernel> {
    let entries = fs::read_dir(boot).ok()?.flatten();
    let kernels = entries.filter_map(|entry| {
        let image = entry.path();
        let folder = modules.join(version_of(&image)?);
        let usable = folder.join("kernel").is_dir() && fs::File::open(&image).is_ok();
        usable.then_some(GuestKernel {
            image,
            modules: folder,
        })
    });
    kernels.max_by_key(|kernel| version_key(&version_of(&kernel.image).unwrap_or_default()))
}

/// A version as numbers, so that 6.10 follows 6.9.
fn version_key(version: &str) -> Vec<u64> {
    let parts = version.split(|c: char| !c.is_ascii_digit());
    parts.filter_map(|part| part.parse().ok()).collect()
}

/// The newest kernel that was unpacked into the cache.
fn newest_cached(cache: &Path) -> Option<GuestKernel> {
    let modules = ["lib/modules", "usr/lib/modules"].map(|folder| cache.join(folder));
    let kernels = modules
        .iter()
        .filter_map(|modules| newest_in(&cache.join("boot"), modules));
    kernels.max_by_key(|kernel| version_key(&version_of(&kernel.image).unwrap_or_default()))
}

/// Runs a program, and returns its standard output.
fn output(command: &mut Command) -> anyhow::Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("{program} cannot be run"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{program} failed: {}",
            errors.lines().last().unwrap_or("no message")
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Fetches Debian's cloud kernel and unpacks it into the cache. This needs no root privileges.
fn fetch(cache: &Path) -> anyhow::Result<()> {
    let mut query = Command::new("apt-cache");
    let depends = output(query.args(["depends", "--no-recommends", "--no-suggests", PACKAGE]))?;
    let mut packages = depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    let package = packages
        .find(|name| name.starts_with("linux-image-"))
        .with_context(|| format!("apt does not know {PACKAGE}; try `apt-get update`"))?;
    eprintln!("hindsight: fetching {package}");
    let folder = cache.with_extension(format!("new.{}", std::process::id()));
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let fetched = unpack(package, &folder).and_then(|()| {
        if cache.exists() {
            fs::remove_dir_all(cache)?;
        }
        Ok(fs::rename(&folder, cache)?)
    });
    if fetched.is_err() {
        // Remove the incomplete folder; report the first error, not one of this removal.
        let _ = fs::remove_dir_all(&folder);
    }
    fetched
}

fn unpack(package: &str, folder: &Path) -> anyhow::Result<()> {
    output(
        Command::new("apt-get")
            .args(["download", package])
            .current_dir(folder),
    )?;
    let mut files = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let file = files
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .context("apt-get downloaded no package")?;
    output(Command::new("dpkg-deb").arg("-x").arg(&file).arg(folder))?;
    Ok(fs::remove_file(file)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_kernel_with_modules_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let (boot, modules) = (
            folder.path().join("boot"),
            folder.path().join("lib/modules"),
        );
        fs::create_dir_all(&boot).unwrap();
        for (version, has_modules) in [
            ("6.9.1-amd64", true),
            ("6.10.0-amd64", true),
            ("7.0", false),
        ] {
            fs::write(boot.join(format!("vmlinuz-{version}")), "").unwrap();
            if has_modules {
                fs::create_dir_all(modules.join(version).join("kernel")).unwrap();
            }
        }
        let expected = GuestKernel {
            image: boot.join("vmlinuz-6.10.0-amd64"),
            modules: modules.join("6.10.0-amd64"),
        };
        assert_eq!(newest_in(&boot, &modules), Some(expected.clone()));
        assert_eq!(newest_cached(folder.path()), Some(expected.clone()));
        assert_eq!(find(Some(&expected.image), None).unwrap(), expected);
    }

    #[test]
    fn modules_of_a_named_kernel_may_be_elsewhere() {
        let kernel = find(Some(Path::new("/x/bzImage")), Some(Path::new("/m"))).unwrap();
        assert_eq!(kernel.modules, Path::new("/m"));
        let kernel = find(Some(Path::new("/x/vmlinuz-1.2")), None).unwrap();
        assert_eq!(kernel.modules, Path::new("/lib/modules/1.2"));
    }
}
