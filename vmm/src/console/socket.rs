//! The console on a unix socket: one client at a time, who may leave and come back.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, net};

use rustix::event::PollFlags;

use crate::console::input::{Reader, Stop, feed, read_some};
use crate::console::output::Outbox;
use crate::console::{ConsoleError, Deliver};
use crate::log_limit::LogLimit;

/// A listening socket; dropping it removes its path.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode: what is removed at the end must be ours.
    identity: (u64, u64),
}

impl Socket {
    /// Listens on `path`. A socket that a dead process left behind is replaced.
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
                return Err(in_use("a file of another kind is there"));
            }
            Ok(_) => match UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path).map_err(failed)?;
                }
                _ => return Err(in_use("another process is listening there")),
            },
            Err(_) => {}
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        let made = fs::symlink_metadata(path).map_err(failed)?;
        let socket = Self {
            listener,
            path: path.to_owned(),
            identity: (made.dev(), made.ino()),
        };
        socket.listener.set_nonblocking(true).map_err(failed)?;
        Ok(socket)
    }

    /// Serves clients on a thread: `outbox` goes to the client there is, its bytes go to `deliver`.
    pub fn serve(self, outbox: Arc<Outbox>, deliver: Deliver) -> Result<Reader, ConsoleError> {
        Reader::start(move |stop| {
            while stop
                .wait(self.listener.as_fd(), PollFlags::IN, None)
                .is_some()
            {
                static LIMIT: LogLimit = LogLimit::new();
                let path = self.path.display();
                match self.listener.accept() {
                    Ok((client, _)) => {
                        tracing::debug!("client connected to console socket {path}");
                        serve_client(&stop, client, &outbox, &deliver);
                        tracing::debug!("client disconnected from console socket {path}");
                    }
                    // The client may have closed already.
                    Err(error) => {
                        if let Some(suppressed) = LIMIT.admit() {
                            tracing::warn!(
                                "a client of console socket {path} is lost: {error}{suppressed}"
                            );
                        }
                    }
                }
            }
        })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let now = fs::symlink_metadata(&self.path);
        if now.is_ok_and(|now| (now.dev(), now.ino()) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Serves one client until it hangs up or the thread must end. The client may stop sending and
/// still read.
fn serve_client(stop: &Stop, client: UnixStream, outbox: &Outbox, deliver: &Deliver) {
    let Ok(output) = client.try_clone() else {
        return;
    };
    let target = Arc::new(OwnedFd::from(output));
    outbox.attach(Arc::clone(&target));
    let mut wanted = PollFlags::IN;
    let mut buffer = [0; 1024];
    while let Some(shown) = stop.wait(client.as_fd(), wanted, None) {
        if shown.contains(PollFlags::IN) {
            match read_some(client.as_fd(), &mut buffer) {
                Some(count) if feed(stop, client.as_fd(), deliver, &buffer[..count]) => {}
                Some(_) => break,
                None => wanted = PollFlags::empty(),
            }
        } else if shown.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            break;
        }
    }
    outbox.detach(&target);
    // The output thread may be inside a write that the client does not read.
    let _ = client.shutdown(net::Shutdown::Both);
}
