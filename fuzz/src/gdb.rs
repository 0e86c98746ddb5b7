//! A machine with a gdb stub, whose client the fuzzer is.

use std::io::{Read, Write, sink};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hindsight_cpu::cpuid::CpuModel;
use hindsight_vmm::boot::{LoadRequest, Protocol};
use hindsight_vmm::gdb::{Address, Server};
use hindsight_vmm::machine::{Machine, MachineConfig};
use hindsight_vmm::platform::Sinks;
use hindsight_vmm::vcpu::engine::policy::Engine;

/// `1: incl (%ebx); jmp 1b`, in 32-bit code.
const CODE: &[u8] = &[0xff, 0x03, 0xeb, 0xfc];

/// How long the stub may take for an answer.
const LIMIT: Duration = Duration::from_secs(10);

/// The machine, its stub, and the thread that runs it.
pub struct Debuggee {
    socket: PathBuf,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    server: Option<Server>,
}

impl Debuggee {
    /// Starts a machine that counts for ever.
    pub fn start() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "hindsight-fuzz-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::SeqCst)
        );
        let socket = std::env::temp_dir().join(name);
        let request = LoadRequest {
            image: CODE,
            protocol: Some(Protocol::Flat),
            ..LoadRequest::default()
        };
        let config = MachineConfig {
            memory: 4 << 20,
            huge_pages: false,
            cpus: 1,
            cpu: CpuModel::PortableV1.into(),
            engine: Engine::Interp,
        };
        let sinks = Sinks {
            serial: Box::new(sink()),
            debugcon: Box::new(sink()),
            btm: None,
        };
        let mut machine =
            Machine::new(None, &config, &request, sinks).expect("the machine is valid");
        let listener = Address::Unix(socket.clone())
            .listen(false)
            .expect("the name is free");
        machine.start_paused();
        let server =
            Server::start(machine.board(), listener, true).expect("a thread can be started");
        let ended = Arc::new(AtomicBool::new(false));
        let thread_ended = ended.clone();
        let thread = thread::spawn(move || {
            machine.run(None, || {}).expect("threads can be started");
            thread_ended.store(true, Ordering::SeqCst);
        });
        Self {
            socket,
            ended,
            thread: Some(thread),
            server: Some(server),
        }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).expect("the stub listens");
        stream
            .set_read_timeout(Some(LIMIT))
            .expect("the limit is valid");
        stream
            .set_write_timeout(Some(LIMIT))
            .expect("the limit is valid");
        stream
    }

    /// One client, which sends these bytes in two pieces and goes.
    pub fn talk(&self, bytes: &[u8]) {
        let mut stream = self.connect();
        let (first, second) = bytes.split_at(bytes.len() / 3);
        // The stub may have closed the connection: a client can detach.
        let _ = stream
            .write_all(first)
            .and_then(|()| stream.write_all(second));
        let _ = stream.shutdown(Shutdown::Write);
        let _ = std::io::copy(&mut stream.take(1 << 20), &mut sink());
    }

    /// The next client gets an answer. `false`: the machine has ended.
    pub fn serves(&self) -> bool {
        for _ in 0..1000 {
            if self.ended.load(Ordering::SeqCst) {
                return false;
            }
            let mut stream = self.connect();
            let mut answer = [0; 2];
            let asked = stream.write_all(b"$?#3f");
            if asked.and_then(|()| stream.read_exact(&mut answer)).is_ok() {
                assert_eq!(&answer, b"+$");
                return true;
            }
            // The client before is not gone yet, or the machine ends.
            thread::sleep(Duration::from_millis(1));
        }
        panic!("the stub does not serve the next client");
    }
}

impl Drop for Debuggee {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic came before");
        }
        self.server.take();
    }
}
