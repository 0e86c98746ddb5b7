//! Listening unix sockets.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use super::ConsoleError;

/// A listening socket, whose calls do not block; dropping it removes its path.
#[derive(Debug)]
pub struct ListeningSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file, so that no other file is removed at the end.
    identity: (u64, u64),
}

impl ListeningSocket {
    /// Listens on `path`. A socket that a dead process left behind is replaced.
    ///
    /// # Errors
    ///
    /// The path is in use, or no socket can be created there.
    pub fn listen(path: &Path) -> Result<Self, ConsoleError> {
        let failed = |source| ConsoleError::Listen {
            path: path.to_owned(),
            source,
        };
        let in_use = |reason| ConsoleError::PathInUse {
            path: path.to_owned(),
            reason,
        };
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(in_use(
                    "it is not a socket; remove it or choose another path",
                ));
            }
            Ok(_) => match UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path).map_err(failed)?;
                }
                _ => {
                    return Err(in_use(
                        "another process is listening there; choose another path",
                    ));
                }
            },
            Err(_) => {}
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        let created = fs::symlink_metadata(path).map_err(failed)?;
        let socket = Self {
            listener,
            path: path.to_owned(),
            identity: (created.dev(), created.ino()),
        };
        socket.listener.set_nonblocking(true).map_err(failed)?;
        Ok(socket)
    }

    /// The socket.
    pub const fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        let now = fs::symlink_metadata(&self.path);
        if now.is_ok_and(|now| (now.dev(), now.ino()) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}
