//! A server of gdb's protocol, whose client the fuzzer is, with the machine of `gdb/examples/toy`: no
//! KVM is needed.

#[path = "../../gdb/examples/toy/toy/mod.rs"]
mod toy;

use std::io::{Read, Write, sink};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hindsight_gdb::{DebugTarget as _, GdbServer, ListenAddress};
use toy::ToyMachine;

/// How long the server may take for a reply.
const LIMIT: Duration = Duration::from_secs(10);

/// The machine, its server, and the thread that waits for the end of the machine.
pub struct Debuggee {
    socket: PathBuf,
    ended: Arc<AtomicBool>,
    machine: Arc<ToyMachine>,
    thread: Option<JoinHandle<()>>,
    server: Option<GdbServer>,
}

impl Debuggee {
    /// Starts a machine and its server.
    pub fn start() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "hindsight-fuzz-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::SeqCst)
        );
        let socket = std::env::temp_dir().join(name);
        let listener = ListenAddress::Unix(socket.clone())
            .listen(false)
            .expect("the name is free");
        let machine = Arc::new(ToyMachine::start().expect("a thread can be started"));
        let server = GdbServer::start(Box::new(machine.target()), listener, |_| {})
            .expect("a thread can be started");
        let ended = Arc::new(AtomicBool::new(false));
        let (waiter, thread_ended) = (machine.clone(), ended.clone());
        let thread = thread::spawn(move || {
            waiter.wait();
            thread_ended.store(true, Ordering::SeqCst);
        });
        Self {
            socket,
            ended,
            machine,
            thread: Some(thread),
            server: Some(server),
        }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).expect("the server listens");
        stream
            .set_read_timeout(Some(LIMIT))
            .expect("the limit is valid");
        stream
            .set_write_timeout(Some(LIMIT))
            .expect("the limit is valid");
        stream
    }

    /// Connects a client, which sends these bytes in two pieces and disconnects.
    pub fn talk(&self, bytes: &[u8]) {
        let mut stream = self.connect();
        let (first, second) = bytes.split_at(bytes.len() / 3);
        // The server closes the connection of a client that detaches.
        let _ = stream
            .write_all(first)
            .and_then(|()| stream.write_all(second));
        let _ = stream.shutdown(Shutdown::Write);
        let _ = std::io::copy(&mut stream.take(1 << 20), &mut sink());
    }

    /// Checks that the next client gets a reply, unless the machine has ended.
    pub fn check(&self) {
        for _ in 0..1000 {
            if self.ended.load(Ordering::SeqCst) {
                return;
            }
            let mut stream = self.connect();
            let mut reply = [0; 2];
            let sent = stream.write_all(b"$?#3f");
            if sent.and_then(|()| stream.read_exact(&mut reply)).is_ok() {
                assert_eq!(&reply, b"+$");
                return;
            }
            // The previous client has not disconnected yet, or the machine ends.
            thread::sleep(Duration::from_millis(1));
        }
        panic!("the server does not serve the next client");
    }
}

impl Drop for Debuggee {
    fn drop(&mut self) {
        self.server.take();
        self.machine.target().kill();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it only waits");
        }
    }
}
