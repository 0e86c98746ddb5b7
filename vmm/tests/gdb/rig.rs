//! Builds a guest, runs it and debugs it.

use std::env;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The time limit of each wait, in seconds. The machine may be busy, and a lab's is slow.
fn limit() -> u64 {
    setting("HINDSIGHT_TEST_SECONDS", "120").parse().unwrap()
}

/// The value of an environment variable, or a default.
fn setting(name: &str, default: &str) -> String {
    env::var(name).unwrap_or_else(|_| default.to_owned())
}

/// The program under test.
pub fn hindsight() -> Command {
    Command::new(setting(
        "HINDSIGHT_TEST_PROGRAM",
        env!("CARGO_BIN_EXE_hindsight"),
    ))
}

/// A guest of these tests, or the sample guest.
#[derive(Clone, Debug)]
pub enum Guest {
    /// An assembler file of `guests/`, entered in 64-bit mode.
    Long(&'static str),
    /// The same, entered in real mode at 0x7c00.
    Real(&'static str),
    /// `resources/guests/debuggee`.
    Sample,
    /// An image that exists.
    Image(PathBuf),
}

/// A guest that runs, or waits for gdb.
#[derive(Debug)]
pub struct Run {
    dir: TempDir,
    /// The guest's ELF file.
    symbols: Option<PathBuf>,
    /// The guest is entered in real mode.
    real: bool,
    child: Child,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn tool(name: &str, arguments: &[&str]) {
    let output = Command::new(name).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(
        output.status.success(),
        "{name}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A guest's files, built here or, in a lab, taken from `$HINDSIGHT_TEST_GUESTS`.
fn files(name: &str, dir: &Path) -> PathBuf {
    if let Some(built) = env::var_os("HINDSIGHT_TEST_GUESTS") {
        return PathBuf::from(built).join(name);
    }
    let build = repository().join("vmm/tests/gdb/guests/build");
    tool(build.to_str().unwrap(), &[name, dir.to_str().unwrap()]);
    dir.join(name)
}

impl Run {
    /// Starts a guest that waits for gdb.
    pub fn waiting(guest: Guest, more: &[&str]) -> Self {
        let mut arguments = vec!["--gdb-wait"];
        arguments.extend(more);
        Self::start(guest, &arguments)
    }

    /// Starts a guest.
    pub fn start(guest: Guest, more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("gdb");
        let mut command = hindsight();
        let limit = match guest {
            Guest::Image(_) => 900,
            _ => limit(),
        };
        command.arg("run");
        if !more.contains(&"--timeout") {
            command.args(["--timeout", &limit.to_string()]);
        }
        let names_engine = |argument: &&str| {
            argument.starts_with("--engine=") || argument.starts_with("--switch-every=")
        };
        if !more.iter().any(names_engine) {
            command.args(["--engine", &setting("HINDSIGHT_TEST_ENGINE", "interp")]);
        }
        command.args(["--gdb", &format!("unix:{}", socket.display())]);
        let real = matches!(guest, Guest::Real(_));
        let built = match guest {
            Guest::Long(name) | Guest::Real(name) => Some(files(name, dir.path())),
            Guest::Sample => Some(files("sample", dir.path())),
            Guest::Image(path) => {
                command.arg(path);
                None
            }
        };
        let symbols = built.map(|built| built.with_extension("elf"));
        if let Some(elf) = &symbols {
            let flat = ["--protocol=flat", "--mode=real", "--load-address=0x7c00"];
            if real {
                command.args(flat).arg(elf.with_extension("bin"));
            } else {
                command.args(["--protocol", "elf"]).arg(elf);
            }
        }
        let stderr = fs::File::create(dir.path().join("stderr")).unwrap();
        let child = command
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let run = Self {
            dir,
            symbols,
            real,
            child,
        };
        run.wait_for("the socket", || run.stderr().contains("may connect"));
        run
    }

    /// Waits until `done` returns true; `awaited` names that in the message of a failure.
    pub fn wait_for(&self, awaited: &str, done: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(limit());
        while !done() {
            assert!(Instant::now() < end, "{awaited}: {}", self.stderr());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// What the monitor has printed to stderr.
    pub fn stderr(&self) -> String {
        fs::read_to_string(self.dir.path().join("stderr")).unwrap_or_default()
    }

    /// Connects a client that sends single packets.
    pub fn connect(&self) -> Client {
        let stream = UnixStream::connect(self.dir.path().join("gdb")).unwrap();
        let limit = Duration::from_secs(limit());
        stream.set_read_timeout(Some(limit)).unwrap();
        Client(stream)
    }

    /// The socket of the server.
    pub fn socket(&self) -> PathBuf {
        self.folder().join("gdb")
    }

    /// The folder of the run's files.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// The guest's ELF file, if it has one.
    pub fn symbols(&self) -> Option<&Path> {
        self.symbols.as_deref()
    }

    /// Starts gdb with a script, connected to the guest.
    pub fn spawn_gdb(&self, script: &str) -> Gdb {
        self.spawn("remote", script)
    }

    fn spawn(&self, protocol: &str, script: &str) -> Gdb {
        let socket = self.dir.path().join("gdb");
        let head = format!(
            "set pagination off\nset confirm off\nset width 0\nset style enabled off\n\
             set remotetimeout 60\ntarget {protocol} {}\n",
            socket.display()
        );
        let mut command = Command::new("gdb");
        command.args(["-nx", "-batch"]);
        // The file of a guest that starts in real mode must not decide the architecture for gdb.
        let symbols = self.symbols.iter().filter(|_| self.real);
        let symbols = symbols.map(|elf| format!("add-symbol-file {}", elf.display()));
        let symbols: Vec<String> = symbols.collect();
        // One option for each command: an error would end a script.
        for line in head
            .lines()
            .chain(symbols.iter().map(String::as_str))
            .chain(script.lines().map(str::trim))
        {
            command.args(["-ex", line]);
        }
        command.args(self.symbols.iter().filter(|_| !self.real));
        let output = self.dir.path().join("output");
        let file = fs::File::create(&output).unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn();
        let child = child.expect("gdb is needed: apt-get install gdb");
        Gdb { child, output }
    }

    /// Runs a script of gdb commands, connected to the guest, and returns what gdb printed.
    pub fn gdb(&self, script: &str) -> String {
        self.spawn_gdb(script).wait()
    }

    /// The same with `target extended-remote`, which can start the guest again.
    pub fn extended_gdb(&self, script: &str) -> String {
        self.spawn("extended-remote", script).wait()
    }

    /// Runs a script of lldb commands, connected to the guest, and returns what lldb printed.
    pub fn lldb(&self, script: &str) -> String {
        let socket = self.dir.path().join("gdb");
        let connect = format!(
            "process connect --plugin gdb-remote unix-connect://{}",
            socket.display()
        );
        let mut command = Command::new("lldb");
        command.args(["--no-lldbinit", "--no-use-colors", "--batch"]);
        // The machine may be busy.
        let patient = "settings set plugin.process.gdb-remote.packet-timeout 60";
        for line in [patient, &*connect]
            .into_iter()
            .chain(script.lines().map(str::trim))
        {
            command.args(["--one-line", line]);
        }
        let output = command.args(&self.symbols).stdin(Stdio::null()).output();
        let output = output.expect("lldb is needed: apt-get install lldb");
        let text = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Waits for the end of the monitor: its exit status and the guest's output.
    pub fn finish(mut self) -> (Option<i32>, String) {
        let mut text = String::new();
        self.child
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        (self.child.wait().unwrap().code(), text)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("monitor: {}", self.stderr());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A gdb process.
#[derive(Debug)]
pub struct Gdb {
    child: Child,
    output: PathBuf,
}

impl Gdb {
    /// Sends the signal of Ctrl-C.
    pub fn interrupt(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    }

    /// Waits for the end of gdb, and returns its output.
    pub fn wait(mut self) -> String {
        self.child.wait().unwrap();
        self.text()
    }

    /// Returns the output of gdb so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap_or_default()).into_owned()
    }
}

/// A client that sends packets one by one.
#[derive(Debug)]
pub struct Client(UnixStream);

impl Client {
    /// Sends bytes unchanged; the server may have closed the connection.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    /// Sends a packet and returns the body of the reply.
    pub fn ask(&mut self, body: &str) -> String {
        self.packet(body.as_bytes());
        self.answer()
    }

    /// Sends a packet.
    pub fn packet(&mut self, body: &[u8]) {
        let sum = body.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        let mut packet = vec![b'$'];
        packet.extend_from_slice(body);
        packet.extend(format!("#{sum:02x}").bytes());
        self.send(&packet);
    }

    /// Receives the next packet, acknowledges it and returns its body.
    pub fn answer(&mut self) -> String {
        self.try_answer().expect("an answer")
    }

    /// Like [`Client::answer`]; `None` if the server closes the connection.
    pub fn try_answer(&mut self) -> Option<String> {
        let mut body = Vec::new();
        let mut byte = [0];
        let mut inside = false;
        loop {
            self.0.read_exact(&mut byte).ok()?;
            match (inside, byte[0]) {
                (false, b'$') => inside = true,
                (true, b'#') => break,
                (true, byte) => body.push(byte),
                (false, _) => {}
            }
        }
        self.0.read_exact(&mut [0; 2]).ok()?;
        self.send(b"+");
        Some(String::from_utf8_lossy(&body).into_owned())
    }

    /// Everything that arrives until the server closes the connection.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        let _ = self.0.read_to_end(&mut rest);
        rest
    }
}

impl Drop for Client {
    /// Disconnects even while a child of another test's thread holds a copy of the socket.
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Checks that `text` contains the parts in this order.
#[track_caller]
pub fn in_order(text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => panic!("no {part:?} in its order in:\n{text}"),
        }
    }
}
