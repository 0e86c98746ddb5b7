//! Deterministic mode: the same guest runs the same way every time.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// Writes 32-bit code for `--mode protected` to a file.
fn write_image(path: &Path, code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
    let mut assembler = CodeAssembler::new(32).expect("the width is valid");
    code(&mut assembler).expect("the code is valid");
    let image = assembler.assemble(0x10_0000).expect("the code fits");
    fs::write(path, image).expect("the image can be written");
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hindsight"))
        .args(["run", "--deterministic", "--stats", "--memory", "16M"])
        .args(["--timeout", "60"])
        .args(arguments)
        .current_dir(folder)
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .output()
        .expect("the program starts")
}

/// The hash that the run printed, and its exit status.
fn hash(folder: &Path, arguments: &[&str]) -> (String, Option<i32>) {
    let output = run(folder, arguments);
    let text = String::from_utf8_lossy(&output.stderr);
    let hash = text
        .lines()
        .find_map(|line| line.strip_prefix("hindsight: hash "))
        .unwrap_or_else(|| panic!("no hash in: {text}"));
    (hash.to_owned(), output.status.code())
}

const FLAT: [&str; 4] = ["--protocol", "flat", "--mode", "protected"];

fn flat<'a>(image: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&FLAT, more, &[image]].concat()
}

/// Waits until the APIC timer reaches 0, then exits with the last value of the TSC as its status.
fn wait_for_timer(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    // Divide by 1; the LVT entry is masked, as after RESET.
    a.mov(esi, 0xfee0_0000_u32)?;
    a.mov(dword_ptr(esi + 0x3e0), 0xb)?;
    a.mov(dword_ptr(esi + 0x380), 50_000)?;
    a.set_label(&mut again)?;
    a.rdtsc()?;
    a.mov(ebx, eax)?;
    a.mov(eax, dword_ptr(esi + 0x390))?;
    a.test(eax, eax)?;
    a.jnz(again)?;
    a.mov(eax, ebx)?;
    a.mov(dx, 0xf4)?;
    a.out(dx, eax)
}

/// Exits with a random number as its status.
fn exit_with_random_number(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.rdrand(eax)?;
    a.mov(dx, 0xf4)?;
    a.out(dx, eax)
}

#[test]
fn hash_depends_on_the_image_alone() {
    let folder = tempfile::tempdir().unwrap();
    write_image(&folder.path().join("timer"), wait_for_timer);
    write_image(&folder.path().join("random"), exit_with_random_number);
    let first = hash(folder.path(), &flat("timer", &[]));
    assert_eq!(first, hash(folder.path(), &flat("timer", &[])));
    assert_ne!(first, hash(folder.path(), &flat("random", &[])));
}

#[test]
fn random_numbers_depend_on_the_seed() {
    let folder = tempfile::tempdir().unwrap();
    write_image(&folder.path().join("random"), exit_with_random_number);
    let seeded = |seed| hash(folder.path(), &flat("random", &["--seed", seed]));
    assert_eq!(seeded("0"), hash(folder.path(), &flat("random", &[])));
    assert_eq!(seeded("7"), seeded("7"));
    assert_ne!(seeded("0"), seeded("7"));
}

/// Two vCPUs increment one counter in memory without locks; the bootstrap processor exits with the
/// counter as its status.
fn race(a: &mut CodeAssembler) -> Result<(), IcedError> {
    const ENTRY: u32 = 0x8000;
    let mut count = a.create_label();
    let mut wait = a.create_label();
    // Start-up code in real mode at 0x8000: inc dword [0x9000] 100000 times, then [0x9004] = 1.
    let start_up: [u8; 32] = [
        0x31, 0xc0, 0x8e, 0xd8, // xor ax, ax; mov ds, ax
        0x66, 0xb9, 0xa0, 0x86, 0x01, 0x00, // mov ecx, 100000
        0x66, 0xff, 0x06, 0x00, 0x90, // inc dword [0x9000]
        0x66, 0x49, // dec ecx
        0x75, 0xf7, // jnz to the inc
        0xc6, 0x06, 0x04, 0x90, 0x01, // mov byte [0x9004], 1
        0xf4, 0xeb, 0xfd, // hlt; jmp
        0, 0, 0, 0, 0,
    ];
    for (at, word) in (ENTRY..).step_by(4).zip(start_up.chunks_exact(4)) {
        let word = u32::from_le_bytes(word.try_into().expect("four bytes"));
        a.mov(dword_ptr(at), word)?;
    }
    // INIT and start-up IPI to all vCPUs but this one. SVR enables the APIC.
    a.mov(esi, 0xfee0_0000_u32)?;
    a.mov(dword_ptr(esi + 0xf0), 0x1ff)?;
    a.mov(dword_ptr(esi + 0x300), 0xc_4500_u32)?;
    a.mov(dword_ptr(esi + 0x300), 0xc_4600 | ENTRY >> 12)?;
    a.mov(ecx, 100_000)?;
    a.set_label(&mut count)?;
    a.mov(eax, dword_ptr(0x9000))?;
    a.inc(eax)?;
    a.mov(dword_ptr(0x9000), eax)?;
    a.dec(ecx)?;
    a.jnz(count)?;
    a.set_label(&mut wait)?;
    a.cmp(byte_ptr(0x9004), 0)?;
    a.je(wait)?;
    a.mov(eax, dword_ptr(0x9000))?;
    a.mov(dx, 0xf4)?;
    a.out(dx, eax)
}

#[test]
fn race_of_two_vcpus_has_the_same_result_every_time() {
    let folder = tempfile::tempdir().unwrap();
    write_image(&folder.path().join("race"), race);
    let first = hash(folder.path(), &flat("race", &["--cpus", "2"]));
    for _ in 0..3 {
        assert_eq!(first, hash(folder.path(), &flat("race", &["--cpus", "2"])));
    }
}

#[test]
fn run_ends_when_nothing_can_wake_the_halted_guest() {
    let folder = tempfile::tempdir().unwrap();
    write_image(&folder.path().join("halt"), |a| {
        let mut again = a.create_label();
        a.cli()?;
        a.set_label(&mut again)?;
        a.hlt()?;
        a.jmp(again)
    });
    let output = run(folder.path(), &flat("halt", &[]));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("nothing can wake it"), "{text}");
}

#[test]
fn kvm_and_the_host_cpu_model_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    write_image(&folder.path().join("random"), exit_with_random_number);
    for (arguments, expected) in [
        (["--engine", "kvm"], "needs the interpreter"),
        (["--cpu", "host"], "needs --cpu portable-v2"),
    ] {
        let output = run(folder.path(), &flat("random", &arguments));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(expected), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert_eq!(output.status.code(), Some(2));
    }
}

/// Adds up the bytes from the serial port and the times at which they arrived, until a `q`; exits
/// with the sum as its status. It polls.
fn sum_serial_input(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.xor(ebx, ebx)?;
    a.set_label(&mut again)?;
    a.mov(dx, 0x3fd)?;
    a.in_(al, dx)?;
    a.test(al, 1)?;
    a.jz(again)?;
    a.rdtsc()?;
    a.add(ebx, eax)?;
    a.mov(dx, 0x3f8)?;
    a.in_(al, dx)?;
    a.movzx(ecx, al)?;
    a.add(ebx, ecx)?;
    a.cmp(ecx, i32::from(b'q'))?;
    a.jne(again)?;
    a.mov(eax, ebx)?;
    a.mov(dx, 0xf4)?;
    a.out(dx, eax)
}

/// As [`run`], with `input` on standard input.
fn run_with_input(folder: &Path, arguments: &[&str], input: &[u8]) -> Output {
    use std::io::Write;
    let mut child = Command::new(env!("CARGO_BIN_EXE_hindsight"))
        .args(["run", "--deterministic", "--stats", "--memory", "16M"])
        .args(["--timeout", "60"])
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stdin = child.stdin.take().expect("it is a pipe");
    stdin.write_all(input).expect("the program reads");
    drop(stdin);
    child.wait_with_output().expect("the program ends")
}

fn hash_of(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let hash = text
        .lines()
        .find_map(|line| line.strip_prefix("hindsight: hash "));
    hash.unwrap_or_else(|| panic!("no hash in: {text}"))
        .to_owned()
}

#[test]
fn recorded_input_is_replayed_at_the_same_instruction() {
    let folder = tempfile::tempdir().unwrap();
    write_image(&folder.path().join("serial"), sum_serial_input);
    let record = flat("serial", &["--record-input", "log"]);
    let recorded = run_with_input(folder.path(), &record, b"hello, q");
    let log = fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(log.starts_with("hindsight-input 1 cpus=1 "), "{log}");
    assert!(log.contains(" serial "), "{log}");
    for _ in 0..2 {
        let (replayed, status) = hash(folder.path(), &flat("serial", &["--replay-input", "log"]));
        assert_eq!(
            (replayed, status),
            (hash_of(&recorded), recorded.status.code())
        );
    }
    let seeded = flat("serial", &["--replay-input", "log", "--seed", "1"]);
    assert_one_line(&run(folder.path(), &seeded), "is of a machine with cpus=1");
}

/// The status is 2, and there is one line of output, which contains `expected`.
fn assert_one_line(output: &Output, expected: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains(expected), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn signal_ends_a_halted_guest_and_its_replay() {
    let folder = tempfile::tempdir().unwrap();
    // With interrupts off, only the recorded end of the run wakes the vCPU.
    write_image(&folder.path().join("halt"), |a| {
        a.cli()?;
        a.hlt()
    });
    let mut child = Command::new(env!("CARGO_BIN_EXE_hindsight"))
        .args(["run", "--deterministic", "--stats", "--memory", "16M"])
        .args(["--record-input", "log"])
        .args(flat("halt", &[]))
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    std::thread::sleep(std::time::Duration::from_millis(500));
    let id = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(id, rustix::process::Signal::TERM).expect("it runs");
    child.wait().expect("it ends");
    let mut text = String::new();
    let mut stderr = child.stderr.take().expect("it is a pipe");
    std::io::Read::read_to_string(&mut stderr, &mut text).expect("it is text");
    let recorded = text.lines().find(|line| line.contains(" hash "));
    let recorded = recorded.unwrap_or_else(|| panic!("no hash in: {text}"));
    let (replayed, status) = hash(folder.path(), &flat("halt", &["--replay-input", "log"]));
    assert_eq!(status, Some(0));
    assert!(recorded.ends_with(&replayed), "{recorded}, then {replayed}");
}

#[test]
fn bad_input_logs_are_rejected_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    write_image(&folder.path().join("serial"), sum_serial_input);
    let head = "hindsight-input 1 cpus=1 memory=16777216 seed=0\n";
    for (log, expected) in [
        ("", "line 1: not an input log"),
        (&*format!("{head}1 2 3 mouse"), "line 2: expected"),
    ] {
        fs::write(folder.path().join("log"), log).unwrap();
        let output = run(folder.path(), &flat("serial", &["--replay-input", "log"]));
        assert_one_line(&output, expected);
    }
    // The log is well-formed, but in no run of this guest does the sixth round begin there.
    fs::write(folder.path().join("log"), format!("{head}5 1 1 serial 71")).unwrap();
    let output = run(folder.path(), &flat("serial", &["--replay-input", "log"]));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("the input log belongs to another run"),
        "{text}"
    );
    assert_eq!(output.status.code(), Some(6));
}

fn diff(folder: &Path, arguments: &[&str]) -> (String, Option<i32>) {
    let output = Command::new(env!("CARGO_BIN_EXE_hindsight"))
        .args(["diff", "--memory", "16M"])
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .expect("the program starts");
    let both = [output.stdout, output.stderr].concat();
    (
        String::from_utf8_lossy(&both).into_owned(),
        output.status.code(),
    )
}

/// Runs a loop, reads a random number, runs a loop again, and exits with the number as its status.
///
/// The first event that depends on the number is the exit.
fn late_random_number(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let (mut before, mut after) = (a.create_label(), a.create_label());
    a.mov(ecx, 30_000)?;
    a.set_label(&mut before)?;
    a.dec(ecx)?;
    a.jnz(before)?;
    a.nop()?;
    a.rdrand(eax)?;
    a.mov(ecx, 50_000)?;
    a.set_label(&mut after)?;
    a.dec(ecx)?;
    a.jnz(after)?;
    a.mov(dx, 0xf4)?;
    a.out(dx, eax)
}

#[test]
fn diff_finds_the_instruction_at_which_two_seeds_diverge() {
    let folder = tempfile::tempdir().unwrap();
    write_image(&folder.path().join("random"), late_random_number);
    let seeds = ["--a", "--seed 1", "--b", "--seed 2"];
    for stride in ["1000000", "77"] {
        let arguments = flat("random", &[&seeds[..], &["--stride", stride]].concat());
        let (text, status) = diff(folder.path(), &arguments);
        assert_eq!(status, Some(1), "{text}");
        // mov, 30000 times dec and jnz, nop, rdrand.
        let expected = "the runs diverge at instruction 60003: cpu 0 at ";
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("rdrand"), "{text}");
        assert!(text.contains("cpu.0.cpu.gpr.rax: a 0x"), "{text}");
        assert!(text.contains("a's last branches"), "{text}");
    }
}

#[test]
fn diff_finds_no_difference_between_equal_runs() {
    let folder = tempfile::tempdir().unwrap();
    write_image(&folder.path().join("random"), late_random_number);
    let (text, status) = diff(folder.path(), &flat("random", &[]));
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.contains("both runs ended after 160006 instructions"),
        "{text}"
    );
    let limited = flat("random", &["--limit", "1000", "--b", "--seed 3"]);
    let (text, status) = diff(folder.path(), &limited);
    assert_eq!(
        (&*text, status),
        ("no difference in 1000 instructions\n", Some(0))
    );
}

#[test]
fn diff_reports_machines_that_differ_from_the_start() {
    let folder = tempfile::tempdir().unwrap();
    write_image(&folder.path().join("random"), late_random_number);
    let (text, status) = diff(folder.path(), &flat("random", &["--b", "--cpus 2"]));
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("before the first instruction"), "{text}");
    let (text, status) = diff(folder.path(), &flat("random", &["--b", "--bogus"]));
    assert_eq!((status, text.lines().count()), (Some(2), 1), "{text}");
}
