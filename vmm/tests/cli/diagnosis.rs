//! What a user learns of a guest that goes wrong: exceptions, triple faults, BIOS calls, halts.

use std::process::Output;

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use crate::rig::*;

/// Runs 16-bit code in the interpreter, or under KVM if `arguments` say so.
fn run_real(
    code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
    arguments: &[&str],
) -> Output {
    let folder = tempfile::tempdir().expect("a folder");
    real(&folder.path().join("image"), code);
    let fixed = ["run", "image", "--mode", "real", "--timeout", "20"];
    let mut engine = vec!["--engine", "interp"];
    if arguments.contains(&"--engine") {
        engine.clear();
    }
    let arguments = [&fixed[..], &engine, arguments].concat();
    command(folder.path(), &arguments)
        .output()
        .expect("it starts")
}

#[test]
fn triple_fault_shows_the_chain_that_led_to_it() {
    let folder = tempfile::tempdir().unwrap();
    crash(&folder.path().join("crash"));
    let arguments = [
        "run",
        "crash",
        "--mode",
        "protected",
        "--engine",
        "interp",
        "--trace",
        "exception",
    ];
    let output = command(folder.path(), &arguments).output().unwrap();
    let stderr = text(&output);
    assert_eq!(output.status.code(), Some(4), "{stderr}");
    // The IDT of the entry is the one of real mode, at 0, and has no gates.
    let chain = [
        "#UD at 0x10:0x100005, cpl 0: the delivery met #GP(0x32): the IDT entry at 0x30 is no gate for it",
        "#GP(0x33) at 0x10:0x100005, cpl 0: the delivery met #GP(0x6a): the IDT entry at 0x68 is no gate for it",
        "#DF(0x0) at 0x10:0x100005, cpl 0: the delivery met #GP(0x42): the IDT entry at 0x40 is no gate for it",
    ];
    for line in chain {
        assert!(stderr.contains(&format!("\n  {line}\n")), "{stderr}");
        assert!(
            stderr.contains(&format!("exception cpu 0 {line}\n")),
            "{stderr}"
        );
    }
}

#[test]
fn triple_fault_under_kvm_names_the_engine_that_shows_the_chain() {
    if !has_kvm("triple_fault_under_kvm_names_the_engine_that_shows_the_chain") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    crash(&folder.path().join("crash"));
    let output = output(folder.path(), &["crash", "--mode", "protected"]);
    assert!(
        text(&output).contains("--engine interp"),
        "{}",
        text(&output)
    );
}

#[test]
fn exceptions_and_software_interrupts_are_traced_with_their_handlers() {
    let output = run_real(
        |a| {
            let (mut start, mut last) = (a.create_label(), a.create_label());
            a.jmp(start)?;
            // The handler at 7C02H returns from the first interrupt, and exits at the second.
            a.cmp(bx, 1)?;
            a.je(last)?;
            a.mov(bx, 1)?;
            a.iret()?;
            a.set_label(&mut last)?;
            a.out(0xf4, al)?;
            a.set_label(&mut start)?;
            a.xor(ax, ax)?;
            a.mov(ds, ax)?;
            for vector in [0_u32, 0x42] {
                a.mov(word_ptr(vector * 4), 0x7c02)?;
                a.mov(word_ptr(vector * 4 + 2), ax)?;
            }
            a.int(0x42)?;
            a.xor(dx, dx)?;
            a.div(dx)
        },
        &["--trace", "exception"],
    );
    let stderr = text(&output);
    let lines: Vec<_> = stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{stderr}");
    assert!(
        lines[0].starts_with("exception cpu 0 INT 0x42 at 0x0:0x7c"),
        "{stderr}"
    );
    assert!(
        lines[1].starts_with("exception cpu 0 #DE at 0x0:0x7c"),
        "{stderr}"
    );
    assert!(lines[1].contains(", cpl 0: handler 0x0:0x7c02"), "{stderr}");
}

/// Calls INT 13H twice and INT 10H, and exits with 3 if a call did not set CF.
fn call_bios(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut fine = a.create_label();
    a.mov(sp, 0x7c00)?;
    a.int(0x13)?;
    a.int(0x13)?;
    a.clc()?;
    a.mov(ax, 0x1234)?;
    a.mov(dx, 0x5678)?;
    a.int(0x10)?;
    a.mov(bx, 3)?;
    a.jnc(fine)?;
    a.cmp(ax, 0x1234)?;
    a.jne(fine)?;
    a.cmp(dx, 0x5678)?;
    a.jne(fine)?;
    a.mov(bx, 5)?;
    a.set_label(&mut fine)?;
    a.mov(ax, bx)?;
    a.out(0xf4, al)
}

fn assert_bios_calls_are_named(output: &Output) {
    let stderr = text(output);
    assert_eq!(output.status.code(), Some(11), "{stderr}");
    let lines: Vec<_> = stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{stderr}");
    assert!(
        lines[0].contains("interrupt 0x13 (disk) of the BIOS: there is no BIOS"),
        "{stderr}"
    );
    assert!(lines[1].contains("interrupt 0x10 (video)"), "{stderr}");
}

#[test]
fn bios_calls_fail_and_are_named_in_the_interpreter() {
    assert_bios_calls_are_named(&run_real(call_bios, &[]));
}

#[test]
fn bios_calls_fail_and_are_named_under_kvm() {
    if has_kvm("bios_calls_fail_and_are_named_under_kvm") {
        assert_bios_calls_are_named(&run_real(call_bios, &["--engine", "kvm"]));
    }
}

fn halt(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.cli()?;
    a.hlt()
}

const HALTED: &str =
    "the guest halted for good: cpu 0 executed HLT with interrupts off before 0x7c02";

#[test]
fn halt_with_interrupts_off_ends_the_run_on_request() {
    let rows: [&[&str]; 3] = [&[], &["--cpus", "3"], &["--deterministic"]];
    for row in rows {
        let output = run_real(halt, &[row, &["--exit-on-halt"]].concat());
        let stderr = text(&output);
        assert_eq!(output.status.code(), Some(0), "{row:?}: {stderr}");
        assert!(
            stderr.starts_with(&format!("hindsight: {HALTED}")),
            "{stderr}"
        );
    }
    if has_kvm("halt_with_interrupts_off_ends_the_run_on_request") {
        let output = run_real(halt, &["--engine", "kvm", "--cpus", "2", "--exit-on-halt"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    }
}

#[test]
fn halt_with_interrupts_off_is_named_once() {
    let folder = tempfile::tempdir().unwrap();
    real(&folder.path().join("image"), halt);
    let arguments = [
        "run",
        "image",
        "--mode",
        "real",
        "--engine",
        "interp",
        "--timeout",
        "0.5",
    ];
    let output = command(folder.path(), &arguments).output().unwrap();
    let stderr = text(&output);
    assert_eq!(output.status.code(), Some(124), "{stderr}");
    assert_eq!(stderr.matches(HALTED).count(), 1, "{stderr}");
    assert!(stderr.contains("--exit-on-halt"), "{stderr}");
}

#[test]
fn deterministic_halt_with_a_running_timer_ends() {
    let output = run_real(
        |a| {
            // The interval timer runs, and its interrupt is unmasked.
            a.mov(al, 0x34)?;
            a.out(0x43, al)?;
            a.mov(al, 0x10)?;
            a.out(0x40, al)?;
            a.out(0x40, al)?;
            halt(a)
        },
        &["--deterministic"],
    );
    assert_eq!(output.status.code(), Some(4), "{}", text(&output));
}
