//! The stub's thread: waits for clients, for what they send, and for processors that stop.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::AsFd;

use crate::gdb::debugger::Debugger;
use crate::gdb::filter::{Next, Session};
use crate::gdb::listen::{Client, Listener};
use crate::gdb::stop;
use crate::sync::lock;
use crate::vcpu::board::Board;
use crate::vcpu::debug::stop::StopReason;

/// How the machine ended, for the client.
#[derive(Debug, Default)]
struct Ending {
    ended: AtomicBool,
    /// The exit status, if it ended by itself.
    status: Mutex<Option<u8>>,
}

/// A running stub.
#[derive(Debug)]
pub struct Server {
    thread: Option<JoinHandle<()>>,
    board: Arc<Board>,
    ending: Arc<Ending>,
}

impl Server {
    /// Serves debuggers that connect at `listener`, and lets the machine run, unless it is to `wait`
    /// for the first of them. From now on a processor whose guest cannot go on waits for one too.
    ///
    /// # Errors
    ///
    /// When the thread cannot be started.
    pub fn start(board: &Arc<Board>, listener: Listener, wait: bool) -> io::Result<Self> {
        board.run.stops.request();
        let ending = Arc::new(Ending::default());
        let (thread_board, thread_ending) = (board.clone(), ending.clone());
        let thread = thread::Builder::new()
            .name("gdb".to_owned())
            .spawn(move || {
                if !wait {
                    thread_board.resume();
                }
                let stub = Stub {
                    debugger: Debugger::new(thread_board.clone()),
                    board: thread_board,
                    listener,
                    client: None,
                    ending: thread_ending,
                };
                stub.run();
            })?;
        Ok(Self {
            thread: Some(thread),
            board: board.clone(),
            ending,
        })
    }

    /// Tells the client that the machine has ended (with the status, if by itself), and ends the
    /// stub.
    pub fn finish(mut self, status: Option<u8>) {
        *lock(&self.ending.status) = status;
        self.end();
    }

    fn end(&mut self) {
        self.ending.ended.store(true, Ordering::SeqCst);
        self.board.run.stops.signal();
        if let Some(thread) = self.thread.take() {
            // A panic in there was printed.
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

struct Stub {
    board: Arc<Board>,
    listener: Listener,
    debugger: Debugger,
    client: Option<(Client, Session)>,
    ending: Arc<Ending>,
}

impl Stub {
    fn run(mut self) {
        while !self.ending.ended.load(Ordering::SeqCst) {
            let Ok((listener, reports, client)) = self.wait() else {
                return;
            };
            if reports {
                self.reported();
            }
            if client {
                self.receive();
            }
            if listener {
                self.accept();
            }
        }
        let status = *lock(&self.ending.status);
        if let Some((mut client, mut session)) = self.client.take() {
            session.ended(status);
            send(&mut client, &session.take_output());
        }
    }

    /// Waits until the listener, the reports or the client has something.
    fn wait(&self) -> io::Result<(bool, bool, bool)> {
        let listener = self.listener.as_fd();
        let reports = self.board.run.stops.as_fd();
        let mut fds = vec![
            PollFd::from_borrowed_fd(listener, PollFlags::IN),
            PollFd::from_borrowed_fd(reports, PollFlags::IN),
        ];
        if let Some((client, _)) = &self.client {
            fds.push(PollFd::from_borrowed_fd(client.as_fd(), PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = |i: usize| fds.get(i).is_some_and(|fd| !fd.revents().is_empty());
        Ok((ready(0), ready(1), ready(2)))
    }

    fn accept(&mut self) {
        let Some(client) = self.listener.accept() else {
            return;
        };
        if self.client.as_ref().is_some_and(|(old, _)| hung_up(old)) {
            self.lose();
        }
        if self.client.is_some() {
            // One at a time: the second sees its connection closed at once.
            tracing::debug!(target: "gdb", "a second client was turned away");
            return;
        }
        if !self.debugger.is_paused() && self.debugger.interrupt().is_err() {
            return;
        }
        tracing::debug!(target: "gdb", "client connected");
        self.client = Some((client, Session::new()));
    }

    /// Processors stopped.
    fn reported(&mut self) {
        let Ok(Some(reason)) = self.debugger.collect() else {
            return;
        };
        match &mut self.client {
            None if matches!(reason.stop, Some(StopReason::End(_))) => {
                // Nobody wants to go back. A machine that has ended meanwhile needs nothing.
                let _ = self.debugger.resume();
            }
            Some((client, session)) => {
                session.stopped(&mut self.debugger, &reason);
                send(client, &session.take_output());
            }
            None => {
                if let (Some(remark), Some(address)) = (
                    stop::remark(&mut self.debugger, &reason),
                    self.listener.address(),
                ) {
                    let _ = writeln!(
                        io::stderr(),
                        "{}hindsight: it waits for a debugger at {address}",
                        remark
                    );
                }
            }
        }
    }

    fn receive(&mut self) {
        let Some((client, session)) = &mut self.client else {
            return;
        };
        let mut buffer = [0; 0x4000];
        let next = match client.read(&mut buffer) {
            Ok(0) => Next::Detached,
            Ok(len) => session.receive(&mut self.debugger, &buffer[..len]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Next::Stay,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Next::Stay,
            Err(_) => Next::Detached,
        };
        let sent = send(client, &session.take_output());
        if next == Next::Killed {
            self.debugger.kill();
        }
        if next == Next::Detached || !sent {
            self.lose();
        }
    }

    /// The client has gone.
    fn lose(&mut self) {
        tracing::debug!(target: "gdb", "client gone");
        self.client = None;
        self.debugger.detach();
    }
}

/// The client has closed its end, whatever there still is to read.
fn hung_up(client: &Client) -> bool {
    const NOW: rustix::event::Timespec = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    let mut fds = [PollFd::from_borrowed_fd(client.as_fd(), gone)];
    poll(&mut fds, Some(&NOW)).is_ok_and(|ready| ready != 0)
}

/// Sends all of `bytes`, waiting for the client to take them; `false` if it is gone.
fn send(client: &mut Client, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match client.write(bytes) {
            Ok(0) => return false,
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !wait_writable(client) {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
    true
}

/// A client that takes nothing for so long is gone.
const SEND_LIMIT: rustix::event::Timespec = rustix::event::Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

fn wait_writable(client: &Client) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(client.as_fd(), PollFlags::OUT)];
    match poll(&mut fds, Some(&SEND_LIMIT)) {
        Ok(ready) => ready != 0,
        Err(error) => error == rustix::io::Errno::INTR,
    }
}
