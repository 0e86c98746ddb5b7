//! `--sandbox`: what the threads of a run may do, as the kernel shows it.

use std::fs;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::rig::*;

/// Starts a guest that runs until it is ended, with a console of every kind and a debugger.
fn start(folder: &std::path::Path, engine: &str, sandbox: &str) -> Child {
    real(&folder.join("image"), spin);
    let arguments = [
        "run",
        "image",
        "--mode",
        "real",
        "--engine",
        engine,
        "--sandbox",
        sandbox,
        "--serial",
        "unix:serial",
        "--debugcon",
        "file:debug",
        "--gdb",
        "unix:gdb",
        "--trace",
        "msr=trace",
    ];
    let child = command(folder, &arguments).spawn().expect("it starts");
    thread::sleep(Duration::from_millis(700));
    child
}

/// The names of the threads of `child`, with the value of `field` in their status.
fn threads(child: &Child, field: &str) -> Vec<(String, String)> {
    let tasks = fs::read_dir(format!("/proc/{}/task", child.id())).expect("it runs");
    let mut threads: Vec<_> = tasks
        .flatten()
        .map(|task| {
            let status = fs::read_to_string(task.path().join("status")).expect("it runs");
            let value = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                line.unwrap_or_default().trim().to_owned()
            };
            (value("Name:"), value(field))
        })
        .collect();
    threads.sort();
    threads
}

fn end(child: Child, folder: &std::path::Path) {
    kill_process(Pid::from_child(&child), Signal::TERM).expect("it runs");
    end_of(child, folder);
}

/// Waits for the end of a run that was sent SIGTERM.
fn end_of(mut child: Child, folder: &std::path::Path) {
    let status = wait(&mut child);
    let stderr = text(&child.wait_with_output().expect("it ended"));
    assert_eq!(status.code(), Some(0), "{stderr}");
    assert!(!stderr.contains("sandbox"), "{stderr}");
    let left: Vec<_> = listing(folder).into_iter().map(|(name, _)| name).collect();
    assert_eq!(left, ["debug", "image", "trace"], "sockets are removed");
}

#[test]
fn every_thread_is_filtered_and_removes_its_sockets_at_the_end() {
    let mut engines = vec!["interp"];
    if has_kvm("every_thread_is_filtered_and_removes_its_sockets_at_the_end") {
        engines.push("kvm");
    }
    for engine in engines {
        for sandbox in ["on", "strict"] {
            let folder = tempfile::tempdir().unwrap();
            let child = start(folder.path(), engine, sandbox);
            for field in ["Seccomp:", "NoNewPrivs:"] {
                let expected = if field == "Seccomp:" { "2" } else { "1" };
                let threads = threads(&child, field);
                let names = [
                    "console-input",
                    "console-output",
                    "gdb",
                    "hindsight",
                    "signals",
                    "timer",
                    "vcpu0",
                ];
                for name in names {
                    assert!(
                        threads.iter().any(|(found, _)| found == name),
                        "{threads:?}"
                    );
                }
                assert!(
                    threads.iter().all(|(_, value)| value == expected),
                    "{threads:?}"
                );
            }
            end(child, folder.path());
        }
    }
}

/// Starts `hindsight exec` with a kernel that never starts the command; returns when the main thread,
/// which is the last one, has a filter. `None` in a build without the guest's init.
fn start_exec(folder: &std::path::Path, engine: &str, sandbox: &str) -> Option<Child> {
    let mut kernel = multiboot(0);
    // JMP to itself, at the entry.
    kernel[32..34].copy_from_slice(&[0xeb, 0xfe]);
    fs::write(folder.join("kernel"), kernel).expect("it can be written");
    fs::create_dir(folder.join("modules")).expect("it can be made");
    let options = ["exec", "--engine", engine, "--sandbox", sandbox];
    let kernel = ["--kernel", "kernel", "--modules", "modules", "--", "true"];
    let mut child = command(folder, &[&options[..], &kernel].concat());
    let mut child = child.stdin(Stdio::piped()).spawn().expect("it starts");
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(30) {
        let status = child.try_wait().expect("the child is ours");
        if status.is_some() {
            let stderr = text(&child.wait_with_output().expect("it ended"));
            assert!(stderr.contains("without payloads"), "{stderr}");
            eprintln!("skipped: this program was built without the init of exec");
            return None;
        }
        let threads = threads(&child, "Seccomp:");
        let filtered = |name: &str| threads.contains(&(name.to_owned(), "2".to_owned()));
        if filtered("vcpu0") && filtered("hindsight") {
            return Some(child);
        }
        thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let _ = child.wait();
    panic!("the main thread of exec has no filter");
}

#[test]
fn exec_filters_every_thread_as_run_does() {
    let mut engines = vec!["interp"];
    if has_kvm("exec_filters_every_thread_as_run_does") {
        engines.push("kvm");
    }
    for engine in engines {
        for sandbox in ["on", "strict"] {
            let folder = tempfile::tempdir().unwrap();
            let Some(mut child) = start_exec(folder.path(), engine, sandbox) else {
                return;
            };
            for (field, expected) in [("Seccomp:", "2"), ("NoNewPrivs:", "1")] {
                let threads = threads(&child, field);
                for name in ["hindsight", "input", "signals", "timer", "vcpu0"] {
                    assert!(
                        threads.iter().any(|(found, _)| found == name),
                        "{threads:?}"
                    );
                }
                assert!(
                    threads.iter().all(|(_, value)| value == expected),
                    "{engine} {sandbox} {field} {threads:?}"
                );
            }
            child.kill().expect("it runs");
            let stderr = text(&child.wait_with_output().expect("it ended"));
            assert!(!stderr.contains("sandbox"), "{stderr}");
        }
    }
}

/// The signals that end or continue the process, as bits of a mask of signals.
fn handled_signals() -> u64 {
    [
        Signal::HUP,
        Signal::INT,
        Signal::QUIT,
        Signal::TERM,
        Signal::CONT,
    ]
    .iter()
    .fold(0, |mask, signal| mask | 1 << (signal.as_raw() - 1))
}

#[test]
fn signals_are_delivered_only_to_threads_that_may_handle_them() {
    let folder = tempfile::tempdir().unwrap();
    let child = start(folder.path(), "interp", "strict");
    for (name, blocked) in threads(&child, "SigBlk:") {
        let blocked = u64::from_str_radix(&blocked, 16).expect("a mask") & handled_signals();
        let expected = match name.as_str() {
            "hindsight" | "signals" => 0,
            _ => handled_signals(),
        };
        assert_eq!(blocked, expected, "{name}");
    }
    let pid = Pid::from_child(&child);
    for _ in 0..2000 {
        kill_process(pid, Signal::CONT).expect("it runs");
    }
    kill_process(pid, Signal::TERM).expect("it runs");
    let _ = kill_process(pid, Signal::CONT);
    end_of(child, folder.path());
}

#[test]
fn sandbox_off_filters_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let child = start(folder.path(), "interp", "off");
    let threads = threads(&child, "Seccomp:");
    assert!(threads.iter().all(|(_, value)| value == "0"), "{threads:?}");
    end(child, folder.path());
}

#[test]
fn strict_run_with_deterministic_input_and_statistics_needs_no_other_call() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| flood(a, Some(1000)));
    let rows: [&[&str]; 4] = [
        &["--deterministic", "--stats", "--record-input", "log"],
        &["--deterministic", "--stats", "--replay-input", "log"],
        &[
            "--cpus",
            "4",
            "--stats",
            "--log",
            "debug",
            "--log-file",
            "log2",
        ],
        &["--btm", "btm", "--record", "branches", "--max-output", "1M"],
    ];
    for row in rows {
        let fixed = [
            "run",
            "image",
            "--mode",
            "real",
            "--engine",
            "interp",
            "--sandbox",
            "strict",
        ];
        let output = command(folder.path(), &[&fixed[..], row].concat())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(11), "{row:?}: {}", text(&output));
        assert_eq!(output.stdout.len(), 1000, "{row:?}");
    }
}
