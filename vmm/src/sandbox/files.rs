//! Confines a process to the files that it has opened, by Landlock.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use super::SandboxError;

/// The files that a confined process may access without having opened them.
#[derive(Clone, Debug, Default)]
pub struct FileAccess {
    /// Sockets, which are removed at the end of the run.
    pub sockets: Vec<PathBuf>,
    /// Shared folders, and whether their files may be changed.
    pub folders: Vec<(PathBuf, bool)>,
}

/// The version of Landlock that is requested. An older kernel enforces the part that it supports.
const VERSION: ABI = ABI::V6;

/// Denies this thread and the threads that it starts all access to files and networks, except by
/// open descriptors and to the files of `access`.
///
/// # Errors
///
/// The kernel has no Landlock, or refuses the rules.
pub fn confine_files(access: &FileAccess) -> Result<(), SandboxError> {
    let refused = |error| SandboxError::Landlock(Box::new(error));
    let status = restrict(access).map_err(refused)?;
    match status {
        RulesetStatus::NotEnforced => Err(SandboxError::NoLandlock),
        RulesetStatus::PartiallyEnforced => {
            tracing::info!("this kernel's Landlock is older than the rules, which hold in part");
            Ok(())
        }
        RulesetStatus::FullyEnforced => Ok(()),
    }
}

fn restrict(access: &FileAccess) -> Result<RulesetStatus, RulesetError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(VERSION))?
        .handle_access(AccessNet::from_all(VERSION))?
        .scope(Scope::AbstractUnixSocket)?
        .create()?;
    let removal: BitFlags<AccessFs> = AccessFs::RemoveFile.into();
    for socket in &access.sockets {
        // A folder that is gone needs no rule.
        if let Ok(folder) = PathFd::new(folder(socket)) {
            rules = rules.add_rule(PathBeneath::new(folder, removal))?;
        }
    }
    for (path, writable) in &access.folders {
        let mut allowed = if *writable {
            AccessFs::from_all(VERSION)
        } else {
            AccessFs::from_read(VERSION)
        };
        allowed.remove(AccessFs::Execute);
        if let Ok(folder) = PathFd::new(path) {
            rules = rules.add_rule(PathBeneath::new(folder, allowed))?;
        }
    }
    Ok(rules.restrict_self()?.ruleset)
}

/// The folder that holds `path`.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{ErrorKind, Write};
    use std::net::TcpListener;
    use std::process::Command;
    use std::thread;

    use super::*;

    #[test]
    fn confined_thread_has_shared_folders() {
        let (read, written) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(read.path().join("file"), "data").unwrap();
        let access = FileAccess {
            sockets: Vec::new(),
            folders: vec![
                (read.path().to_owned(), false),
                (written.path().to_owned(), true),
            ],
        };
        let (read, written) = (read.path().to_owned(), written.path().to_owned());
        let thread = thread::spawn(move || {
            if let Err(error) = confine_files(&access) {
                eprintln!("skipped: {error}");
                return;
            }
            assert_eq!(fs::read(read.join("file")).unwrap(), b"data");
            assert!(fs::write(read.join("file"), "new").is_err());
            fs::write(written.join("file"), "new").unwrap();
            fs::create_dir(written.join("sub")).unwrap();
            fs::rename(written.join("file"), written.join("sub/file")).unwrap();
            assert!(File::open("/etc/hostname").is_err());
        });
        thread.join().unwrap();
    }

    #[test]
    fn confined_thread_has_its_open_files_and_may_remove_its_sockets() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("output");
        let socket = folder.path().join("socket");
        fs::write(&socket, "").unwrap();
        let mut file = File::create(&path).unwrap();
        let access = FileAccess {
            sockets: vec![socket.clone()],
            folders: Vec::new(),
        };
        let thread = thread::spawn(move || {
            if let Err(error) = confine_files(&access) {
                eprintln!("skipped: {error}");
                return;
            }
            file.write_all(b"still open").unwrap();
            let denied = |error: std::io::Error| {
                assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
            };
            denied(File::open(&path).unwrap_err());
            denied(File::create(path.with_extension("new")).unwrap_err());
            denied(fs::read_dir("/").unwrap_err());
            denied(fs::rename(&path, path.with_extension("moved")).unwrap_err());
            denied(Command::new("/bin/true").spawn().unwrap_err());
            denied(TcpListener::bind("127.0.0.1:0").unwrap_err());
            fs::remove_file(&socket).unwrap();
        });
        thread.join().unwrap();
    }
}
