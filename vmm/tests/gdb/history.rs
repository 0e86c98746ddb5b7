//! Branch traces, stops of other kinds, and monitor commands.

use crate::rig::{Guest, Run, hindsight, in_order};

#[test]
fn branch_trace_is_recorded_and_replayed() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb(
        "break queue_put if job == 12
        continue
        record btrace bts
        break queue_take
        continue
        info record
        record function-call-history /c 1,20
        record instruction-history -,3
        reverse-stepi
        reverse-finish
        record goto begin
        stepi
        record goto end
        record stop
        continue
        ",
    );
    in_order(
        &text,
        &[
            "Breakpoint 1, queue_put",
            "Breakpoint 2, queue_take",
            "Active record target: record-btrace",
            "Recording format: Branch Trace Store.",
            "Recorded ",
            "queue_put",
            "work",
            "queue_take",
            "Process record is stopped",
            "Breakpoint 2, queue_take",
        ],
    );
}

#[test]
fn branch_trace_includes_single_steps() {
    let run = Run::waiting(Guest::Long("spin"), &[]);
    let text = run.gdb("record btrace bts\nstepi 6\nrecord instruction-history\nkill\n");
    in_order(&text, &["lea", "sti", "incq", "cmpl", "je", "incq"]);
}

#[test]
fn history_ends_at_its_stop_and_leaves_out_repetitions() {
    let options = ["--record", "branches=64,stop=queue_take", "--deterministic"];
    let run = Run::waiting(Guest::Sample, &options);
    // The guest goes on to its end.
    let text = run.gdb("continue\nrecord function-call-history\nkill\n");
    in_order(&text, &["queue_init", "main", "queue_put", "main"]);
    // It is the next instruction of the record, which gdb does not list.
    assert!(!text.contains("queue_take"), "{text}");
    let wrong = hindsight()
        .args(["run", "--record", "branches,stop=nowhere", "/dev/null"])
        .output()
        .unwrap();
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn recorded_branches_precede_the_debugger() {
    let run = Run::start(Guest::Long("spin"), &["--record", "branches=1000"]);
    run.gdb("set variable *(int *)&stop = 1\ndetach\n");
    run.wait_for("the report", || {
        run.stderr().contains("waits for a debugger")
    });
    let text = run.gdb("info record\nrecord instruction-history\nreverse-stepi\nx/i $pc\n");
    in_order(
        &text,
        &[
            "ud2",
            "record-btrace",
            "<spin",
            "<die",
            "lidt",
            "=> ",
            "lidt",
        ],
    );
}

#[test]
fn branch_trace_addresses_are_linear_in_real_mode() {
    let run = Run::waiting(Guest::Real("modes"), &["--record", "branches"]);
    let text = run.gdb(
        "monitor mode i8086
        unset tdesc filename
        break *real
        continue
        stepi
        stepi
        record instruction-history
        kill
        ",
    );
    in_order(
        &text,
        &[
            "<_start",
            "ljmp",
            "0x00007c0d",
            "<real",
            "mov    $0x1234,%bx",
        ],
    );
}

#[test]
fn record_option_rejects_invalid_limits() {
    for bad in ["all", "branches=0", "branches=x", "branches=99999999999"] {
        let output = hindsight()
            .args(["run", "/nonexistent", "--record", bad])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{bad}");
    }
}

#[test]
fn guest_stops_at_ports_exceptions_and_register_writes() {
    let run = Run::waiting(Guest::Real("modes"), &[]);
    let text = run.gdb(
        "monitor catch cr 0 3
        monitor catch msr 0xc0000080
        monitor catch exception #UD 14
        monitor watch-io 0x80 w
        continue
        continue
        continue
        continue
        continue
        monitor catch off
        monitor catch exception 99
        monitor watch-io 0x12345
        monitor watch-io off
        monitor catch nothing
        continue
        ",
    );
    in_order(
        &text,
        &[
            "caught: CR0 CR3 triple faults",
            "MSR 0xc0000080",
            "#UD #PF",
            "watched: 0x80-0x80 w",
            "CR0 = ",
            "CR3 = 0x1000",
            "MSR 0xc0000080 = 0x100",
            "CR0 = 0x8",
            "write to port 0x80",
        ],
    );
    for part in [
        "caught: triple faults",
        "99 is not an exception",
        "0x12345 is not a port",
        "watched: no port",
        "usage: monitor catch",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn guest_stops_at_the_instruction_that_raises_an_exception() {
    let run = Run::start(Guest::Long("spin"), &[]);
    let text = run.gdb(
        "monitor catch exception #UD
        set variable *(int *)&stop = 1
        continue
        x/i $pc
        continue
        continue
        ",
    );
    in_order(
        &text,
        &[
            "cpu 0: #UD",
            "SIGILL",
            "ud2",
            "triple-faulted",
            "SIGABRT",
            "exited with code 04",
        ],
    );
}

#[test]
fn monitor_commands_reply() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb(
        "monitor help pt
        monitor pt 0x200000
        monitor pt 0x8000000000
        monitor tlb
        monitor mem
        monitor gdt
        monitor idt
        monitor lapic
        monitor ioapic
        monitor lbr
        monitor bts
        monitor pmu
        monitor tsc
        monitor exits
        monitor stats
        monitor disas 0x200000 2
        monitor disas 0xffff800000000000
        monitor inject smi
        monitor inject irq 99
        monitor kaslr
        monitor msr 0x12345678
        monitor msr
        monitor reset
        ",
    );
    for part in [
        "monitor pt ADDRESS: walk",
        "PML4E at",
        "0x200000 is 0x200000",
        "not present",
        "0000000000000000-",
        "RAM",
        "64-bit code",
        "IDT at",
        "LVT LINT0 ",
        "pin 23 ",
        "no branches",
        "IA32_DS_AREA 0x0",
        "perf_global_ctrl",
        "tsc",
        "cpu 0: ",
        "host time ",
        "0x200000: lea",
        "0xffff800000000000 is not mapped",
        "no system-management mode",
        "there are interrupt lines 0 to 23",
        "no Linux kernel",
        "this processor has no MSR 0x12345678",
        "usage: monitor msr",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(run.finish().0, Some(8));
}

#[test]
fn injected_smi_reaches_its_handler() {
    let run = Run::waiting(Guest::Long("smi"), &["--cpu", "+smm"]);
    let text = run.gdb(
        "tbreak spin
        continue
        monitor inject smi
        continue
        ",
    );
    in_order(
        &text,
        &["an SMI is pending for cpu 0", "exited with code 03"],
    );
    assert_eq!(run.finish().0, Some(3));
}
