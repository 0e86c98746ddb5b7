use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::console::output::BUFFER_MAX;
use crate::console::*;

/// Held by tests that make a terminal raw: there is one for the process.
pub static TERMINAL: Mutex<()> = Mutex::new(());

const SOON: Duration = Duration::from_secs(10);

/// Both ends of a new pseudo-terminal: the one of the user, and the terminal.
pub fn pseudo_terminal() -> (OwnedFd, OwnedFd) {
    use rustix::fs::{Mode, OFlags, open};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&control).unwrap();
    unlockpt(&control).unwrap();
    let name = ptsname(&control, Vec::new()).unwrap();
    let terminal = open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
    (control, terminal)
}

/// A callback that accepts all input, and a channel with what it accepted.
fn collector() -> (Deliver, Receiver<Vec<u8>>) {
    let (sender, delivered) = mpsc::channel();
    let deliver = move |bytes: &[u8]| sender.send(bytes.to_vec()).map_or(0, |()| bytes.len());
    (Box::new(deliver), delivered)
}

fn expect_delivery(delivered: &Receiver<Vec<u8>>, expected: &[u8]) {
    let mut all = Vec::new();
    while all.len() < expected.len() {
        all.extend(delivered.recv_timeout(SOON).unwrap());
    }
    assert_eq!(all, expected);
}

fn open_socket(path: &Path) -> (Console, Receiver<Vec<u8>>) {
    let mut console = Console::open(&Backend::Unix(path.to_owned())).unwrap();
    let (deliver, delivered) = collector();
    console.start_input(deliver, || {}).unwrap();
    (console, delivered)
}

fn expect_output(mut client: &UnixStream, expected: &[u8]) {
    client.set_read_timeout(Some(SOON)).unwrap();
    let mut read = vec![0; expected.len()];
    client.read_exact(&mut read).unwrap();
    assert_eq!(read, expected);
}

#[test]
fn console_none_drops_output() {
    let mut console = Console::open(&Backend::None).unwrap();
    console.start_input(collector().0, || {}).unwrap();
    console
        .output()
        .write_all(&vec![0; 10 * BUFFER_MAX])
        .unwrap();
}

#[test]
fn file_is_complete_when_the_console_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    std::fs::write(&path, "old").unwrap();
    let console = Console::open(&Backend::File(path.clone())).unwrap();
    let line = b"0123456789abcdef".repeat(10_000);
    let mut output = console.output();
    line.iter()
        .for_each(|byte| output.write_all(&[*byte]).unwrap());
    drop(console);
    assert!(std::fs::read(&path).unwrap() == line);
    output.write_all(b"after the end").unwrap();
}

#[test]
fn file_that_cannot_be_written_is_refused() {
    let error = Console::open(&Backend::File("/nowhere/log".into())).unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"cannot open "/nowhere/log" for console output"#
    );
    assert!(std::error::Error::source(&error).is_some());
}

#[test]
fn socket_client_exchanges_bytes_with_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let (console, delivered) = open_socket(&path);
    console.output().write_all(b"before ").unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    expect_output(&client, b"before ");
    console.output().write_all(b"after").unwrap();
    expect_output(&client, b"after");
    client.write_all(b"input").unwrap();
    expect_delivery(&delivered, b"input");
}

#[test]
fn second_socket_client_follows_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let (console, delivered) = open_socket(&path);
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"one").unwrap();
    drop(client);
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"two").unwrap();
    expect_delivery(&delivered, b"onetwo");
    console.output().write_all(b"hello").unwrap();
    expect_output(&client, b"hello");
}

#[test]
fn socket_client_that_shut_down_sending_still_reads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let (console, delivered) = open_socket(&path);
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"end").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    expect_delivery(&delivered, b"end");
    console.output().write_all(b"more").unwrap();
    expect_output(&client, b"more");
}

#[test]
fn socket_client_that_does_not_read_does_not_block_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let (console, delivered) = open_socket(&path);
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"here").unwrap();
    expect_delivery(&delivered, b"here");
    let start = Instant::now();
    let mut output = console.output();
    for _ in 0..200 {
        output.write_all(&[b'x'; BUFFER_MAX]).unwrap();
    }
    assert!(start.elapsed() < SOON);
    drop(console);
    assert!(start.elapsed() < SOON);
    assert!(!path.exists());
}

#[test]
fn socket_client_gets_output_written_just_before_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let (console, delivered) = open_socket(&path);
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"here").unwrap();
    expect_delivery(&delivered, b"here");
    console.output().write_all(b"goodbye").unwrap();
    drop(console);
    let mut read = String::new();
    client.read_to_string(&mut read).unwrap();
    assert_eq!(read, "goodbye");
}

#[test]
fn socket_path_in_use_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (busy, file) = (dir.path().join("busy"), dir.path().join("file"));
    let _listener = UnixListener::bind(&busy).unwrap();
    std::fs::write(&file, "precious").unwrap();
    for (path, reason) in [
        (
            &busy,
            "another process is listening there; choose another path",
        ),
        (
            &file,
            "it is not a socket; remove it or choose another path",
        ),
    ] {
        let error = Console::open(&Backend::Unix(path.clone())).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("cannot use {path:?} as a socket: {reason}")
        );
        assert!(path.exists());
    }
}

#[test]
fn stale_socket_is_replaced_and_removed_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let (console, _delivered) = open_socket(&path);
    UnixStream::connect(&path).unwrap();
    drop(console);
    assert!(!path.exists());
}

#[test]
fn socket_path_that_is_too_long_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = Console::open(&Backend::Unix(dir.path().join("x".repeat(200)))).unwrap_err();
    assert!(matches!(error, ConsoleError::Listen { .. }));
}

#[test]
fn pipe_input_is_offered_until_the_guest_accepts_it() {
    let (from, mut to) = io::pipe().unwrap();
    let outbox = Arc::new(Outbox::closed());
    let (sender, delivered) = mpsc::channel();
    let offers = std::cell::Cell::new(0);
    let deliver: Deliver = Box::new(move |bytes| {
        offers.set(offers.get() + 1);
        let accepted = if offers.get() < 4 {
            0
        } else {
            bytes.len().min(2)
        };
        sender
            .send(bytes[..accepted].to_vec())
            .map_or(0, |()| accepted)
    });
    to.write_all(b"script\x01x").unwrap();
    drop(to);
    let _reader = input::read_terminal_or_pipe(from.into(), outbox, deliver, || {}).unwrap();
    expect_delivery(&delivered, b"script\x01x");
}

#[test]
fn escape_key_works_while_the_guest_hangs() {
    let _alone = TERMINAL.lock().unwrap_or_else(PoisonError::into_inner);
    let (control, terminal) = pseudo_terminal();
    let outbox = Arc::new(Outbox::new(WhenFull::Wait, None, None));
    let (sender, quits) = mpsc::channel();
    let quit = move || sender.send(()).unwrap();
    let hanging: Deliver = Box::new(|_| 0);
    let reader = input::read_terminal_or_pipe(terminal, outbox, hanging, quit).unwrap();
    rustix::io::write(&control, &[b'z'; 3000]).unwrap();
    rustix::io::write(&control, b"\x01x").unwrap();
    quits.recv_timeout(SOON).unwrap();
    drop(reader);
}

#[test]
fn terminal_input_reaches_the_guest_unchanged() {
    let _alone = TERMINAL.lock().unwrap_or_else(PoisonError::into_inner);
    let (control, terminal) = pseudo_terminal();
    let outbox = Arc::new(Outbox::closed());
    let (deliver, delivered) = collector();
    let reader = input::read_terminal_or_pipe(terminal, outbox, deliver, || {}).unwrap();
    rustix::io::write(&control, b"a\r\x03\x1a\x01\x01").unwrap();
    expect_delivery(&delivered, b"a\r\x03\x1a\x01");
    drop(reader);
}

#[test]
fn write_into_a_full_buffer_waits_until_released() {
    let (from, to) = io::pipe().unwrap();
    let outbox = Arc::new(Outbox::new(WhenFull::Wait, Some(to.into()), None));
    let writer = spawn(
        "writer",
        ThreadKind::ConsoleOutput,
        outbox.clone(),
        Outbox::run,
    )
    .unwrap();
    let flood = outbox.clone();
    let flooding = thread::spawn(move || flood.put(&vec![0; 100 * BUFFER_MAX]));
    thread::sleep(Duration::from_millis(50));
    assert!(!flooding.is_finished());
    outbox.release();
    flooding.join().unwrap();
    outbox.close();
    assert!(
        !outbox.wait_until_drained(Duration::from_millis(10)),
        "nobody reads the pipe"
    );
    drop(from);
    assert!(outbox.wait_until_drained(SOON), "the pipe broke");
    writer.join().unwrap();
}

#[test]
fn broken_pipe_ends_waiting_writers() {
    let (from, to) = io::pipe().unwrap();
    drop(from);
    let outbox = Arc::new(Outbox::new(WhenFull::Wait, Some(to.into()), None));
    let writer = spawn(
        "writer",
        ThreadKind::ConsoleOutput,
        outbox.clone(),
        Outbox::run,
    )
    .unwrap();
    outbox.put(&vec![0; 10 * BUFFER_MAX]);
    writer.join().unwrap();
}

#[test]
fn named_pipe_without_reader_is_refused_as_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
    let error = Console::open(&Backend::File(path)).unwrap_err();
    let ConsoleError::OpenFile { source, .. } = error else {
        panic!("{error}")
    };
    assert_ne!(source.kind(), ErrorKind::NotFound);
}
