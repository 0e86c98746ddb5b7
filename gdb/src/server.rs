//! The server's thread: it waits for clients, for what they send, and for vCPUs that stop.

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;

use crate::cancel::CancelFlag;
use crate::debugger::{DebugStop, Debugger};
use crate::listen::{ClientStream, Listener};
use crate::session::{ClientSession, SessionStatus};
use crate::stop_reply;
use crate::target::{DebugTarget, Notifier, StopCause};

/// Reports the end of the machine to the server's thread.
#[derive(Debug)]
struct MachineEnd {
    /// Set before `notifier` is notified.
    ended: CancelFlag,
    /// The exit status, if the machine ended by itself.
    status: Mutex<Option<u8>>,
    notifier: Notifier,
}

/// A server that runs in a thread of its own.
#[derive(Debug)]
pub struct GdbServer {
    thread: Option<JoinHandle<()>>,
    end: Arc<MachineEnd>,
}

impl GdbServer {
    /// Serves the debuggers that connect at `listener`, one at a time. The machine may be paused or
    /// running: it runs from the time when a client resumes it or detaches.
    ///
    /// A stop while no client is connected leaves the machine paused. `report` is then called, by
    /// the server's thread, with a message for the user.
    ///
    /// # Errors
    ///
    /// When the host has no more threads or file descriptors.
    pub fn start(
        target: Box<dyn DebugTarget>,
        listener: Listener,
        report: impl FnMut(&str) + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_with(target, listener, report, || {})
    }

    /// As [`GdbServer::start`]; the server's thread calls `begin` before anything else.
    ///
    /// # Errors
    ///
    /// As [`GdbServer::start`].
    pub fn start_with(
        target: Box<dyn DebugTarget>,
        listener: Listener,
        report: impl FnMut(&str) + Send + 'static,
        begin: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let end = Arc::new(MachineEnd {
            ended: CancelFlag::default(),
            status: Mutex::default(),
            notifier: Notifier::new()?,
        });
        let thread_end = end.clone();
        let thread = thread::Builder::new()
            .name("gdb".to_owned())
            .spawn(move || {
                begin();
                let mut debugger = Debugger::new(target);
                debugger.cancel = thread_end.ended.clone();
                let server = ServerThread {
                    waits: debugger.target().starts_paused(),
                    debugger,
                    listener,
                    client: None,
                    paused_before: None,
                    held: false,
                    end: thread_end,
                    report: Box::new(report),
                };
                server.run();
            })?;
        Ok(Self {
            thread: Some(thread),
            end,
        })
    }

    /// Reports to the client that the machine has ended, with its exit status or as killed, and
    /// ends the server.
    pub fn finish(mut self, status: Option<u8>) {
        *self
            .end
            .status
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = status;
        self.join();
    }

    fn join(&mut self) {
        self.end.ended.set();
        self.end.notifier.notify();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has printed its message.
            let _ = thread.join();
        }
    }
}

impl Drop for GdbServer {
    fn drop(&mut self) {
        self.join();
    }
}

struct ServerThread {
    debugger: Debugger,
    listener: Listener,
    client: Option<(ClientStream, ClientSession)>,
    /// Whether the machine is paused since its start, and no client has sent anything yet.
    waits: bool,
    /// Whether the machine was paused when the client connected; `None` once it has sent a byte.
    paused_before: Option<bool>,
    /// Whether it was reported to the machine that a client holds it paused.
    held: bool,
    end: Arc<MachineEnd>,
    report: Box<dyn FnMut(&str) + Send>,
}

/// The sources of events that the server's thread must serve now.
#[derive(Clone, Copy, Debug, Default)]
struct ReadyEvents {
    listener: bool,
    stops: bool,
    client: bool,
}

const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

impl ServerThread {
    fn run(mut self) {
        while !self.end.ended.is_set() {
            let Ok(ready) = self.wait() else {
                return;
            };
            if ready.stops {
                self.handle_stops();
            }
            if ready.client {
                self.receive();
            }
            if ready.listener {
                self.accept();
            }
            self.report_hold();
        }
        let status = self.end.status.lock();
        let status = *status.unwrap_or_else(PoisonError::into_inner);
        if let Some((mut client, mut session)) = self.client.take() {
            session.report_end(status);
            send(&mut client, &session.take_output(), &self.end);
        }
    }

    /// Reports to the machine that a client begins to hold it paused, or ends that.
    fn report_hold(&mut self) {
        let held = self.client.is_some() && self.debugger.is_paused();
        if self.held != held {
            self.held = held;
            self.debugger.target().set_held(held);
        }
    }

    /// Waits for the listener, the machine or the client.
    fn wait(&self) -> io::Result<ReadyEvents> {
        let stop_event = self.debugger.stop_event();
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(stop_event, PollFlags::IN),
            PollFd::from_borrowed_fd(self.end.notifier.as_fd(), PollFlags::IN),
        ];
        if let Some((client, _)) = &self.client {
            fds.push(PollFd::from_borrowed_fd(client.as_fd(), PollFlags::IN));
        }
        let pending = self.debugger.has_pending_stop();
        match poll(&mut fds, pending.then_some(&NOW)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = |i: usize| fds.get(i).is_some_and(|fd| !fd.revents().is_empty());
        Ok(ReadyEvents {
            listener: ready(0),
            stops: ready(1) || pending,
            client: ready(3),
        })
    }

    fn accept(&mut self) {
        let Some(client) = self.listener.accept() else {
            return;
        };
        if self.client.as_ref().is_some_and(|(old, _)| hung_up(old)) {
            self.disconnect();
        }
        if self.client.is_some() {
            // The second client sees its connection closed at once.
            tracing::debug!(target: "gdb", "refused a second client");
            return;
        }
        let paused = self.waits || self.debugger.is_paused();
        if !self.debugger.is_paused() && self.debugger.interrupt().is_err() {
            return;
        }
        tracing::debug!(target: "gdb", "client connected");
        self.client = Some((client, ClientSession::new()));
        self.paused_before = Some(paused);
    }

    /// Handles stops of vCPUs.
    fn handle_stops(&mut self) {
        let Ok(Some(stop)) = self.debugger.collect() else {
            return;
        };
        match &mut self.client {
            Some((client, session)) => {
                session.report_stop(&mut self.debugger, &stop);
                send(client, &session.take_output(), &self.end);
            }
            // No client can reverse from the end any more. The machine may have ended meanwhile.
            None if matches!(stop.cause, Some(StopCause::RunEnd(_))) => {
                let _ = self.debugger.resume();
            }
            None => self.report_unattended(&stop),
        }
    }

    fn report_unattended(&mut self, stop: &DebugStop) {
        let message = stop_reply::message(&mut self.debugger, stop);
        if let Some((message, address)) = message.zip(self.listener.address()) {
            let name = self.debugger.target().name();
            let message = format!("{message}{name}: it waits for a debugger at {address}\n");
            (self.report)(&message);
        }
    }

    fn receive(&mut self) {
        let Some((client, session)) = &mut self.client else {
            return;
        };
        let mut buffer = [0; 0x4000];
        let mut rest = match client.read(&mut buffer) {
            Ok(0) => return self.disconnect(),
            Ok(len) => &buffer[..len],
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return,
                _ => return self.disconnect(),
            },
        };
        if let Some(paused) = self.paused_before.take()
            && is_http_request(rest)
        {
            tracing::warn!(target: "gdb", "refused a client that sent an HTTP request");
            self.client = None;
            if !paused {
                self.debugger.detach();
            }
            return;
        }
        self.waits = false;
        let (mut status, mut sent) = (SessionStatus::Open, true);
        while !rest.is_empty() && status == SessionStatus::Open && sent {
            let (count, now) = session.receive_some(&mut self.debugger, rest);
            (rest, status) = (&rest[count..], now);
            sent = send(client, &session.take_output(), &self.end);
        }
        if status == SessionStatus::Killed {
            self.debugger.kill();
        }
        if status == SessionStatus::Detached || !sent {
            self.disconnect();
        }
    }

    /// Closes the connection and removes everything that the client has set.
    fn disconnect(&mut self) {
        tracing::debug!(target: "gdb", "client disconnected");
        let killed = self
            .client
            .take()
            .is_some_and(|(_, session)| session.has_killed());
        if killed {
            self.debugger.kill();
        }
        self.debugger.detach();
    }
}

/// Whether the client has closed its end, even if there is something left to read.
fn hung_up(client: &ClientStream) -> bool {
    let closed = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    let mut fds = [PollFd::from_borrowed_fd(client.as_fd(), closed)];
    poll(&mut fds, Some(&NOW)).is_ok_and(|ready| ready != 0)
}

/// Whether the first bytes of a client are an HTTP request: a method's name and a blank.
///
/// Web pages can have a browser send requests to any port.
fn is_http_request(bytes: &[u8]) -> bool {
    let method = bytes.split(|&byte| byte == b' ').next().unwrap_or(bytes);
    method.len() < bytes.len()
        && (3..=7).contains(&method.len())
        && method.iter().all(u8::is_ascii_uppercase)
}

/// A client that accepts no byte for this time counts as disconnected.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// How long a client may take to accept the last output, after the machine has ended.
const LAST_SEND_LIMIT: Duration = Duration::from_millis(500);

/// Sends all of `bytes`, and waits while the client is busy.
///
/// Returns `false` if the client has disconnected, or if the machine has ended and the client is
/// slow.
fn send(client: &mut ClientStream, mut bytes: &[u8], end: &MachineEnd) -> bool {
    let mut deadline = None;
    while !bytes.is_empty() {
        if end.ended.is_set() {
            let limit = *deadline.get_or_insert_with(|| Instant::now() + LAST_SEND_LIMIT);
            if Instant::now() >= limit {
                return false;
            }
        }
        match client.write(bytes) {
            Ok(0) => return false,
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !wait_writable(client, end, deadline) {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
    true
}

/// Waits until the client accepts bytes, or until the machine ends.
///
/// Returns `false` if neither happens in time. `deadline` is for a machine that has ended.
fn wait_writable(client: &ClientStream, end: &MachineEnd, deadline: Option<Instant>) -> bool {
    let mut fds = vec![PollFd::from_borrowed_fd(client.as_fd(), PollFlags::OUT)];
    let limit = match deadline {
        Some(deadline) => deadline.saturating_duration_since(Instant::now()),
        None => {
            fds.push(PollFd::from_borrowed_fd(
                end.notifier.as_fd(),
                PollFlags::IN,
            ));
            SEND_LIMIT
        }
    };
    let limit = Timespec::try_from(limit).unwrap_or(NOW);
    match poll(&mut fds, Some(&limit)) {
        Ok(ready) => ready != 0,
        Err(error) => error == rustix::io::Errno::INTR,
    }
}
