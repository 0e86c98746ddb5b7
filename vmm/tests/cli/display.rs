//! `--display`: the screen of a guest that only writes to the text memory.

use std::fs;
use std::path::Path;

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::rig::{command, crash, has_kvm, real, text};

/// Writes `Hi` in yellow on blue to the second row, and moves the cursor behind it.
fn write_to_screen(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(ax, 0xb800)?;
    a.mov(ds, ax)?;
    for (at, byte) in [(160_u64, b'H'), (162, b'i')] {
        a.mov(word_ptr(at), 0x1e00 | u32::from(byte))?;
    }
    a.mov(dx, 0x3d4)?;
    for word in [82_u32 << 8 | 0x0f, 0x000e] {
        a.mov(ax, word)?;
        a.out(dx, ax)?;
    }
    Ok(())
}

fn power_off(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(dx, 0x604)?;
    a.mov(ax, 0x3400)?;
    a.out(dx, ax)
}

fn run(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = command(folder, &[&["run", "--timeout", "60"], arguments].concat())
        .output()
        .expect("it starts");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.code(), stdout, text(&output))
}

#[test]
fn kernel_that_writes_only_to_the_text_memory_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| {
        write_to_screen(a)?;
        power_off(a)
    });
    let mut engines = vec!["interp"];
    if has_kvm("the screen under KVM") {
        engines.push("kvm");
    }
    for engine in engines {
        let arguments = [
            "image",
            "--mode",
            "real",
            "--engine",
            engine,
            "--display",
            "text",
            "--sandbox",
            "strict",
        ];
        let (status, stdout, all) = run(folder.path(), &arguments);
        assert_eq!(status, Some(0), "{engine}: {all}");
        assert_eq!(stdout, "\nHi\n", "{engine}: {all}");
    }
}

#[test]
fn picture_is_written_at_the_end_and_on_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    real(&path("image"), |a| {
        write_to_screen(a)?;
        power_off(a)
    });
    crash(&path("crash"));
    let common = ["--engine", "interp", "--sandbox", "strict"];
    let rows: [(&[&str], &str, i32); 2] = [
        (&["image", "--mode", "real"], "good.png", 0),
        (&["crash", "--mode", "protected"], "crash.png", 4),
    ];
    for (image, picture, expected) in rows {
        let arguments = [image, &common, &["--display", picture]].concat();
        let (status, _, all) = run(folder.path(), &arguments);
        assert_eq!(status, Some(expected), "{all}");
        let png = fs::read(path(picture)).unwrap();
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"), "{picture}");
        // The header has the size, 640x400.
        assert_eq!(&png[16..24], &[0, 0, 2, 0x80, 0, 0, 1, 0x90], "{picture}");
        assert!(png.ends_with(b"IEND\xaeB`\x82"), "{picture}");
    }
}

#[test]
fn run_that_fails_to_start_keeps_the_earlier_picture() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("picture.png"), vec![b'x'; 100_000]).unwrap();
    let arguments = ["none", "--engine", "interp", "--display", "picture.png"];
    let (status, _, all) = run(folder.path(), &arguments);
    assert_eq!(status, Some(2), "{all}");
    assert_eq!(fs::read(path("picture.png")).unwrap().len(), 100_000);
    real(&path("image"), power_off);
    let arguments = [
        "image",
        "--mode",
        "real",
        "--engine",
        "interp",
        "--display",
        "picture.png",
    ];
    let (status, _, all) = run(folder.path(), &arguments);
    assert_eq!(status, Some(0), "{all}");
    let png = fs::read(path("picture.png")).unwrap();
    assert!(png.ends_with(b"IEND\xaeB`\x82"), "nothing follows");
}

#[test]
fn guest_without_display_finds_no_screen() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| {
        a.mov(dx, 0x3cc)?;
        a.in_(al, dx)?;
        a.mov(dx, 0x3f8)?;
        a.out(dx, al)?;
        power_off(a)
    });
    let arguments = ["image", "--mode", "real", "--engine", "interp"];
    let full = [&arguments[..], &["--display", "text"]].concat();
    let without = command(folder.path(), &[&["run"], &arguments[..]].concat()).output();
    let with = command(folder.path(), &[&["run"], &full[..]].concat()).output();
    assert_eq!(without.unwrap().stdout, [0xff]);
    assert_eq!(with.unwrap().stdout, [0x67]);
}

#[test]
fn displays_that_do_not_exist_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), power_off);
    for (display, expected) in [
        ("window", "a picture's name ends in .png"),
        ("no/folder.png", "--display no/folder.png"),
    ] {
        let arguments = ["image", "--mode", "real", "--display", display];
        let (status, _, all) = run(folder.path(), &arguments);
        assert_eq!(status, Some(2), "{all}");
        assert!(all.contains(expected), "{all}");
    }
}
