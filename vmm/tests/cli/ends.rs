//! How runs end, and what they need.

use std::fs;
use std::thread;
use std::time::Duration;

use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::*;

/// Runs `code` in real mode, and returns the exit status and standard error.
fn ends(code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().expect("a folder");
    real(&folder.path().join("image"), code);
    let arguments = ["image", "--mode", "real", "--timeout", "0.4"];
    let output = output(folder.path(), &arguments);
    (output.status.code(), text(&output))
}

#[test]
fn each_end_of_a_run_has_its_status() {
    if !has_kvm("each_end_of_a_run_has_its_status") {
        return;
    }
    let exit = |code: u32| {
        ends(move |a| {
            a.mov(eax, code)?;
            a.out(0xf4, eax)
        })
    };
    assert_eq!(exit(0), (Some(1), String::new()));
    assert_eq!(exit(0x10), (Some(0x21), String::new()));

    let off = ends(|a| {
        a.mov(dx, 0x604)?;
        a.mov(ax, 0x3400)?;
        a.out(dx, ax)
    });
    assert_eq!(off, (Some(0), String::new()));

    let (status, stderr) = ends(|a| {
        a.mov(al, 0xfe)?;
        a.out(0x64, al)
    });
    assert_eq!(status, Some(8));
    assert_eq!(stderr, "hindsight: the guest asked for a reset\n");

    let folder = tempfile::tempdir().unwrap();
    crash(&folder.path().join("crash"));
    let crashed = output(folder.path(), &["crash", "--mode", "protected"]);
    let stderr = text(&crashed);
    assert_eq!(crashed.status.code(), Some(4), "{stderr}");
    assert!(
        stderr.contains("triple-faulted at 0x100005: ud2"),
        "{stderr}"
    );
    assert!(stderr.contains("rax=0000000012345678"), "{stderr}");
    assert!(stderr.contains("rip=0000000000100005"), "{stderr}");

    let (status, stderr) = ends(spin);
    assert_eq!(status, Some(124));
    assert!(stderr.contains("the time limit passed"), "{stderr}");
    assert!(stderr.contains("cpu 0: ran at 0x7c00: jmp"), "{stderr}");
    assert!(stderr.contains("rip=0000000000007c00"), "{stderr}");

    let (status, stderr) = ends(|a| {
        a.cli()?;
        a.hlt()
    });
    assert_eq!(status, Some(124));
    assert!(stderr.contains("cpu 0: halted before"), "{stderr}");
}

#[test]
fn time_limits_beyond_the_clock_are_no_limits() {
    if !has_kvm("time_limits_beyond_the_clock_are_no_limits") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| a.out(0xf4, al));
    for limit in ["1e19", "1e18", "9223372036854775807"] {
        let arguments = ["image", "--mode", "real", "--timeout", limit];
        let output = output(folder.path(), &arguments);
        assert_eq!(output.status.code(), Some(1), "{limit}: {}", text(&output));
    }
}

#[test]
fn guests_of_every_memory_size_run() {
    if !has_kvm("guests_of_every_memory_size_run") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| {
        a.mov(al, 1)?;
        a.out(0xf4, al)
    });
    for size in ["1M", "1028K", "128M", "3G", "3073M", "5G"] {
        let output = output(folder.path(), &["image", "--mode", "real", "-m", size]);
        let stderr = text(&output);
        let small_host = stderr.contains("more than the") && output.status.code() == Some(2);
        let runs = output.status.code() == Some(3) && stderr.is_empty();
        assert!(runs || small_host, "{size}: {stderr}");
    }
}

#[test]
fn monitor_takes_less_than_8_mib_of_its_own() {
    if !has_kvm("monitor_takes_less_than_8_mib_of_its_own") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), spin);
    let arguments = ["image", "--mode", "real", "--timeout", "20"];
    let mut child = hindsight(folder.path(), &arguments).spawn().unwrap();
    thread::sleep(Duration::from_millis(500));
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(wait(&mut child).code(), Some(0));
    let kib = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        let word = line.split_whitespace().nth(1).unwrap();
        word.parse::<u64>().unwrap()
    };
    // Guest memory is shared, and the program's text is shared between machines.
    let own = kib("RssAnon:");
    println!(
        "anonymous {own} KiB, file {} KiB, shared {} KiB",
        kib("RssFile:"),
        kib("RssShmem:")
    );
    assert!(own < 8 << 10, "{own} KiB");
}

#[test]
fn run_ends_with_the_process_that_started_it() {
    let folder = tempfile::tempdir().expect("a folder");
    real(&folder.path().join("image"), spin);
    let script = format!(
        "{} run --engine interp --mode real --end-with $$ image >out 2>&1 & echo $!; exec sleep 100",
        env!("CARGO_BIN_EXE_hindsight")
    );
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &script]).current_dir(folder.path());
    let mut shell = shell.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let output = shell.stdout.as_mut().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).unwrap();
    let stat = format!("/proc/{}/stat", line.trim());
    thread::sleep(Duration::from_millis(500));
    let runs = || fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
    assert!(
        runs(),
        "{}",
        fs::read_to_string(folder.path().join("out")).unwrap()
    );
    shell.kill().unwrap();
    shell.wait().unwrap();
    let mut waited = 0;
    while runs() && waited < 100 {
        thread::sleep(Duration::from_millis(50));
        waited += 1;
    }
    assert!(!runs(), "the run is left behind");
}

#[test]
fn pipe_without_a_writer_is_an_image_until_the_time_limit() {
    let folder = tempfile::tempdir().expect("a folder");
    let made = std::process::Command::new("mkfifo")
        .arg(folder.path().join("image"))
        .status();
    assert!(made.unwrap().success());
    let output = output(folder.path(), &["image", "--timeout", "0.2"]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = text(&output);
    assert!(stderr.contains("the time limit passed"), "{stderr}");
}
