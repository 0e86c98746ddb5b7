//! Floods of output, signals, and the terminal.

use std::io::Read;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::tcgetattr;

use crate::rig::*;

#[test]
fn flood_of_serial_output_is_complete() {
    if !has_kvm("flood_of_serial_output_is_complete") {
        return;
    }
    const BYTES: u32 = 200_000;
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| flood(a, Some(BYTES)));
    let mut child = hindsight(folder.path(), &["image", "--mode", "real"])
        .spawn()
        .unwrap();
    let mut received = Vec::new();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_to_end(&mut received).unwrap();
    assert_eq!(wait(&mut child).code(), Some(11));
    assert_eq!(received, vec![b'x'; BYTES as usize]);
}

#[test]
fn time_limit_ends_a_flood_into_an_unread_pipe() {
    if !has_kvm("time_limit_ends_a_flood_into_an_unread_pipe") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| flood(a, None));
    let arguments = ["image", "--mode", "real", "--timeout", "4"];
    let mut child = hindsight(folder.path(), &arguments).spawn().unwrap();
    // The pipe stays open and full.
    assert_eq!(wait(&mut child).code(), Some(124));
}

#[test]
fn flood_into_a_closed_pipe_runs_to_the_end_of_the_guest() {
    if !has_kvm("flood_into_a_closed_pipe_runs_to_the_end_of_the_guest") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| flood(a, Some(100_000)));
    // Every exit is traced into the closed standard error as well.
    let arguments = ["image", "--mode", "real", "--trace", "io,exit"];
    let mut child = hindsight(folder.path(), &arguments).spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    assert_eq!(wait(&mut child).code(), Some(11));
}

#[test]
fn signal_ends_the_run_and_removes_the_socket() {
    if !has_kvm("signal_ends_the_run_and_removes_the_socket") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| flood(a, None));
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let arguments = ["image", "--mode", "real", "--serial", "unix:socket"];
        let mut child = hindsight(folder.path(), &arguments).spawn().unwrap();
        while !folder.path().join("socket").exists() {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(100));
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(wait(&mut child).code(), Some(0), "{signal:?}");
        assert_eq!(listing(folder.path()).len(), 1, "{signal:?}");
    }
}

#[test]
fn terminal_modes_are_restored_after_each_end() {
    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
    if !has_kvm("terminal_modes_are_restored_after_each_end") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    files(folder.path());
    crash(&folder.path().join("crash"));
    let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&control).unwrap();
    unlockpt(&control).unwrap();
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
    let terminal = ioctl_tiocgptpeer(&control, flags).unwrap();
    let modes = || {
        let now = tcgetattr(&terminal).unwrap();
        (now.input_modes, now.output_modes, now.local_modes)
    };
    let before = modes();
    for (image, mode, status) in [
        ("spin", "real", 124),
        ("crash", "protected", 4),
        ("missing", "real", 2),
    ] {
        let arguments = [image, "--mode", mode, "--timeout", "0.3"];
        let mut command = hindsight(folder.path(), &arguments);
        command.stdin(terminal.try_clone().unwrap());
        let mut child = command.spawn().unwrap();
        assert_eq!(wait(&mut child).code(), Some(status), "{image}");
        assert_eq!(modes(), before, "{image}");
    }
}
