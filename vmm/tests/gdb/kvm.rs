//! A debugger of a guest that runs under KVM. What KVM does for a debugger differs from host to host:
//! `ci/lab-suite` runs sessions on two more. These here pass on any of them.

use crate::rig::{Guest, Run, in_order};

/// A machine that starts in KVM and may change its engine, whatever this host's KVM is.
const CHANGES: [&str; 3] = ["--switch-every=1000000000", "--trace", "mode"];

fn has_kvm(test: &str) -> bool {
    let usable = hindsight_vmm::kvm::open_device().is_ok();
    if !usable {
        eprintln!("skipped: {test}: /dev/kvm cannot be used here");
    }
    usable
}

#[test]
fn read_watchpoint_moves_the_guest_from_kvm_until_detach() {
    if !has_kvm("read_watchpoint_moves_the_guest_from_kvm_until_detach") {
        return;
    }
    let run = Run::start(Guest::Long("spin"), &CHANGES);
    let text = run.gdb(
        "print *(long *)&count >= 0
        rwatch *(int *)&stop
        continue
        continue
        stepi
        info symbol $pc
        detach
        ",
    );
    in_order(
        &text,
        &[
            "= 1",
            "Hardware read watchpoint 1: *(int *)&stop",
            "Hardware read watchpoint 1: *(int *)&stop",
            "spin in section .text",
            "detached",
        ],
    );
    let moved = "cpu 0 kvm -> interp: the debugger requires what KVM cannot do";
    assert!(run.stderr().contains(moved), "{}", run.stderr());
    run.wait_for("KVM", || run.stderr().contains("interp -> kvm"));
    run.gdb("kill\n");
    assert_eq!(run.finish().0, Some(0));
}

#[test]
fn branch_trace_needs_the_interpreter() {
    if !has_kvm("branch_trace_needs_the_interpreter") {
        return;
    }
    let session = "record btrace bts\nstepi 8\nrecord instruction-history\nkill\n";
    let run = Run::waiting(Guest::Long("spin"), &CHANGES);
    in_order(&run.gdb(session), &["incq", "cmpl", "je"]);
    let run = Run::waiting(Guest::Long("spin"), &["--engine=kvm"]);
    let text = run.gdb(session);
    let why = "this needs --engine auto or interp: KVM records no branches";
    assert!(text.contains(why), "{text}");
}

#[test]
fn trace_moves_the_guest_from_kvm_until_it_is_stopped() {
    if !has_kvm("trace_moves_the_guest_from_kvm_until_it_is_stopped") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("t");
    let file = ["--trace-out", trace.to_str().unwrap()];
    let run = Run::start(Guest::Long("spin"), &[&CHANGES[..], &file].concat());
    let text = run.gdb(
        "print *(long *)&count >= 0
        monitor trace start branches
        break spin
        continue
        continue
        monitor trace stop
        delete
        detach
        ",
    );
    in_order(
        &text,
        &[
            "branches are traced",
            "spin",
            "spin",
            " records, ",
            "detached",
        ],
    );
    let moved = "cpu 0 kvm -> interp: the debugger requires what KVM cannot do";
    assert!(run.stderr().contains(moved), "{}", run.stderr());
    run.wait_for("KVM", || run.stderr().contains("interp -> kvm"));
    run.gdb("kill\n");
    let run = Run::waiting(
        Guest::Long("spin"),
        &[&["--engine=kvm"], &file[..]].concat(),
    );
    let text = run.gdb("monitor trace start\nkill\n");
    let why = "trace: this needs --engine auto or interp: KVM records no branches";
    assert!(text.contains(why), "{text}");
}

#[test]
fn engine_kvm_refuses_what_kvm_lacks() {
    if !has_kvm("engine_kvm_refuses_what_kvm_lacks") {
        return;
    }
    let run = Run::waiting(Guest::Long("spin"), &["--engine=kvm"]);
    let text = run.gdb(
        "print $pc == (long)&_start
        rwatch *(int *)&stop
        continue
        delete
        monitor catch exception #PF
        continue
        print $pc == (long)&_start
        monitor catch off
        print *(long *)&count
        set variable *(int *)&stop = 1
        continue
        info threads
        continue
        ",
    );
    in_order(
        &text,
        &[
            "= 1",
            "this needs --engine auto or interp: no processor stops at reads but not at writes",
            "SIGTRAP",
            "this needs --engine auto or interp: no processor has breakpoints for that",
            "SIGTRAP",
            "= 1",
            "= 0",
            "triple-faulted",
            "SIGABRT",
            "vCPU 0",
            "exited with code 04",
        ],
    );
    assert_eq!(run.finish().0, Some(4));
}
