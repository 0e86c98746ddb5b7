//! `--log`, `--log-file` and HINDSIGHT_LOG.

use std::fs;
use std::path::Path;
use std::process::Output;

use iced_x86::code_asm::*;

use crate::rig::*;

/// A guest that reads a port without a device and an MSR that does not exist, and resets the machine.
fn odd(path: &Path) {
    const GP_VECTOR: i32 = 13;
    image(path, (16, 0x7c00), |a| {
        a.xor(ax, ax)?;
        a.mov(ds, ax)?;
        // The handler of #GP(0) lies among the NOPs after the RDMSR.
        a.mov(word_ptr(4 * GP_VECTOR), 0x7c40)?;
        a.mov(word_ptr(4 * GP_VECTOR + 2), 0)?;
        a.mov(dx, 0x1234)?;
        a.in_(al, dx)?;
        a.mov(ecx, 0x1234)?;
        a.rdmsr()?;
        a.nops_with_size(64)?;
        a.mov(al, 0xfe)?;
        a.out(0x64, al)
    });
}

fn run(folder: &Path, more: &[&str], variable: Option<&str>) -> Output {
    let fixed = [
        "run", "image", "--mode", "real", "--engine", "interp", "--serial", "none",
    ];
    let mut command = command(folder, &[&fixed[..], more].concat());
    if let Some(value) = variable {
        command.env("HINDSIGHT_LOG", value);
    }
    command.output().expect("it starts")
}

const RESET: &str = "hindsight: the guest asked for a reset\n";

#[test]
fn default_level_keeps_a_run_quiet() {
    let folder = tempfile::tempdir().unwrap();
    odd(&folder.path().join("image"));
    for filter in [None, Some(""), Some("warn"), Some("off")] {
        let output = run(folder.path(), &[], filter);
        assert_eq!(
            (output.status.code(), &*text(&output)),
            (Some(8), RESET),
            "{filter:?}"
        );
    }
}

#[test]
fn each_level_adds_its_messages() {
    let folder = tempfile::tempdir().unwrap();
    odd(&folder.path().join("image"));
    let info = [
        "hindsight: engine interp: it was asked for",
        "hindsight: machine starts: ",
        "hindsight: read of port 0x1234: no device",
        "hindsight: machine stopped: the guest resets the machine",
    ];
    let debug = ["hindsight: debug: msr: cpu 0 rdmsr 0x1234: no such MSR, #GP(0)"];
    let trace = ["hindsight: trace: io: cpu 0 in 0x1234 = "];
    type Groups<'a> = &'a [&'a [&'a str]];
    let rows: [(&str, Groups<'_>, Groups<'_>); 5] = [
        ("warn", &[], &[&info, &debug, &trace]),
        ("info", &[&info], &[&debug, &trace]),
        ("debug", &[&info, &debug], &[&trace]),
        ("trace", &[&info, &debug, &trace], &[]),
        ("warn,msr=debug", &[&debug], &[&info, &trace]),
    ];
    for (level, present, absent) in rows {
        for output in [
            run(folder.path(), &["--log", level], Some("off")),
            run(folder.path(), &[], Some(level)),
        ] {
            let stderr = text(&output);
            for line in present.concat() {
                assert!(stderr.contains(line), "{level}: no {line:?} in {stderr}");
            }
            for line in absent.concat() {
                assert!(!stderr.contains(line), "{level}: {line:?} in {stderr}");
            }
            assert!(stderr.ends_with(RESET), "{level}: {stderr}");
        }
    }
}

#[test]
fn log_file_has_times_and_levels_and_the_end_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    odd(&folder.join("image"));
    let output = run(folder, &["--log", "info", "--log-file", "log"], None);
    assert_eq!(text(&output), RESET);
    let log = fs::read_to_string(folder.join("log")).unwrap();
    for part in [
        " INFO hindsight_vmm::machine::run: machine starts: ",
        " INFO hindsight_devices::bus: read of port 0x1234: no device",
        ": the guest asked for a reset\n",
    ] {
        assert!(log.contains(part), "no {part:?} in {log}");
    }
    let year = log
        .lines()
        .all(|line| line.starts_with("20") && line.contains("Z "));
    assert!(year, "{log}");
}

#[test]
fn log_file_of_a_run_that_did_not_begin_does_not_exist() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(folder.path(), &["--log-file", "log"], None);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("image cannot be opened"));
    // The error is the only line, and so it may be in the log or the log may be missing.
    let log = fs::read_to_string(folder.path().join("log")).unwrap_or_default();
    assert!(log.is_empty() || log.contains("ERROR"), "{log}");
}

#[test]
fn log_and_trace_do_not_mix() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    odd(&folder.join("image"));
    let output = run(folder, &["--trace", "io,msr=trace"], None);
    assert_eq!(text(&output), RESET);
    let trace = fs::read_to_string(folder.join("trace")).unwrap();
    assert!(trace.starts_with("io   cpu 0 in 0x1234 = "), "{trace}");
    assert!(
        trace.contains("\nmsr  cpu 0 rdmsr 0x1234: no such MSR, #GP(0)\n"),
        "{trace}"
    );
    assert!(!trace.contains("hindsight"), "{trace}");
}

#[test]
fn bad_filters_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [
        run(folder.path(), &["--log", "wran"], None),
        run(folder.path(), &[], Some("wran")),
        command(folder.path(), &["demo"])
            .env("HINDSIGHT_LOG", "wran")
            .output()
            .unwrap(),
        command(folder.path(), &["doctor"])
            .env("HINDSIGHT_LOG", "wran")
            .output()
            .unwrap(),
        run(folder.path(), &["--log-file", "no/such/folder"], None),
    ];
    for output in rows {
        let stderr = text(&output);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.starts_with("hindsight: "), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}
