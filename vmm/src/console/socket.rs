//! The console on a unix socket: one client at a time, which may disconnect and reconnect.

use std::net;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use rustix::event::PollFlags;

use crate::console::input::{InputThread, StopPipe, feed, read_some};
use crate::console::listening::ListeningSocket;
use crate::console::output::Outbox;
use crate::console::{ConsoleError, Deliver};
use crate::log_limit::LogLimit;

/// A console's listening socket.
#[derive(Debug)]
pub struct ConsoleSocket(ListeningSocket);

impl ConsoleSocket {
    /// Listens on `path`. A socket that a dead process left behind is replaced.
    pub fn listen(path: &Path) -> Result<Self, ConsoleError> {
        Ok(Self(ListeningSocket::listen(path)?))
    }

    /// Serves clients on a thread: each gets the contents of `outbox`, and `deliver` gets its bytes.
    pub fn serve(self, outbox: Arc<Outbox>, deliver: Deliver) -> Result<InputThread, ConsoleError> {
        InputThread::start(move |stop| {
            let listener = self.0.listener();
            while stop.wait(listener.as_fd(), PollFlags::IN, None).is_some() {
                static LIMIT: LogLimit = LogLimit::new();
                let path = self.0.path().display();
                match listener.accept() {
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
