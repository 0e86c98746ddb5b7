//! `--display`: the screen of guests that write to the text memory or to the framebuffer.

use std::fs;
use std::path::Path;

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::rig::{command, crash, has_kvm, protected, real, text};

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

/// The display's register `register` in its configuration space, at 1f.0, is accessed next.
fn select_pci(a: &mut CodeAssembler, register: u32) -> Result<(), IcedError> {
    a.mov(dx, 0xcf8)?;
    a.mov(eax, 0x8000_0000 | 0x1f << 11 | register)?;
    a.out(dx, eax)?;
    a.mov(dx, 0xcfc)
}

/// Sets a mode of 640x480 pixels of 32 bits, finds the framebuffer in BAR 0, and writes two pixels to it: one
/// where it is, and one after it has moved the BAR.
fn draw(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(dx, 0x1ce)?;
    for (index, value) in [(1_u32, 640_u32), (2, 480), (3, 32), (4, 0x41)] {
        a.mov(dx, 0x1ce)?;
        a.mov(ax, index)?;
        a.out(dx, ax)?;
        a.mov(dx, 0x1cf)?;
        a.mov(ax, value)?;
        a.out(dx, ax)?;
    }
    select_pci(a, 0x10)?;
    a.in_(eax, dx)?;
    a.and(eax, 0xffff_fff0_u32 as i32)?;
    a.mov(edi, eax)?;
    // Row 1, pixel 2.
    a.mov(dword_ptr(edi + (640 + 2) * 4), 0x11_2233)?;
    a.mov(eax, 0xc800_0000_u32)?;
    a.out(dx, eax)?;
    // Row 479, pixel 639.
    a.mov(edi, 0xc800_0000_u32)?;
    a.mov(dword_ptr(edi + (640 * 480 - 1) * 4), 0x44_5566)?;
    // What is written at one address is read at the other.
    a.mov(ebx, dword_ptr(edi + (640 + 2) * 4))?;
    a.mov(dword_ptr(edi), ebx)?;
    power_off(a)
}

#[test]
fn framebuffer_is_a_picture_wherever_its_bar_is() {
    let folder = tempfile::tempdir().unwrap();
    protected(&folder.path().join("image"), draw);
    let mut rows = vec![vec!["--engine", "interp"], vec!["--deterministic"]];
    if has_kvm("the framebuffer under KVM") {
        rows.push(vec!["--engine", "kvm"]);
    }
    for row in rows {
        let arguments = ["image", "--mode", "protected", "--sandbox", "strict"];
        let arguments = [&arguments[..], &["--display", "picture.png"], &row].concat();
        let (status, _, all) = run(folder.path(), &arguments);
        assert_eq!(status, Some(0), "{row:?}: {all}");
        let png = fs::File::open(folder.path().join("picture.png")).unwrap();
        let mut reader = png::Decoder::new(std::io::BufReader::new(png))
            .read_info()
            .unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (640, 480), "{row:?}");
        let set = pixels.chunks(3).enumerate();
        let set: Vec<_> = set.filter(|(_, pixel)| *pixel != [0; 3]).collect();
        let expected: [(usize, &[u8]); 3] = [
            (0, &[0x11, 0x22, 0x33]),
            (642, &[0x11, 0x22, 0x33]),
            (640 * 480 - 1, &[0x44, 0x55, 0x66]),
        ];
        assert_eq!(set, expected, "{row:?}");
    }
}

#[test]
fn framebuffer_leaves_deterministic_runs_the_same() {
    let folder = tempfile::tempdir().unwrap();
    protected(&folder.path().join("image"), draw);
    let hash = |display: &str| {
        let arguments = ["image", "--mode", "protected", "--deterministic", "--stats"];
        let arguments = [&arguments[..], &["--display", display]].concat();
        let (status, _, all) = run(folder.path(), &arguments);
        assert_eq!(status, Some(0), "{all}");
        let line = all.lines().find(|line| line.contains("hash"));
        line.unwrap().to_owned()
    };
    assert_eq!(hash("picture.png"), hash("picture.png"));
}

#[test]
fn graphics_mode_has_no_text() {
    let folder = tempfile::tempdir().unwrap();
    protected(&folder.path().join("image"), draw);
    let arguments = ["image", "--mode", "protected", "--engine", "interp"];
    let arguments = [&arguments[..], &["--display", "text"]].concat();
    let (status, stdout, all) = run(folder.path(), &arguments);
    assert_eq!((status, stdout.as_str()), (Some(0), ""), "{all}");
    assert!(all.contains("a picture of 640x480 pixels"), "{all}");
}
