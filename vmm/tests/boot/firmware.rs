//! `hindsight run --firmware`: a firmware of a few instructions, and SeaBIOS where it is installed.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use iced_x86::code_asm::*;

use super::guest::{Code, assemble, print};
use super::protocols::engines;

const SEABIOS: &str = "/usr/share/seabios/bios-256k.bin";
const VGA_BIOS: &str = "/usr/share/seabios/vgabios-stdvga.bin";
/// The smallest firmware.
const SIZE: usize = 0x1_0000;
/// Where the disk's boot sector runs.
const BOOT_SECTOR: u64 = 0x7c00;
const SECTOR: usize = 512;

fn run(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hindsight"))
        .args(["run", "--timeout", "60"])
        .args(arguments)
        .current_dir(folder)
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Writes firmware whose code is at 0xf0000, with a jump to it at the reset vector.
fn write_firmware(path: &Path, code: impl FnOnce(&mut CodeAssembler) -> Code) {
    let mut image = assemble(16, 0, code);
    image.resize(SIZE, 0);
    let jump = assemble(16, 0xfff0, |a| {
        a.xor(ax, ax)?;
        a.jmp(ax)
    });
    image[0xfff0..0xfff0 + jump.len()].copy_from_slice(&jump);
    fs::write(path, image).unwrap();
}

/// Powers off by PM1_CNT.
fn power_off(a: &mut CodeAssembler) -> Code {
    a.mov(dx, 0x604)?;
    a.mov(ax, 0x3400)?;
    a.out(dx, ax)
}

/// Writes EAX to port 0xcf8 and prints the low byte of port 0xcfc.
fn print_config(a: &mut CodeAssembler, address: u32) -> Code {
    a.mov(eax, address)?;
    a.mov(dx, 0xcf8)?;
    a.out(dx, eax)?;
    a.mov(dx, 0xcfc)?;
    a.in_(al, dx)?;
    a.mov(dx, 0x3f8)?;
    a.out(dx, al)
}

/// Prints a byte of the item of fw_cfg that is selected.
fn print_item_byte(a: &mut CodeAssembler) -> Code {
    a.mov(dx, 0x511)?;
    a.in_(al, dx)?;
    a.mov(dx, 0x3f8)?;
    a.out(dx, al)
}

#[test]
fn firmware_starts_at_the_reset_vector_and_finds_its_devices() {
    let folder = tempfile::tempdir().unwrap();
    write_firmware(&folder.path().join("fw"), |a| {
        // A write to the flash chip has no effect: CS is still at 4 GiB.
        a.mov(byte_ptr(0x10).cs(), 7)?;
        print(a, "starts ")?;
        // fw_cfg: the signature.
        a.mov(dx, 0x510)?;
        a.xor(ax, ax)?;
        a.out(dx, ax)?;
        print_item_byte(a)?;
        print_item_byte(a)?;
        // The host bridge, and the power management function.
        print_config(a, 0x8000_0000)?;
        print_config(a, 0x8000_0b02)?;
        // The number of physical address bits.
        a.mov(eax, 0x8000_0008_u32)?;
        a.cpuid()?;
        a.mov(dx, 0x3f8)?;
        a.out(dx, al)?;
        power_off(a)
    });
    for engine in engines() {
        let output = run(folder.path(), &["--firmware", "fw", "--engine", engine]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{engine}: {stderr}");
        let Some((bits, text)) = output.stdout.split_last() else {
            panic!("{engine}: no output: {stderr}");
        };
        assert_eq!(text, b"starts QE\x86\x86", "{engine}: {stderr}");
        // KVM's processor may have fewer.
        let expected = if engine == "interp" { 40..=40 } else { 36..=40 };
        assert!(expected.contains(bits), "{engine}: {bits} address bits");
    }
}

#[test]
fn firmware_powers_off_by_either_base_and_type() {
    let folder = tempfile::tempdir().unwrap();
    for port in [0x604_u32, 0xb004] {
        for value in [0x2000_u32, 0x3400] {
            write_firmware(&folder.path().join("fw"), |a| {
                a.mov(dx, port)?;
                a.mov(ax, value)?;
                a.out(dx, ax)?;
                a.hlt()
            });
            let arguments = ["--firmware", "fw", "--engine", "interp", "--deterministic"];
            let output = run(folder.path(), &arguments);
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{port:#x}: {stderr}");
        }
    }
}

#[test]
fn firmware_finds_mtrrs_as_reset_leaves_them() {
    let folder = tempfile::tempdir().unwrap();
    write_firmware(&folder.path().join("fw"), |a| {
        a.mov(dx, 0x3f8)?;
        // IA32_MTRR_DEF_TYPE, a PHYSMASK, and a fixed range: the processor has all of them.
        for index in [0x2ff_u32, 0x201, 0x250] {
            a.mov(ecx, index)?;
            a.rdmsr()?;
            a.or(eax, edx)?;
            a.mov(dx, 0x3f8)?;
            for shift in [8_u32; 4] {
                a.out(dx, al)?;
                a.shr(eax, shift)?;
            }
        }
        power_off(a)
    });
    for engine in engines() {
        let output = run(folder.path(), &["--firmware", "fw", "--engine", engine]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.stdout, [0; 12], "{engine}: {stderr}");
    }
}

/// Increments byte 0x50 of CMOS memory. Its old value is in AL.
fn count_in_cmos(a: &mut CodeAssembler) -> Code {
    for step in 0..2 {
        a.mov(al, 0x50)?;
        a.out(0x70, al)?;
        if step == 0 {
            a.in_(al, 0x71)?;
            a.mov(bl, al)?;
        }
    }
    a.mov(al, bl)?;
    a.inc(al)?;
    a.out(0x71, al)?;
    a.mov(al, bl)
}

/// Firmware that prints how often it was started, and whether the copy below 1 MiB and RAM have its
/// changes. Then it resets the machine in another way each time, the first `resets` of four, and at
/// last powers it off.
fn write_firmware_of_resets(path: &Path, resets: usize) {
    write_firmware(path, |a| {
        count_in_cmos(a)?;
        let digit = |a: &mut CodeAssembler| {
            a.add(al, u32::from(b'0'))?;
            a.mov(dx, 0x3f8)?;
            a.out(dx, al)
        };
        digit(a)?;
        for segment in [0xf000_u32, 0] {
            a.mov(ax, segment)?;
            a.mov(ds, ax)?;
            a.mov(al, byte_ptr(0x8000))?;
            a.mov(byte_ptr(0x8000), 1)?;
            digit(a)?;
        }
        let mut labels = [(); 4].map(|()| a.create_label());
        for (number, label) in (0_u32..).zip(labels).take(resets) {
            a.cmp(bl, number)?;
            a.je(label)?;
        }
        power_off(a)?;
        let [control, keyboard, fast, triple] = &mut labels;
        a.set_label(control)?;
        a.mov(dx, 0xcf9)?;
        for value in [2_u32, 6] {
            a.mov(al, value)?;
            a.out(dx, al)?;
        }
        // Nothing is executed after a reset.
        a.ud2()?;
        a.set_label(keyboard)?;
        a.mov(al, 0xfe)?;
        a.out(0x64, al)?;
        a.ud2()?;
        a.set_label(fast)?;
        a.mov(al, 3)?;
        a.out(0x92, al)?;
        a.ud2()?;
        a.set_label(triple)?;
        triple_fault(a)
    });
}

/// Raises an exception in protected mode with an interrupt table of no entries.
fn triple_fault(a: &mut CodeAssembler) -> Code {
    a.mov(word_ptr(0x600), 0)?;
    a.lidt(word_ptr(0x600))?;
    a.mov(eax, cr0)?;
    a.or(al, 1)?;
    a.mov(cr0, eax)?;
    a.int3()
}

#[test]
fn reset_by_the_guest_starts_the_firmware_again() {
    let folder = tempfile::tempdir().unwrap();
    for engine in engines() {
        // The instruction emulator of KVM, which runs this code on some hosts, loads no IDTR.
        let (resets, text) = match engine {
            "interp" => (4, "000101201301401"),
            _ => (3, "000101201301"),
        };
        write_firmware_of_resets(&folder.path().join("fw"), resets);
        for cpus in ["1", "3"] {
            let arguments = ["--firmware", "fw", "--engine", engine, "--cpus", cpus];
            let output = run(folder.path(), &arguments);
            let stderr = String::from_utf8_lossy(&output.stderr);
            let stdout = String::from_utf8_lossy(&output.stdout);
            assert_eq!(output.status.code(), Some(0), "{engine}: {stdout} {stderr}");
            assert_eq!(stdout, text, "{engine}: {stderr}");
            let triple = stderr.contains("a triple fault resets the machine");
            assert_eq!(triple, resets == 4, "{stderr}");
        }
    }
}

#[test]
fn deterministic_runs_with_resets_have_one_hash() {
    let folder = tempfile::tempdir().unwrap();
    write_firmware_of_resets(&folder.path().join("fw"), 4);
    let arguments = [
        "--firmware",
        "fw",
        "--deterministic",
        "--cpus",
        "2",
        "--stats",
    ];
    let hashes = [(); 2].map(|()| {
        let output = run(folder.path(), &arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert_eq!(stdout, "000101201301401", "{stderr}");
        let hash = stderr.lines().find(|line| line.contains("hash"));
        hash.expect("a deterministic run has a hash").to_owned()
    });
    assert_eq!(hashes[0], hashes[1]);
}

#[test]
fn no_reboot_ends_the_run_at_a_reset() {
    let folder = tempfile::tempdir().unwrap();
    write_firmware_of_resets(&folder.path().join("fw"), 4);
    for engine in engines() {
        let arguments = ["--firmware", "fw", "--engine", engine, "--no-reboot"];
        let output = run(folder.path(), &arguments);
        assert_eq!(output.stdout, b"000", "{engine}");
        assert_eq!(output.status.code(), Some(8), "{engine}");
    }
    write_firmware(&folder.path().join("fw"), |a| {
        a.mov(ax, 0)?;
        a.mov(ds, ax)?;
        triple_fault(a)
    });
    let arguments = ["--firmware", "fw", "--engine", "interp", "--no-reboot"];
    let output = run(folder.path(), &arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{stderr}");
}

#[test]
fn firmware_that_cannot_be_used_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let sizes: [(&str, u64); 4] = [
        ("empty", 0),
        ("small", 0xf000),
        ("odd", 0x1_0001),
        ("large", 0xff_1000),
    ];
    for (name, size) in sizes {
        let file = fs::File::create(folder.path().join(name)).unwrap();
        file.set_len(size).unwrap();
        let output = run(folder.path(), &["--firmware", name]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {stderr}");
        assert!(stderr.contains("whole 4-KiB pages"), "{name}: {stderr}");
    }
    write_firmware(&folder.path().join("fw"), |a| a.hlt());
    let rows: [(&[&str], &str); 4] = [
        (
            &["--firmware", "absent"],
            "firmware absent cannot be opened",
        ),
        (
            &["--firmware", "fw", "kernel"],
            "--firmware and <IMAGE> exclude each other",
        ),
        (
            &["--firmware", "fw", "--initrd", "i"],
            "--firmware and --initrd exclude",
        ),
        (
            &["--firmware", "fw", "--hugepages"],
            "--firmware and --hugepages exclude",
        ),
    ];
    for (arguments, text) in rows {
        let output = run(folder.path(), arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(text), "{arguments:?}: {stderr}");
    }
}

/// Where 4 KiB of variables are below firmware of [`SIZE`] bytes.
const VARIABLES: u32 = 0xfffe_f000;

/// Makes DS reach all addresses below 4 GiB, by ESI.
fn load_flat_segment(a: &mut CodeAssembler) -> Code {
    a.xor(ax, ax)?;
    a.mov(ds, ax)?;
    // The limit and the base of a table, an empty descriptor, and one of data.
    let words = [15_u32, 0x608, 0, 0, 0, 0, 0, 0, 0xffff, 0, 0x9200, 0xcf];
    for (index, word) in (0_u64..).zip(words) {
        // Byte 6 and 7 of the pointer are not used.
        let at = 0x600 + 2 * index;
        a.mov(word_ptr(at), word)?;
    }
    a.lgdt(word_ptr(0x600))?;
    a.mov(eax, cr0)?;
    a.or(al, 1)?;
    a.mov(cr0, eax)?;
    a.mov(ax, 8)?;
    a.mov(ds, ax)
}

/// Writes these bytes to the first byte of the variables.
fn write_flash(a: &mut CodeAssembler, cycles: &[u32]) -> Code {
    for &cycle in cycles {
        a.mov(byte_ptr(esi), cycle)?;
    }
    Ok(())
}

/// Firmware that prints the first byte of its variables. It programs a 7 to a 1 and resets the machine;
/// otherwise it erases the block, programs a z, and powers the machine off.
fn write_firmware_with_variables(path: &Path) {
    write_firmware(path, |a| {
        load_flat_segment(a)?;
        a.mov(esi, VARIABLES)?;
        a.mov(dx, 0x3f8)?;
        a.mov(al, byte_ptr(esi))?;
        a.out(dx, al)?;
        let mut erase = a.create_label();
        a.cmp(al, u32::from(b'7'))?;
        a.jne(erase)?;
        write_flash(a, &[0x40, u32::from(b'1')])?;
        a.mov(al, 0xfe)?;
        a.out(0x64, al)?;
        a.ud2()?;
        a.set_label(&mut erase)?;
        write_flash(a, &[0x20, 0xd0, 0x40, u32::from(b'z'), 0xff])?;
        a.mov(al, byte_ptr(esi))?;
        a.out(dx, al)?;
        power_off(a)
    });
}

#[test]
fn variables_of_firmware_are_in_the_file_after_a_reset_and_after_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let vars = folder.path().join("vars");
    write_firmware_with_variables(&folder.path().join("fw"));
    let first = [&b"7"[..], &[0; 0xfff]].concat();
    fs::write(&vars, &first).unwrap();
    let arguments = ["--firmware", "fw", "--firmware-vars", "vars"];
    let run = |mode| run(folder.path(), &[&arguments[..], mode].concat());
    // The instruction emulator of KVM, which runs this code on some hosts, loads no GDTR.
    let output = run(&["--deterministic"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.stdout, b"71z", "{stderr}");
    assert_eq!(fs::read(&vars).unwrap(), first, "a deterministic run");
    let output = run(&["--engine", "interp", "--sandbox", "strict"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.stdout, b"71z", "{stderr}");
    let last = [&b"z"[..], &[0xff; 0xfff]].concat();
    assert_eq!(fs::read(&vars).unwrap(), last);
}

#[test]
fn variables_that_cannot_be_used_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    write_firmware(&path("fw"), |a| a.hlt());
    for (name, size) in [("empty", 0), ("odd", 0x1001), ("big", 0xff_0000)] {
        fs::File::create(path(name)).unwrap().set_len(size).unwrap();
    }
    fs::write(path("used"), [0; 0x1000]).unwrap();
    let used = fs::File::open(path("used")).unwrap();
    used.lock().unwrap();
    let rows = [
        ("absent", "cannot be opened"),
        (".", "cannot be opened"),
        ("/dev/zero", "it is not a file"),
        ("empty", "whole blocks of 4 KiB"),
        ("odd", "whole blocks of 4 KiB"),
        ("big", "more than 16320 KiB together"),
        ("used", "in use by another process"),
    ];
    for (name, text) in rows {
        let output = run(
            folder.path(),
            &["--firmware", "fw", "--firmware-vars", name],
        );
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {stderr}");
        assert!(stderr.contains(text), "{name}: {stderr}");
    }
    let output = run(folder.path(), &["fw", "--firmware-vars", "used"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("no effect without --firmware"), "{stderr}");
}

/// A disk whose boot sector prints by INT 10h, reads the next sector by INT 13h, and prints that to
/// COM1.
fn boot_disk() -> Vec<u8> {
    let sector = assemble(16, BOOT_SECTOR, |a| {
        a.xor(ax, ax)?;
        a.mov(ds, ax)?;
        a.mov(es, ax)?;
        // SeaBIOS holds the last character back.
        for byte in *b"INT 10h..." {
            a.mov(ax, 0x0e00 | u32::from(byte))?;
            a.mov(bx, 7)?;
            a.int(0x10)?;
        }
        // Function 2: one sector, cylinder 0, sector 2, head 0.
        a.mov(ax, 0x0201)?;
        a.mov(bx, 0x8000)?;
        a.mov(cx, 2)?;
        a.mov(dh, 0)?;
        a.int(0x13)?;
        a.mov(dx, 0x3f8)?;
        a.mov(si, 0x8000)?;
        let (mut next, mut end) = (a.create_label(), a.create_label());
        a.set_label(&mut next)?;
        a.lodsb()?;
        a.test(al, al)?;
        a.je(end)?;
        a.out(dx, al)?;
        a.jmp(next)?;
        a.set_label(&mut end)?;
        power_off(a)
    });
    // Large enough for a cylinder of 63 sectors and 16 heads.
    let mut disk = vec![0; 2 << 20];
    disk[..sector.len()].copy_from_slice(&sector);
    disk[SECTOR - 2..SECTOR].copy_from_slice(&[0x55, 0xaa]);
    let text = b"by INT 13h";
    disk[SECTOR..SECTOR + text.len()].copy_from_slice(text);
    disk
}

/// A disc whose El Torito image of one block prints to COM1 and powers off.
fn boot_disc() -> Vec<u8> {
    const BLOCK: usize = 2048;
    const CATALOG: u8 = 18;
    const IMAGE: u8 = 19;
    let mut disc = vec![0; 24 * BLOCK];
    let mut put = |block: u8, offset: usize, bytes: &[u8]| {
        let at = usize::from(block) * BLOCK + offset;
        disc[at..at + bytes.len()].copy_from_slice(bytes);
    };
    // The primary volume descriptor, the boot record, and the end of the descriptors.
    put(16, 0, b"\x01CD001\x01");
    put(17, 0, b"\x00CD001\x01EL TORITO SPECIFICATION");
    put(17, 0x47, &[CATALOG, 0, 0, 0]);
    // The validation entry, with its checksum, and an entry without emulation of four sectors.
    put(CATALOG, 0, &[1, 0, 0, 0]);
    put(CATALOG, 28, &[0xaa, 0x55, 0x55, 0xaa]);
    put(CATALOG, 32, &[0x88, 0, 0, 0, 0, 0, 4, 0, IMAGE, 0, 0, 0]);
    let code = assemble(16, BOOT_SECTOR, |a| {
        print(a, "by El Torito")?;
        power_off(a)
    });
    put(IMAGE, 0, &code);
    disc
}

#[test]
fn seabios_boots_a_disc() {
    if !Path::new(SEABIOS).exists() {
        eprintln!("skipped: there is no {SEABIOS} (package seabios)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("disc"), boot_disc()).unwrap();
    let arguments = [
        "--firmware",
        SEABIOS,
        "--engine",
        "interp",
        "--cdrom",
        "disc",
    ];
    for mode in ["--deterministic", "--stats"] {
        let output = run(folder.path(), &[&arguments[..], &[mode]].concat());
        let (stdout, stderr) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        assert!(stdout.contains("by El Torito"), "{stdout}{stderr}");
    }
}

#[test]
fn seabios_shows_its_text_on_the_screen() {
    if !Path::new(SEABIOS).exists() {
        eprintln!("skipped: there is no {SEABIOS} (package seabios)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("disk"), boot_disk()).unwrap();
    let mut arguments = vec!["--firmware", SEABIOS, "--engine", "interp"];
    arguments.extend(["--vga-bios", VGA_BIOS, "--display", "text"]);
    arguments.extend(["--serial", "none", "--disk", "disk,snapshot"]);
    let output = run(folder.path(), &arguments);
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    for line in [
        "SeaBIOS (version",
        "Booting from Hard Disk...",
        "INT 10h...",
    ] {
        let found = stdout.lines().any(|text| text.starts_with(line));
        assert!(found, "{line} in {stdout}{stderr}");
    }
}

#[test]
fn seabios_boots_a_virtio_disk() {
    if !Path::new(SEABIOS).exists() {
        eprintln!("skipped: there is no {SEABIOS} (package seabios)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("disk"), boot_disk()).unwrap();
    let rows: [&[&str]; 3] = [
        &["--cpus", "2"],
        &["--memory", "4G"],
        &["--deterministic", "--memory", "16M"],
    ];
    for row in rows {
        let mut arguments = vec!["--firmware", SEABIOS, "--engine", "interp"];
        arguments.extend(["--disk", "disk,snapshot"]);
        arguments.extend(row);
        let output = run(folder.path(), &arguments);
        let (stdout, stderr) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        assert_eq!(output.status.code(), Some(0), "{row:?}: {stderr}");
        let parts = [
            "SeaBIOS (version",
            "Booting from Hard Disk",
            "INT 10h",
            "by INT 13h",
        ];
        for part in parts {
            assert!(stdout.contains(part), "{row:?}: {part} in {stdout}{stderr}");
        }
    }
}
