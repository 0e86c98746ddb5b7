//! `hindsight run` as a user meets it: bad input, hostile guests, and what is left behind.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use hindsight_vmm::kvm;
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::tcgetattr;

/// Whether KVM can be used here; says so when not.
fn has_kvm(test: &str) -> bool {
    let usable = kvm::open_device().is_ok_and(|kvm| kvm.create_vm().is_ok());
    if !usable {
        eprintln!("skipped: {test}: /dev/kvm cannot be used here");
    }
    usable
}

/// Code of `bits` for `origin`, as a file.
fn image(
    path: &Path,
    (bits, origin): (u32, u64),
    code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) {
    let mut assembler = CodeAssembler::new(bits).expect("a possible width");
    code(&mut assembler).expect("the code is valid");
    let image = assembler.assemble(origin).expect("the code fits");
    fs::write(path, image).expect("the image can be written");
}

/// 16-bit code for `--mode real`.
fn real(path: &Path, code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
    image(path, (16, 0x7c00), code);
}

/// 32-bit code for `--mode protected` that faults, where there is no IDT.
fn crash(path: &Path) {
    image(path, (32, 0x10_0000), |a| {
        a.mov(eax, 0x1234_5678)?;
        a.ud2()
    });
}

fn spin(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.jmp(again)
}

/// Writes `count` bytes to COM1, then the code to the debug exit port; no count: for ever.
fn flood(a: &mut CodeAssembler, count: Option<u32>) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(ecx, count.unwrap_or(1))?;
    a.mov(dx, 0x3f8)?;
    a.mov(al, u32::from(b'x'))?;
    a.set_label(&mut again)?;
    a.out(dx, al)?;
    if count.is_some() {
        a.dec(ecx)?;
        a.jnz(again)?;
        a.mov(al, 5)?;
        return a.out(0xf4, al);
    }
    a.jmp(again)
}

/// `hindsight run` in `folder`, with nothing on standard input.
fn hindsight(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hindsight"));
    command
        .args(["run", "--engine", "kvm"])
        .args(arguments)
        .current_dir(folder)
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Waits for the end; a process that does not end is a failure.
fn wait(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(30) {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            return status;
        }
        thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    panic!("it hangs");
}

fn output(folder: &Path, arguments: &[&str]) -> Output {
    let mut child = hindsight(folder, arguments).spawn().expect("it starts");
    let status = wait(&mut child);
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut pipes = (child.stdout.take(), child.stderr.take());
    if let (Some(out), Some(err)) = (&mut pipes.0, &mut pipes.1) {
        out.read_to_end(&mut stdout).expect("a pipe");
        err.read_to_end(&mut stderr).expect("a pipe");
    }
    Output {
        status,
        stdout,
        stderr,
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn listing(folder: &Path) -> Vec<(String, u64)> {
    let entries = fs::read_dir(folder).expect("the folder is there");
    let mut names: Vec<_> = entries
        .flatten()
        .map(|entry| {
            let len = entry.metadata().map_or(0, |m| m.len());
            (entry.file_name().to_string_lossy().into_owned(), len)
        })
        .collect();
    names.sort();
    names
}

/// A multiboot image that takes modules: the header's own addresses, and code that is never run.
fn multiboot(load_end: u32) -> Vec<u8> {
    const MAGIC: u32 = 0x1bad_b002;
    const ADDRESSES: u32 = 1 << 16;
    const LOAD: u32 = 0x10_0000;
    let checksum = 0_u32.wrapping_sub(MAGIC).wrapping_sub(ADDRESSES);
    let fields = [
        MAGIC,
        ADDRESSES,
        checksum,
        LOAD,
        LOAD,
        load_end,
        0,
        LOAD + 32,
    ];
    let mut image: Vec<u8> = fields.iter().flat_map(|f| f.to_le_bytes()).collect();
    image.resize(64, 0);
    image
}

/// The files of the tests below.
fn files(folder: &Path) {
    let put =
        |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).expect("it can be written");
    real(&folder.join("spin"), spin);
    put("empty", b"");
    put("text", b"this is not a kernel\n");
    put("bad.toml", b"model = 'host'\ncores = 9\n");
    put("elf-cut", b"\x7fELF\x02\x01\x01");
    let mut elf = vec![0; 64];
    elf[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    elf[32] = 0xff;
    elf[56] = 0xff;
    put("elf-bad", &elf);
    put("gzip", b"\x1f\x8b\x08\0\0\0\0\0");
    let mut linux = vec![0; 0x300];
    linux[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    linux[0x202..0x206].copy_from_slice(b"HdrS");
    put("linux-cut", &linux);
    put("multiboot", &multiboot(0x10_0040));
    put("multiboot-cut", &multiboot(0x20_0000));
    let big = File::create(folder.join("big")).expect("it can be made");
    big.set_len(16 << 20).expect("holes take no room");
}

#[test]
fn bad_input_is_one_line_and_status_two_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    files(folder);
    let _listener = UnixListener::bind(folder.join("socket")).unwrap();
    let before = listing(folder);
    let rows: &[(&[&str], &str)] = &[
        (&["missing"], "missing cannot be opened: No such file"),
        (&["."], "is a directory"),
        (&["/dev/zero"], "is not a file"),
        (&["spin/x"], "Not a directory"),
        (&[], "<IMAGE>"),
        (&["spin", "--bogus"], "unexpected argument '--bogus'"),
        (&["empty"], "the image is empty"),
        (&["text"], "the image's format is unknown"),
        (&["elf-cut"], "ELF"),
        (&["elf-bad"], "ELF"),
        (&["gzip"], "decompress it first"),
        (&["linux-cut"], "Linux image"),
        (&["multiboot-cut"], "multiboot"),
        (&["spin", "--protocol", "pvh"], "not ELF"),
        (&["spin", "--protocol", "linux"], "no boot header"),
        (&["spin", "--protocol", "x"], "[possible values: auto"),
        (&["spin", "--mode", "x"], "real, protected, long"),
        (&["big", "--mode", "long", "-m", "8M"], "it needs 16 MiB"),
        (
            &["spin", "--mode", "long", "--load-address", "0xe0000"],
            "overlaps",
        ),
        (
            &["spin", "--load-address", "0xfffffffffffffff0"],
            "does not fit in guest memory",
        ),
        (&["spin", "--load-address", "x"], "not a number"),
        (
            &["spin", "--mode", "long", "--entry", "0"],
            "entry point 0x0",
        ),
        (
            &["spin", "--mode", "real", "--initrd", "big"],
            "--initrd cannot be used with",
        ),
        (
            &["multiboot", "--initrd", "missing"],
            "initrd missing cannot be opened",
        ),
        (
            &["multiboot", "-m", "8M", "--initrd", "big"],
            "it needs 16 MiB",
        ),
        (
            &["multiboot", "-m", "8M", "--module", "big=x"],
            "it needs 16 MiB",
        ),
        (
            &["multiboot", "--module", "missing"],
            "module missing cannot be opened",
        ),
        (&["multiboot", "--initrd", "empty"], "is empty"),
        (&["spin", "--mode", "real", "-m", "0"], "too little"),
        (&["spin", "--mode", "real", "-m", "1048575"], "too little"),
        (
            &["spin", "--mode", "real", "-m", "1048577"],
            "not whole pages",
        ),
        (&["spin", "--mode", "real", "-m", "32T"], "more than"),
        (&["spin", "--mode", "real", "-m", "33T"], "too much"),
        (&["spin", "--mode", "real", "-m", "99999999T"], "2^64"),
        (&["spin", "--mode", "real", "-m", "lots"], "not a size"),
        (
            &["spin", "--mode", "real", "-m", "3M", "--hugepages"],
            "huge page",
        ),
        (
            &["spin", "--mode", "real", "--cpus", "0"],
            "1 to 64 processors, not 0",
        ),
        (
            &["spin", "--mode", "real", "--cpus", "65"],
            "1 to 64 processors, not 65",
        ),
        (&["spin", "--mode", "real", "--cpus", "-1"], "-1"),
        (&["spin", "--mode", "real", "--cpus", "many"], "--cpus"),
        (
            &["spin", "--mode", "real", "--cpu", "z80"],
            "skylake-server",
        ),
        (&["spin", "--mode", "real", "--cpu", "pmu=9"], "4 or 8"),
        (
            &["spin", "--mode", "real", "--cpu", "+l2cat"],
            "the interpreter",
        ),
        (
            &["spin", "--mode", "real", "--cpu", "none.toml"],
            "No such file",
        ),
        (&["spin", "--mode", "real", "--cpu", "bad.toml"], "line 2: "),
        (
            &["spin", "--mode", "real", "--timeout", "x"],
            "not a number of seconds",
        ),
        (
            &["spin", "--mode", "real", "--timeout=-1"],
            "not a possible number",
        ),
        (
            &["spin", "--mode", "real", "--serial", "tcp:1"],
            "unknown console",
        ),
        (
            &["missing", "--serial", "file:made", "--trace", "io=made2"],
            "missing",
        ),
        (
            &["text", "--serial", "file:made", "--debugcon", "unix:made2"],
            "format is unknown",
        ),
    ];
    for (arguments, expected) in rows {
        let output = output(folder, arguments);
        let stderr = text(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
        assert!(stderr.starts_with("hindsight: "), "{arguments:?}: {stderr}");
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert_eq!(listing(folder), before, "{arguments:?}");
    }
}

#[test]
fn bad_consoles_and_traces_are_one_line_and_leave_nothing() {
    if !has_kvm("bad_consoles_and_traces_are_one_line_and_leave_nothing") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    files(folder);
    let _listener = UnixListener::bind(folder.join("socket")).unwrap();
    let before = listing(folder);
    let rows: &[(&str, &str, &str)] = &[
        (
            "--serial",
            "unix:socket",
            "another process is listening there",
        ),
        ("--serial", "unix:spin", "a file of another kind is there"),
        ("--serial", "unix:nowhere/socket", "No such file"),
        ("--serial", "file:nowhere/file", "No such file"),
        (
            "--debugcon",
            "unix:socket",
            "another process is listening there",
        ),
        (
            "--trace",
            "bogus",
            "is not one of exit, msr, irq, io, mode, gdb, all",
        ),
        ("--trace", "exit=nowhere/file", "cannot be written"),
    ];
    for (option, value, expected) in rows {
        let output = output(folder, &["spin", "--mode", "real", option, value]);
        let stderr = text(&output);
        assert_eq!(output.status.code(), Some(2), "{value}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{value}: {stderr}");
        assert!(stderr.contains(expected), "{value}: {stderr}");
        assert_eq!(listing(folder), before, "{value}");
    }
}

/// How a run of `code` in real mode ends: status and standard error.
fn ends(code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().expect("a folder");
    real(&folder.path().join("image"), code);
    let arguments = ["image", "--mode", "real", "--timeout", "0.4"];
    let output = output(folder.path(), &arguments);
    (output.status.code(), text(&output))
}

#[test]
fn every_way_to_end_has_its_status() {
    if !has_kvm("every_way_to_end_has_its_status") {
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
fn impossible_limits_of_time_do_no_harm() {
    if !has_kvm("impossible_limits_of_time_do_no_harm") {
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
fn memory_of_every_possible_size_runs() {
    if !has_kvm("memory_of_every_possible_size_runs") {
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
fn flood_of_serial_output_arrives_whole() {
    if !has_kvm("flood_of_serial_output_arrives_whole") {
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
fn flood_into_a_pipe_that_nobody_reads_ends_at_the_limit() {
    if !has_kvm("flood_into_a_pipe_that_nobody_reads_ends_at_the_limit") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| flood(a, None));
    let arguments = ["image", "--mode", "real", "--timeout", "4"];
    let mut child = hindsight(folder.path(), &arguments).spawn().unwrap();
    // The pipe stays open, and full.
    assert_eq!(wait(&mut child).code(), Some(124));
}

#[test]
fn flood_into_a_closed_pipe_neither_kills_nor_hangs() {
    if !has_kvm("flood_into_a_closed_pipe_neither_kills_nor_hangs") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), |a| flood(a, Some(100_000)));
    // ForcedSwitch exit traced into the closed standard error as well.
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
fn terminal_is_as_it_was_however_the_run_ends() {
    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
    if !has_kvm("terminal_is_as_it_was_however_the_run_ends") {
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

#[test]
fn monitor_needs_little_memory_of_its_own() {
    if !has_kvm("monitor_needs_little_memory_of_its_own") {
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
    // Guest memory is shared, and the program's own text is no cost of a machine.
    let own = kib("RssAnon:");
    println!(
        "anonymous {own} KiB, file {} KiB, shared {} KiB",
        kib("RssFile:"),
        kib("RssShmem:")
    );
    assert!(own < 8 << 10, "{own} KiB");
}
