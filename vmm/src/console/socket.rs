//! The console on a unix socket: one client at a time, which may disconnect and reconnect.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, net};

use rustix::event::PollFlags;

use crate::console::input::{InputThread, StopPipe, feed, read_some};
use crate::console::output::Outbox;
use crate::console::{ConsoleError, Deliver};
use crate::log_limit::LogLimit;

/// A listening socket; dropping it removes its path.
#[derive(Debug)]
pub struct ConsoleSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file, so that no other file is removed at the end.
    identity: (u64, u64),
}

impl ConsoleSocket {
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

    /// Serves clients on a thread: each gets the contents of `outbox`, and `deliver` gets its bytes.
    pub fn serve(self, outbox: Arc<Outbox>, deliver: Deliver) -> Result<InputThread, ConsoleError> {
        InputThread::start(move |stop| {
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

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        let now = fs::symlink_metadata(&self.path);
        if now.is_ok_and(|now| (now.dev(), now.ino()) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Serves one client until it hangs up or the thread must end. A client may shut down its sending side
/// and continue to read.
fn serve_client(stop: &StopPipe, client: UnixStream, outbox: &Outbox, deliver: &Deliver) {
    let Ok(output) = client.try_clone() else {
        return;
    };
    let target = Arc::new(OwnedFd::from(output));
    outbox.attach(Arc::clone(&target));
    let mut polled = PollFlags::IN;
    let mut buffer = [0; 1024];
    while let Some(events) = stop.wait(client.as_fd(), polled, None) {
        if events.contains(PollFlags::IN) {
            match read_some(client.as_fd(), &mut buffer) {
                Some(count) if feed(stop, client.as_fd(), deliver, &buffer[..count]) => {}
                Some(_) => break,
                None => polled = PollFlags::empty(),
            }
        } else if events.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            break;
        }
    }
    outbox.detach(&target);
    // Ends a write of the output thread that the client does not read.
    let _ = client.shutdown(net::Shutdown::Both);
}
