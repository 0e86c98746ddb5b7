//! Deterministic mode: the same run, every time.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// 32-bit code for `--mode protected`, as a file.
fn image(path: &Path, code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
    let mut assembler = CodeAssembler::new(32).expect("a possible width");
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

/// Waits for the APIC timer to run down, then leaves with what the time-stamp counter said last.
fn timer(a: &mut CodeAssembler) -> Result<(), IcedError> {
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

/// Leaves with a random number.
fn random(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.rdrand(eax)?;
    a.mov(dx, 0xf4)?;
    a.out(dx, eax)
}

#[test]
fn same_image_runs_the_same_and_another_image_another_way() {
    let folder = tempfile::tempdir().unwrap();
    image(&folder.path().join("timer"), timer);
    image(&folder.path().join("random"), random);
    let first = hash(folder.path(), &flat("timer", &[]));
    assert_eq!(first, hash(folder.path(), &flat("timer", &[])));
    assert_ne!(first, hash(folder.path(), &flat("random", &[])));
}

#[test]
fn seed_decides_the_random_numbers() {
    let folder = tempfile::tempdir().unwrap();
    image(&folder.path().join("random"), random);
    let seeded = |seed| hash(folder.path(), &flat("random", &["--seed", seed]));
    assert_eq!(seeded("0"), hash(folder.path(), &flat("random", &[])));
    assert_eq!(seeded("7"), seeded("7"));
    assert_ne!(seeded("0"), seeded("7"));
}

/// Every processor counts in a race without locks for one counter in memory; the boot processor
/// leaves with what became of it.
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
    // INIT and start-up IPI to all but this one. SVR enables the APIC.
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
fn race_of_two_processors_ends_the_same_way_every_time() {
    let folder = tempfile::tempdir().unwrap();
    image(&folder.path().join("race"), race);
    let first = hash(folder.path(), &flat("race", &["--cpus", "2"]));
    for _ in 0..3 {
        assert_eq!(first, hash(folder.path(), &flat("race", &["--cpus", "2"])));
    }
}

#[test]
fn halted_guest_that_nothing_can_wake_ends() {
    let folder = tempfile::tempdir().unwrap();
    image(&folder.path().join("halt"), |a| {
        let mut again = a.create_label();
        a.cli()?;
        a.set_label(&mut again)?;
        a.hlt()?;
        a.jmp(again)
    });
    let output = run(folder.path(), &flat("halt", &[]));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("nothing left to wake it"), "{text}");
}

#[test]
fn kvm_and_processors_of_the_host_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    image(&folder.path().join("random"), random);
    for (arguments, expected) in [
        (["--engine", "kvm"], "needs the interpreter"),
        (["--cpu", "host"], "needs --cpu portable-v1"),
    ] {
        let output = run(folder.path(), &flat("random", &arguments));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(expected), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert_eq!(output.status.code(), Some(2));
    }
}
