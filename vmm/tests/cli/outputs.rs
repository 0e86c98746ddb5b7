//! Outputs that cannot be written: one line, status 2, and what was written before stays.

use std::fs;
use std::process::Output;

use iced_x86::code_asm::*;

use crate::rig::*;

/// Runs a guest in the interpreter that floods COM1, with `arguments` behind `script`, a shell command.
fn run_flood(bytes: Option<u32>, script: &str, arguments: &str) -> (Output, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    real(&folder.path().join("image"), |a| flood(a, bytes));
    let program = env!("CARGO_BIN_EXE_hindsight");
    let fixed = "run image --mode real -m 1M --engine interp --timeout 60";
    let script = format!("{script} exec {program} {fixed} {arguments}");
    let mut shell = std::process::Command::new("sh");
    shell
        .args(["-c", &script])
        .current_dir(folder.path())
        .env("HINDSIGHT_LOG", "error");
    let output = shell.stdin(std::process::Stdio::null()).output();
    (output.expect("sh is installed"), folder)
}

fn assert_lost(output: &Output, expected: &str) {
    let stderr = text(output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with(expected), "{stderr}");
}

#[test]
fn full_disk_ends_the_run_for_every_output() {
    let space = "cannot be written: No space left on device";
    for (arguments, output) in [
        ("--serial file:/dev/full", "--serial file:/dev/full"),
        ("> /dev/full", "--serial stdio"),
        ("--trace io=/dev/full > out", "--trace /dev/full"),
        (
            "--log trace --log-file /dev/full > out",
            "--log-file /dev/full",
        ),
        (
            "--deterministic --record-input /dev/full > out",
            "--record-input /dev/full",
        ),
    ] {
        let (ended, _folder) = run_flood(None, "", arguments);
        let stderr = text(&ended);
        assert_eq!(ended.status.code(), Some(2), "{arguments}: {stderr}");
        assert!(stderr.contains(output), "{arguments}: {stderr}");
        assert!(stderr.contains("No space left on device"), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments}: {stderr}");
        if !arguments.contains("record-input") {
            assert!(stderr.contains(space), "{stderr}");
        }
    }
}

#[test]
fn output_lost_after_the_guest_has_ended_changes_the_status() {
    let (ended, _folder) = run_flood(Some(1), "", "--serial file:/dev/full");
    assert_lost(
        &ended,
        "hindsight: --serial file:/dev/full cannot be written: No space",
    );
}

#[test]
fn file_size_limit_ends_the_run_and_leaves_what_was_written() {
    for (arguments, file) in [
        ("--serial file:out", "out"),
        ("> out", "out"),
        ("--trace io=trace > /dev/null", "trace"),
    ] {
        // Guest memory is a file in memory, which must fit too. dash counts in units of 512 bytes, and
        // bash in units of 1024.
        let (ended, folder) = run_flood(None, "ulimit -f 2304;", arguments);
        let stderr = text(&ended);
        assert_eq!(ended.status.code(), Some(2), "{arguments}: {stderr}");
        assert!(stderr.contains("File too large"), "{arguments}: {stderr}");
        let written = fs::metadata(folder.path().join(file)).unwrap().len();
        assert!(
            matches!(written, 0x12_0000 | 0x24_0000),
            "{arguments}: {written}"
        );
    }
}

#[test]
fn full_disk_is_one_line_for_commands_without_a_guest() {
    for arguments in [
        "completions bash",
        "cpu show skylake-server",
        "--help",
        "run --help",
        "run x --dump-config",
    ] {
        let script = format!(
            "{} {arguments} > /dev/full",
            env!("CARGO_BIN_EXE_hindsight")
        );
        let output = std::process::Command::new("sh")
            .args(["-c", &script])
            .output()
            .unwrap();
        assert_lost(&output, "hindsight: No space left on device");
    }
}

#[test]
fn max_output_ends_the_run_at_the_byte() {
    let (ended, folder) = run_flood(None, "", "--serial file:out --max-output 5000");
    assert_lost(
        &ended,
        "hindsight: --serial file:out has reached the limit of --max-output: 5000 bytes",
    );
    let written = fs::read(folder.path().join("out")).unwrap();
    assert!(written == vec![b'x'; 5000], "{}", written.len());
}

#[test]
fn max_output_counts_traces_and_consoles_together() {
    let arguments = "--serial file:out --trace io=trace --max-output 64K";
    let (ended, folder) = run_flood(None, "", arguments);
    assert_eq!(ended.status.code(), Some(2), "{}", text(&ended));
    let total: u64 = ["out", "trace"]
        .map(|name| fs::metadata(folder.path().join(name)).unwrap().len())
        .iter()
        .sum();
    assert_eq!(total, 64 << 10);
}

#[test]
fn full_disk_ends_branch_trace_messages_and_the_run() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| {
        // IA32_DEBUGCTL.TR.
        a.mov(ecx, 0x1d9)?;
        a.xor(edx, edx)?;
        a.mov(eax, 0x40)?;
        a.wrmsr()?;
        spin(a)
    });
    let arguments = [
        "run",
        "image",
        "--mode",
        "real",
        "--engine",
        "interp",
        "--btm",
        "/dev/full",
    ];
    let mut child = command(folder.path(), &arguments).spawn().unwrap();
    assert_eq!(wait(&mut child).code(), Some(2));
    let stderr = text(&child.wait_with_output().unwrap());
    let expected = "hindsight: --btm /dev/full cannot be written: No space left on device";
    assert!(stderr.starts_with(expected), "{stderr}");
}
