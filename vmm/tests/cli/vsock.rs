//! `--vsock`: the sockets of the host, with a guest that has no driver.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::rig::*;

/// Connects to a socket, when it exists.
fn connect(path: &std::path::Path) -> UnixStream {
    let start = Instant::now();
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return stream,
            Err(error) if start.elapsed() > Duration::from_secs(60) => panic!("{error}"),
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

#[test]
fn clients_of_a_guest_without_driver_are_disconnected_in_a_strict_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), spin);
    let options = ["run", "image", "--mode", "real", "--engine", "interp"];
    let sockets = ["--sandbox", "strict", "--vsock", "cid=3,socket=guest"];
    let arguments = [&options[..], &sockets[..]].concat();
    let mut child = command(folder.path(), &arguments)
        .spawn()
        .expect("it starts");
    let path = folder.path().join("guest");
    // More clients than may wait: a slow one does not keep others out.
    let slow: Vec<_> = (0..40).map(|_| connect(&path)).collect();
    for line in ["CONNECT 52\n", "GET / HTTP/1.1\n", "CONNECT 99999999999\n"] {
        let mut client = connect(&path);
        let limit = Some(Duration::from_secs(60));
        client.set_read_timeout(limit).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        let mut answer = Vec::new();
        // A client whose line was not read to its end gets an error.
        let _ = client.read_to_end(&mut answer);
        assert_eq!(answer, b"", "{line:?}");
    }
    drop(slow);
    kill_process(Pid::from_child(&child), Signal::TERM).expect("it runs");
    let status = wait(&mut child);
    let stderr = text(&child.wait_with_output().expect("it ended"));
    assert_eq!(status.code(), Some(0), "{stderr}");
    assert!(!stderr.contains("sandbox"), "{stderr}");
    assert!(!path.exists(), "the socket is removed");
}

#[test]
fn sockets_that_cannot_be_made_are_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), spin);
    fs::write(folder.path().join("file"), "").unwrap();
    let long = format!("cid=3,socket={}", "x".repeat(97));
    let rows: [(&[&str], &str); 3] = [
        (&["--vsock", "cid=3,socket=file"], "it is not a socket"),
        (&["--vsock", &long], "longer than 96 bytes"),
        (
            &["--vsock", "cid=3,socket=s", "--deterministic"],
            "--vsock and --deterministic exclude each other: drop one of them",
        ),
    ];
    for (options, message) in rows {
        let common = ["run", "image", "--mode", "real", "--engine", "interp"];
        let arguments = [&common[..], options].concat();
        let output = command(folder.path(), &arguments).output().unwrap();
        let stderr = text(&output);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(message), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}
