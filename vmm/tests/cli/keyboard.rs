//! The keyboard: keys that are typed or recorded reach the guest by interrupts.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::rig::{command, has_kvm, real, text};

/// Writes the scan codes of IRQ 1 to COM1 until Enter is released, then powers off.
fn echo_scan_codes(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let [mut begin, mut wait, mut more] = [(); 3].map(|()| a.create_label());
    // The return address is that of the handler.
    a.call(begin)?;
    a.in_(al, 0x60)?;
    a.mov(dx, 0x3f8)?;
    a.out(dx, al)?;
    a.cmp(al, 0x9c_u32 as i32)?;
    a.jne(more)?;
    a.mov(dx, 0x604)?;
    a.mov(ax, 0x3400)?;
    a.out(dx, ax)?;
    a.set_label(&mut more)?;
    a.mov(al, 0x20)?;
    a.out(0x20, al)?;
    a.iret()?;
    a.set_label(&mut begin)?;
    a.pop(bx)?;
    a.cli()?;
    a.xor(ax, ax)?;
    a.mov(ds, ax)?;
    // IRQ 1 is vector 9.
    a.mov(word_ptr(9 * 4), bx)?;
    a.mov(word_ptr(9 * 4 + 2), 0)?;
    for (port, value) in [
        (0x20, 0x11_u32),
        (0x21, 8),
        (0x21, 4),
        (0x21, 1),
        (0x21, 0xfd),
    ] {
        a.mov(al, value)?;
        a.out(port, al)?;
    }
    // The host waits for this byte.
    a.mov(dx, 0x3f8)?;
    a.mov(al, u32::from(b'!'))?;
    a.out(dx, al)?;
    a.sti()?;
    a.set_label(&mut wait)?;
    a.hlt()?;
    a.jmp(wait)
}

/// The scan codes of `Hi`, the right arrow and Enter.
const CODES: &[u8] = &[
    b'!', 0x2a, 0x23, 0xa3, 0xaa, 0x17, 0x97, 0xe0, 0x4d, 0xe0, 0xcd, 0x1c, 0x9c,
];

/// Runs the guest, types when it is ready, and returns the status and the messages.
fn run_typing(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let serial = folder.join("serial");
    let _ = fs::remove_file(&serial);
    let common = [
        "run",
        "image",
        "--mode",
        "real",
        "--timeout",
        "60",
        "--display",
        "text",
    ];
    let arguments = [&common[..], &["--serial", "file:serial"], arguments].concat();
    let mut child = command(folder, &arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    for _ in 0..1000 {
        let ready = fs::read(&serial).is_ok_and(|bytes| bytes.starts_with(b"!"));
        if ready || child.try_wait().is_ok_and(|status| status.is_some()) {
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    // A run that replays has ended.
    let _ = stdin.write_all(b"Hi\x1b[C\r");
    let output = child.wait_with_output().expect("it ends");
    (output.status.code(), text(&output))
}

#[test]
fn typed_keys_reach_the_guest() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), echo_scan_codes);
    let mut engines = vec!["interp"];
    if has_kvm("the keyboard under KVM") {
        engines.push("kvm");
    }
    for engine in engines {
        let arguments = ["--engine", engine, "--sandbox", "strict"];
        let (status, all) = run_typing(folder.path(), &arguments);
        assert_eq!(status, Some(0), "{engine}: {all}");
        let codes = fs::read(folder.path().join("serial")).unwrap();
        assert_eq!(codes, CODES, "{engine}: {all}");
    }
}

#[test]
fn recorded_keys_are_typed_again_in_the_same_run() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), echo_scan_codes);
    let hash = |option: &str| {
        let arguments = ["--deterministic", "--stats", option, "input.log"];
        let (status, all) = run_typing(folder.path(), &arguments);
        assert_eq!(status, Some(0), "{all}");
        let codes = fs::read(folder.path().join("serial")).unwrap();
        assert_eq!(codes, CODES, "{option}: {all}");
        let line = all.lines().find(|line| line.contains("hash"));
        line.unwrap().to_owned()
    };
    let recorded = hash("--record-input");
    let log = fs::read_to_string(folder.path().join("input.log")).unwrap();
    assert!(log.contains(" keys 2a23a3aa"), "{log}");
    assert_eq!(hash("--replay-input"), recorded);
}

#[test]
fn machine_without_display_has_no_keyboard() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| {
        a.mov(al, 0xf2)?;
        a.out(0x60, al)?;
        a.in_(al, 0x60)?;
        a.mov(dx, 0x3f8)?;
        a.out(dx, al)?;
        a.mov(dx, 0x604)?;
        a.mov(ax, 0x3400)?;
        a.out(dx, ax)
    });
    let arguments = ["run", "image", "--mode", "real", "--engine", "interp"];
    let with = [&arguments[..], &["--display", "picture.png"]].concat();
    let run = |arguments: &[&str]| command(folder.path(), arguments).output().unwrap().stdout;
    assert_eq!(run(&arguments), [0xfe]);
    assert_eq!(run(&with), [0xfa]);
}
