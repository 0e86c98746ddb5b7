//! `hindsight trace` and `hindsight export` as a user meets them.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// Writes 32-bit code for `--mode protected` to `guest` in `folder`.
fn image(folder: &Path, code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
    let mut assembler = CodeAssembler::new(32).expect("a possible width");
    code(&mut assembler).expect("the code is valid");
    let image = assembler.assemble(0x10_0000).expect("the code fits");
    fs::write(folder.join("guest"), image).expect("the image can be written");
}

/// A guest that calls a function of a loop of three, twice, and exits with code 5.
fn two_calls(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let (mut function, mut again) = (a.create_label(), a.create_label());
    a.mov(esp, 0x8000)?; // 100000
    a.call(function)?; // 100005
    a.call(function)?; // 10000a
    a.mov(eax, 5)?; // 10000f
    a.out(0xf4, al)?; // 100014
    a.hlt()?; // 100016
    a.set_label(&mut function)?;
    a.mov(ecx, 3)?; // 100017
    a.set_label(&mut again)?;
    a.dec(ecx)?; // 10001c
    a.jne(again)?; // 10001d
    a.ret() // 10001f
}

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hindsight"));
    command
        .args(arguments)
        .current_dir(folder)
        .env_remove("HINDSIGHT_LOG")
        .stdin(Stdio::null());
    command
}

fn hindsight(folder: &Path, arguments: &[&str]) -> Output {
    command(folder, arguments).output().expect("it starts")
}

/// Traces `guest` with these options; panics unless the guest exits with code 5.
fn trace(folder: &Path, options: &[&str]) -> String {
    let fixed = [
        "trace",
        "guest",
        "-o",
        "t",
        "--deterministic",
        "--mode",
        "protected",
    ];
    let output = hindsight(folder, &[&fixed, options].concat());
    let errors = String::from_utf8(output.stderr).expect("errors are UTF-8");
    assert_eq!(output.status.code(), Some(11), "{errors}");
    errors
}

fn export(folder: &Path, arguments: &[&str]) -> String {
    let output = hindsight(folder, &[&["export"], arguments].concat());
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text is UTF-8")
}

const CALL: [&str; 4] = [
    "call 0x100005 0x100017",
    "jcc 0x10001d 0x10001c",
    "jcc 0x10001d 0x10001c",
    "ret 0x10001f 0x10000a",
];

#[test]
fn trace_has_every_branch_and_port_access_in_order() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), two_calls);
    let errors = trace(folder.path(), &[]);
    assert!(errors.contains("8 branches"), "{errors}");
    let text = export(folder.path(), &["text", "t"]);
    let lines: Vec<_> = text.lines().collect();
    let first = CALL.iter().zip([2, 5, 7, 10]);
    let first = first.map(|(line, at)| format!("0 {at} {line} cpl 0"));
    for (line, expected) in lines.iter().zip(first) {
        assert!(line.starts_with(&expected), "{line}: {expected}");
    }
    assert_eq!(lines.len(), 9, "{text}");
    assert_eq!(lines[8], "0 20 out 0xf4 1 = 0x5");
    let json = export(folder.path(), &["json", "t", "--after", "20"]);
    let record: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&record["event"], &record["at"]),
        (&"out".into(), &20.into())
    );
}

#[test]
fn window_and_kinds_select_a_part_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), two_calls);
    let window = [
        "--from",
        "0x10001c:4",
        "--until",
        "0x10001f:1",
        "--keep-running",
    ];
    trace(folder.path(), &window);
    let text = export(folder.path(), &["text", "t"]);
    assert_eq!(text.lines().count(), 3, "{text}");
    trace(folder.path(), &["--events", "calls"]);
    assert_eq!(export(folder.path(), &["text", "t"]).lines().count(), 4);
    trace(
        folder.path(),
        &["--range", "0x100000-0x100016", "--events", "io,calls"],
    );
    assert_eq!(export(folder.path(), &["text", "t"]).lines().count(), 5);
}

fn jumps_to_itself(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.jmp(again)
}

#[test]
fn run_ends_with_its_window() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), jumps_to_itself);
    let options = [
        "trace",
        "guest",
        "-o",
        "t",
        "--mode",
        "protected",
        "--for",
        "1M",
    ];
    let output = hindsight(folder.path(), &options);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains(" 1000000 branches"), "{errors}");
}

#[test]
fn deterministic_run_is_the_same_with_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), two_calls);
    let hash = |text: &str| {
        let line = text
            .lines()
            .find(|line| line.starts_with("hindsight: hash"));
        line.map(str::to_owned)
    };
    let options = [
        "--stats",
        "--events",
        "branches,accesses,io,msr,mode,exceptions",
    ];
    let traced = hash(&trace(folder.path(), &options));
    let first = fs::read(folder.path().join("t")).unwrap();
    trace(folder.path(), &options);
    assert_eq!(
        first,
        fs::read(folder.path().join("t")).unwrap(),
        "the same trace"
    );
    let run = [
        "run",
        "guest",
        "--deterministic",
        "--mode",
        "protected",
        "--stats",
    ];
    let plain = hindsight(folder.path(), &run);
    let plain = hash(&String::from_utf8(plain.stderr).unwrap());
    assert!(plain.is_some());
    assert_eq!(traced, plain);
}

#[test]
fn killed_run_leaves_a_readable_trace() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), jumps_to_itself);
    let options = ["trace", "guest", "-o", "t", "--mode", "protected"];
    let mut child = command(folder.path(), &options).spawn().unwrap();
    let path = folder.path().join("t");
    for _ in 0..300 {
        thread::sleep(Duration::from_millis(100));
        if fs::metadata(&path).is_ok_and(|file| file.len() > 4096) {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let output = hindsight(folder.path(), &["export", "text", "t", "--for", "1000"]);
    assert!(output.status.success());
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        errors.contains("trace t is not complete: the run did not end properly"),
        "{errors}"
    );
    assert_eq!(
        String::from_utf8(output.stdout).unwrap().lines().count(),
        1000
    );
}

#[test]
fn bad_options_and_files_are_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), two_calls);
    fs::write(folder.path().join("other"), "no trace at all").unwrap();
    let rows: [(&[&str], &str); 8] = [
        (
            &[
                "trace",
                "guest",
                "-o",
                "t",
                "--mode",
                "protected",
                "--events",
                "pages",
            ],
            "the kinds are branches, calls",
        ),
        (
            &[
                "trace",
                "guest",
                "-o",
                "t",
                "--mode",
                "protected",
                "--from",
                "main",
            ],
            "neither an address nor a symbol",
        ),
        (
            &[
                "trace",
                "guest",
                "-o",
                "t",
                "--mode",
                "protected",
                "--cpl",
                "4",
            ],
            "privilege levels are 0 to 3",
        ),
        (
            &["trace", "guest", "-o", "t", "--engine", "kvm"],
            "drop --engine kvm",
        ),
        (
            &["trace", "guest", "-o", "t", "--gdb", "tcp::1"],
            "--gdb does not go with a trace",
        ),
        (
            &["trace", "guest", "-o", "/none/t", "--mode", "protected"],
            "--output /none/t",
        ),
        (&["export", "text", "other"], "not a trace file"),
        (&["export", "text", "missing"], "trace missing"),
    ];
    for (arguments, expected) in rows {
        let output = hindsight(folder.path(), arguments);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert!(errors.contains(expected), "{errors}");
    }
    assert!(!folder.path().join("t").exists());
}
