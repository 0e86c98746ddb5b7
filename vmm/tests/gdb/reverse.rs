//! Reverse execution in deterministic runs.

use crate::rig::{Guest, Run, in_order};

#[test]
fn reverse_continue_finds_the_writer_of_a_corrupted_word() {
    let run = Run::waiting(Guest::Sample, &["--deterministic"]);
    let text = run.gdb(
        "break print
        continue
        print jobs.guard == 0x5ca1ab1e
        watch jobs.guard
        reverse-continue
        backtrace
        reverse-continue
        print jobs.guard == 0x5ca1ab1e
        delete
        monitor goto
        reverse-stepi
        monitor goto
        stepi
        monitor goto
        break work
        reverse-continue
        print jobs.put
        reverse-stepi
        delete
        reverse-continue
        info symbol $pc
        continue
        monitor goto
        reverse-stepi
        x/i $pc
        continue
        continue
        ",
    );
    in_order(
        &text,
        &[
            "Breakpoint 1, print",
            "= 0",
            "Hardware watchpoint 2: jobs.guard",
            "Old value = 57",
            "New value = 27",
            "queue_put",
            "Old value = 27",
            "New value = 1554098974",
            "= 1",
            "work (count=20)",
            "= 0",
            "No more reverse-execution history.",
            "_start in section .text",
            "the guest ends the run with exit code 1",
            "SIGTRAP",
            "at instruction ",
            "out ",
            "the guest ends the run with exit code 1",
            "exited with code 03",
        ],
    );
    let (status, output) = run.finish();
    assert_eq!(status, Some(3));
    assert!(output.ends_with("the guard is broken\n"), "{output}");
}

#[test]
fn source_line_steps_work_in_both_directions() {
    let run = Run::waiting(Guest::Sample, &["--deterministic"]);
    let text = run.gdb(
        "break main.c:21 if job == 9
        continue
        next
        reverse-next
        print job
        step
        delete
        break queue_take
        continue
        finish
        reverse-step
        info line
        reverse-finish
        watch total
        reverse-continue
        frame
        kill
        ",
    );
    in_order(
        &text,
        &[
            "main.c:21",
            "work (count=20)",
            "= 9",
            "Breakpoint 2, queue_take",
            "Value returned is $",
            "queue_take",
            "Hardware watchpoint 3: total",
            "Old value = ",
            "work (count=20)",
        ],
    );
}

#[test]
fn goto_reaches_any_instruction() {
    let run = Run::waiting(Guest::Sample, &["--deterministic"]);
    let text = run.gdb(
        "monitor goto 100
        maintenance flush register-cache
        print $there = $pc
        monitor goto 10
        monitor goto 100
        maintenance flush register-cache
        print $there == $pc
        monitor goto x
        monitor goto 99999999
        maintenance flush register-cache
        reverse-stepi
        x/i $pc
        monitor goto 100
        maintenance flush register-cache
        print $there == $pc
        kill
        ",
    );
    in_order(
        &text,
        &[
            "at instruction 100",
            "at instruction 10",
            "at instruction 100",
            "x is not a number",
            "does not get to instruction 99999999",
            "out ",
            "at instruction 100",
            "$3 = 1",
        ],
    );
    assert!(text.contains("$2 = 1"), "{text}");
}

#[test]
fn reverse_execution_starts_from_a_crash() {
    let run = Run::start(Guest::Long("fault"), &["--deterministic"]);
    run.wait_for("the report", || {
        run.stderr().contains("waits for a debugger")
    });
    let text = run.gdb(
        "x/i $pc
        reverse-stepi
        x/i $pc
        watch *(long *)&count
        reverse-continue
        print *(long *)&count
        delete
        continue
        reverse-stepi
        monitor goto 99999999
        continue
        ",
    );
    in_order(
        &text,
        &[
            "ud2",
            "lidt",
            "Old value = 1000",
            "New value = 999",
            "= 999",
            "triple-faulted",
            "SIGABRT",
            "lidt",
            "does not get to instruction 99999999",
            "exited with code 04",
        ],
    );
    assert_eq!(run.finish().0, Some(4));
}

#[test]
fn run_without_a_client_ends_when_its_guest_ends_it() {
    let run = Run::start(Guest::Sample, &["--deterministic"]);
    assert_eq!(run.finish().0, Some(3));
}

/// With so little memory for checkpoints only the first one is kept.
#[test]
fn reverse_execution_works_with_a_single_checkpoint() {
    let arguments = ["--deterministic", "--checkpoint-memory", "4K"];
    let run = Run::start(Guest::Long("fault"), &arguments);
    run.wait_for("the report", || {
        run.stderr().contains("waits for a debugger")
    });
    let text = run.gdb("watch *(long *)&count\nreverse-continue\nkill\n");
    in_order(&text, &["Old value = 1000", "New value = 999"]);
}

#[test]
fn step_skips_interrupt_handlers() {
    let run = Run::waiting(Guest::Long("timer"), &["--deterministic"]);
    let text = run.gdb(
        "break *loop
        continue
        delete
        set variable $first = *(long *)&count
        set variable $ticked = *(long *)&ticks
        stepi 120
        info symbol $pc
        print *(long *)&count - $first
        print *(long *)&ticks > $ticked
        reverse-stepi 120
        info symbol $pc
        print *(long *)&count - $first
        print *(long *)&ticks == $ticked
        stepi 120
        info symbol $pc
        monitor step-irq on
        break handler
        stepi 90
        kill
        ",
    );
    in_order(
        &text,
        &[
            "loop in section .text",
            "= 30",
            "= 1",
            "loop in section .text",
            "= 0",
            "= 1",
            "loop in section .text",
            "step-irq is on",
            ", handler () at",
        ],
    );
}

#[test]
fn reverse_execution_needs_a_deterministic_run() {
    let run = Run::waiting(Guest::Sample, &[]);
    let text = run.gdb("reverse-stepi\nmonitor goto 1\nkill\n");
    assert!(text.contains("does not support"), "{text}");
    assert!(text.contains("only a run with --deterministic"), "{text}");
}

#[test]
fn reverse_continue_stops_within_a_repeated_instruction() {
    let run = Run::waiting(Guest::Long("writers"), &["--deterministic"]);
    let text = run.gdb(
        "continue
        monitor catch exception #PF
        reverse-continue
        info symbol $pc
        monitor catch off
        watch *((char *)&buffer + 50)
        reverse-continue
        info symbol $pc
        print $rcx
        continue
        break *writer
        reverse-continue
        kill
        ",
    );
    in_order(
        &text,
        &[
            "SIGABRT",
            "SIGSEGV",
            "bad in section .text",
            "Old value = 7",
            "New value = 0",
            "writer in section .text",
            "= 100",
            "Hardware watchpoint 1",
            "Old value = 0",
            "Hardware watchpoint 1",
            "Old value = 7",
        ],
    );
}

#[test]
fn step_of_a_faulting_instruction_ends_at_the_handler() {
    for engine in ["--deterministic", "--engine=interp"] {
        let run = Run::waiting(Guest::Long("debug"), &[engine]);
        let text = run.gdb("hbreak mine\ncontinue\nstepi\ninfo symbol $pc\nkill\n");
        in_order(&text, &["mine () at", "handler in section .text"]);
    }
}

#[test]
fn reverse_step_moves_the_selected_vcpu() {
    let run = Run::waiting(Guest::Long("two"), &["--deterministic", "--cpus", "2"]);
    let text = run.gdb(
        "break *spin0
        continue
        continue
        set scheduler-locking on
        stepi
        set scheduler-locking off
        delete
        thread 2
        print $before = $pc
        stepi
        print $before == $pc
        reverse-stepi
        print $before == $pc
        thread
        kill
        ",
    );
    in_order(
        &text,
        &[
            "hit Breakpoint 1, spin0",
            "hit Breakpoint 1, spin0",
            "[Switching to thread 2",
            "= 0",
            "= 1",
            "[Current thread is 2",
        ],
    );
}

#[test]
fn console_output_appears_once_after_going_back() {
    let run = Run::waiting(Guest::Sample, &["--deterministic"]);
    let text = run.gdb(
        "continue
        reverse-stepi
        monitor goto 100
        continue
        reverse-continue
        continue
        continue
        ",
    );
    in_order(
        &text,
        &["No more reverse-execution history", "exited with code 03"],
    );
    assert_eq!(run.finish(), (Some(3), "the guard is broken\n".to_owned()));
}
